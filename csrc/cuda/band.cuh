// The forward kernel of half types, on tensor cores (sm_80 and later): sixteen output rows of one column are a band
// matrix, made of the taps, times the input rows that they read, so m16n8k16 products with float32 sums replace the
// multiply-adds, which would take longer than the memory for more than a few taps.
//
// A warp owns up to 8 columns (V elements side by side) of a tile of rows and walks down it, sixteen output rows at a
// time. The last `Steps` blocks of sixteen input rows stay in registers as the products' right-hand sides, so each row
// is loaded once a tile; the next blocks are on their way into the warp's queue in shared memory. For the products lane
// l holds one column of input rows 2 (l % 4) + {0, 1, 8, 9}, and columns l % 4 + {0, 4} of output rows l / 4 + {0, 8}.
// Bytes: x once and y once, and (K - 1) / rows of x again from L2.
//
// The band's zeros meet rows that an output does not read. Where such a row holds an inf or NaN the product is wrong,
// so a warp that has loaded one computes those outputs again, tap by tap.
#pragma once

#include <type_traits>

#include "forward.cuh"
#include "queue.cuh"

namespace depthconv::cuda {

struct BandParameters {
  FastDivisor col_groups, tiles, row_step, channels, cols, multiplier;
  const void *input, *weight, *bias;
  void* output;
  Strides input_stride, output_stride;
  int64_t weight_filter, weight_tap, bias_step;
  unsigned units;  // warps of work
  unsigned images, packed, group_cols;
  int taps, rows, H, H_out;
  int stride_h, padding_h, dilation_h;
};

template <typename T>
__device__ __forceinline__ void multiply_add(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                             unsigned b0, unsigned b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == 2 && std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// `mark` stays zero until a pair of elements holds an inf or a NaN: 0 times either is NaN, and NaN stays.
template <typename T>
__device__ __forceinline__ void mark_infinite(unsigned& mark, unsigned pair) {
#if __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>)
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(mark) : "r"(pair), "r"(0u));
  else
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(mark) : "r"(pair), "r"(0u));
#endif
}

template <typename T>
__device__ __forceinline__ unsigned narrow_pair(float low, float high) {
  unsigned bits;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&bits, &pair, 4);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&bits, &pair, 4);
  }
  return bits;
}

template <typename T>
__device__ __forceinline__ unsigned join(T low, T high) {
  unsigned short a, b;
  memcpy(&a, &low, 2);
  memcpy(&b, &high, 2);
  return a | static_cast<unsigned>(b) << 16;
}

// Two rows of a pack, element by element side by side.
template <typename T, int V>
__device__ __forceinline__ void pair_rows(const Pack<T, V>& low, const Pack<T, V>& high, unsigned (&pair)[V]) {
  if constexpr (V == 1) {
    pair[0] = join(low.value[0], high.value[0]);
  } else {
    unsigned a[V / 2], b[V / 2];
    memcpy(a, &low, sizeof(a));
    memcpy(b, &high, sizeof(b));
#pragma unroll
    for (int i = 0; i < V / 2; ++i) {
      pair[2 * i] = __byte_perm(a[i], b[i], 0x5410);
      pair[2 * i + 1] = __byte_perm(a[i], b[i], 0x7632);
    }
  }
}

// Where one of a warp's columns lies.
struct BandColumn {
  unsigned n, wo;
  bool valid;
};

__device__ __forceinline__ BandColumn band_column(const BandParameters& p, unsigned image_group, unsigned col_group,
                                                  unsigned column) {
  BandColumn at;
  const unsigned image = divide(col_group * p.group_cols + column, p.cols, at.wo);
  at.n = image_group * p.packed + image;
  at.valid = column < p.group_cols && image < p.packed && at.n < p.images;
  return at;
}

constexpr unsigned band_queue_bytes(int vector_width) { return band_threads * band_depth * 4 * 2 * vector_width; }

template <typename T, int V, int Steps, int Stride>
__global__ void __launch_bounds__(band_threads, band_blocks(V, Steps, Stride))
    band_forward_kernel(const __grid_constant__ BandParameters p) {
  constexpr int bands = 2 * Steps + Stride;  // distinct registers of the band matrices: those 8 apart repeat
  constexpr int kept = Steps - Stride;
  const int lane = threadIdx.x % 32, pair = lane % 4, line = lane / 4;
  unsigned unit = blockIdx.x * (band_threads / 32) + threadIdx.x / 32;
  if (unit >= p.units) return;
  unsigned col_group, tile, channel, phase, unused;
  unit = divide(unit, p.col_groups, col_group);
  unit = divide(unit, p.tiles, tile);
  unit = divide(unit, p.channels, channel);
  const int row_step = static_cast<int>(p.row_step.divisor);
  const int row = static_cast<int>(divide(tile, p.row_step, phase) * row_step * p.rows + phase);
  if (row >= p.H_out) return;
  const int left = (p.H_out - row + row_step - 1) / row_step;
  const int rows = left < p.rows ? left : p.rows;
  const int needed = Stride * (rows - 1) + p.taps;  // input rows, dilation_h apart from `first` on
  const int first = row * p.stride_h - p.padding_h;

  auto input_column = [&](const BandColumn& at) {
    return static_cast<const T*>(p.input) + at.n * p.input_stride.n +
           divide(channel, p.multiplier, unused) * p.input_stride.c + first * p.input_stride.h + at.wo * V;
  };
  auto output_column = [&](const BandColumn& at) {
    return static_cast<T*>(p.output) + at.n * p.output_stride.n + channel * p.output_stride.c +
           row * p.output_stride.h + at.wo * V;
  };
  extern __shared__ double shared_memory[];
  const BandColumn read = band_column(p, unit, col_group, lane % 8);
  const T* x = input_column(read);
  const int64_t pitch = p.dilation_h * p.input_stride.h;
  // The warp's queue: blocks of 16 rows by 8 columns. A lane copies column lane % 8 of every fourth row, so that eight
  // lanes copy one run of memory. Columns are swapped about by the row, so that reading meets no bank twice.
  Pack<T, V>* queue = reinterpret_cast<Pack<T, V>*>(shared_memory) + threadIdx.x / 32 * (band_depth * 128);
  auto slot = [&](int block, int row, int column) {
    return queue + (block % band_depth * 16 + row) * 8 + (column ^ (row / 2 % 4));
  };
  const int blocks_of_rows = kept + Stride * ((rows + 15) / 16);
  int pushed = 0;
  auto push = [&] {
    if (pushed < blocks_of_rows) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int of_block = lane / 8 + 4 * i, j = pushed * 16 + of_block;
        const bool present =
            read.valid && j < needed && static_cast<unsigned>(first + j * p.dilation_h) < static_cast<unsigned>(p.H);
        copy_pack<T, V>(slot(pushed, of_block, lane % 8), present ? x + j * pitch : static_cast<const T*>(p.input),
                        present);
      }
      ++pushed;
    }
    commit_step();
  };
#pragma unroll
  for (int s = 0; s < band_depth - 1; ++s) push();
  unsigned ring[Steps][2][V], marks[Steps];
  const int column = line % 2 * 4 + line / 2;  // of the products: results 2 pair + e are column pair + 4 e
  int taken = 0;
  auto take = [&](int place) {
    wait_for_step<band_depth - 2>();
    __syncwarp();  // the other lanes' copies are there, and their reads of the slot that push() fills are over
    unsigned mark = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 2 * pair + 8 * h;
      pair_rows<T, V>(read_pack<T, V>(slot(taken, row, column)), read_pack<T, V>(slot(taken, row + 1, column)),
                      ring[place][h]);
#pragma unroll
      for (int v = 0; v < V; ++v) mark_infinite<T>(mark, ring[place][h][v]);
    }
    marks[place] = mark;
    ++taken;
    push();
  };

  // Band word m: taps 8 (m - Stride) + 2 pair - Stride line, and the next one.
  const T* weight = static_cast<const T*>(p.weight) + channel * p.weight_filter;
  unsigned band[bands];
#pragma unroll
  for (int m = 0; m < bands; ++m) {
    const int k = 8 * (m - Stride) + 2 * pair - Stride * line;
    const T* tap = weight + k * p.weight_tap;
    const T none = narrow<T, float>(0.f);
    band[m] = join(static_cast<unsigned>(k) < static_cast<unsigned>(p.taps) ? __ldg(tap) : none,
                   static_cast<unsigned>(k + 1) < static_cast<unsigned>(p.taps) ? __ldg(tap + p.weight_tap) : none);
  }
  const float bias = p.bias ? widen(__ldg(static_cast<const T*>(p.bias) + channel * p.bias_step)) : 0.f;
  const BandColumn places[2] = {band_column(p, unit, col_group, pair), band_column(p, unit, col_group, pair + 4)};
  T* y[2] = {output_column(places[0]), output_column(places[1])};
  const int64_t y_pitch = row_step * p.output_stride.h;

#pragma unroll
  for (int s = 0; s < kept; ++s) take(s + Stride);
  for (int done = 0; done < rows; done += 16) {
#pragma unroll
    for (int s = 0; s < kept; ++s) {
      marks[s] = marks[s + Stride];
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int v = 0; v < V; ++v) ring[s][h][v] = ring[s + Stride][h][v];
    }
#pragma unroll
    for (int s = 0; s < Stride; ++s) take(kept + s);
    unsigned result[2][2][(V + 1) / 2];
#pragma unroll
    for (int pack = 0; pack < V; pack += 2) {
      float sum[2][4] = {};
#pragma unroll
      for (int v = pack; v < V && v < pack + 2; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[v - pack][i] = bias;
#pragma unroll
        for (int s = 0; s < Steps; ++s)
          multiply_add<T>(sum[v - pack], band[2 * s + Stride], band[2 * s], band[2 * s + 1 + Stride], band[2 * s + 1],
                          ring[s][0][v], ring[s][1][v]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) result[i / 2][i % 2][pack / 2] = narrow_pair<T>(sum[0][i], sum[1][i]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = done + line + 8 * h;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (!places[e].valid || i >= rows) continue;
        typename Word<V * 2>::type bits;
        memcpy(&bits, result[h][e], sizeof(bits));
        *reinterpret_cast<typename Word<V * 2>::type*>(y[e] + i * y_pitch) = bits;
      }
    }
    unsigned mark = 0;
#pragma unroll
    for (int s = 0; s < Steps; ++s) mark |= marks[s];
    if (!__any_sync(0xffffffffu, mark != 0)) continue;
#pragma unroll 1
    for (int part = 0; part < 4; ++part) {
      const int i = done + line + part / 2 * 8;
      const BandColumn at = band_column(p, unit, col_group, pair + part % 2 * 4);
      if (!at.valid || i >= rows) continue;
      const T* column = input_column(at);
      T* target = output_column(at) + i * y_pitch;
#pragma unroll 1
      for (int v = 0; v < V; ++v) {
        float total = bias;
#pragma unroll 1
        for (int k = 0; k < p.taps; ++k) {
          const int j = Stride * i + k;
          const bool present = static_cast<unsigned>(first + j * p.dilation_h) < static_cast<unsigned>(p.H);
          total += widen(weight[k * p.weight_tap]) * (present ? widen(column[j * pitch + v]) : 0.f);
        }
        target[v] = narrow<T, float>(total);
      }
    }
  }
}

using BandKernel = void (*)(BandParameters);

template <typename T, int V>
BandKernel pick_band(int steps, int stride) {
  if (stride == 2) return steps == 3 ? band_forward_kernel<T, V, 3, 2> : nullptr;
  switch (steps) {
    case 2: return band_forward_kernel<T, V, 2, 1>;
    case 3: return band_forward_kernel<T, V, 3, 1>;
    case 5: return band_forward_kernel<T, V, 5, 1>;
  }
  return nullptr;
}

template <typename T>
BandKernel pick_band(const ForwardPlan& plan) {
  switch (plan.vector_width) {
    case 4: return pick_band<T, 4>(plan.band_steps, plan.step);
    case 8: return pick_band<T, 8>(plan.band_steps, plan.step);
  }
  return nullptr;
}

// Follows the plan, plan.images of the batch a launch.
template <typename T>
const char* launch_band(const Convolution& c, const ForwardPlan& plan, cudaStream_t stream) {
  const BandKernel kernel = pick_band<T>(plan);
  if (!kernel) return "depthconv: the plan names a kernel that was not compiled";
  const Tiling& t = plan.tiling;
  const unsigned shared = band_queue_bytes(plan.vector_width);
  if (const char* error = allow_shared(reinterpret_cast<const void*>(kernel), shared)) return error;
  for (int64_t n = 0; n < c.N; n += plan.images) {
    const int64_t images = std::min(plan.images, c.N - n);
    BandParameters p;
    p.col_groups = FastDivisor(t.col_groups);
    p.tiles = FastDivisor(t.tiles);
    p.row_step = FastDivisor(t.row_step);
    p.channels = FastDivisor(c.C_out);
    p.cols = FastDivisor(t.cols);
    p.multiplier = FastDivisor(c.multiplier);
    p.input = at<T>(c.input.data, n * c.input.stride.n);
    p.weight = c.weight.data;
    p.bias = c.bias.data;
    p.output = const_cast<T*>(at<T>(c.output.data, n * c.output.stride.n));
    p.input_stride = c.input.stride;
    p.output_stride = c.output.stride;
    p.weight_filter = c.weight.filter;
    p.weight_tap = c.weight.tap;
    p.bias_step = c.bias.step;
    p.units = static_cast<unsigned>(c.C_out * t.col_groups * t.tiles * ceil_div(images, plan.packed));
    p.images = static_cast<unsigned>(images);
    p.packed = static_cast<unsigned>(plan.packed);
    p.group_cols = static_cast<unsigned>(t.block_cols);
    p.taps = static_cast<int>(c.K);
    p.rows = t.rows;
    p.H = static_cast<int>(c.H);
    p.H_out = static_cast<int>(c.H_out);
    p.stride_h = static_cast<int>(c.stride.h);
    p.padding_h = static_cast<int>(c.padding.h);
    p.dilation_h = static_cast<int>(c.dilation.h);
    const unsigned blocks = (p.units + band_threads / 32 - 1) / (band_threads / 32);
    kernel<<<blocks, band_threads, shared, stream>>>(p);
    if (const char* error = launch_error()) return error;
  }
  return nullptr;
}

}  // namespace depthconv::cuda
