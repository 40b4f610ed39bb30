// Kernels for planes whose rows follow each other without a gap (stride 1 along the height), at any width and
// alignment: odd widths, padded widths, small planes, W = 1. A plane is one run of memory, so a block copies what it
// needs into shared memory in 16-byte words, computes from there, and writes runs back in words.
//
// A block owns a slab: some rows of one plane, or several whole planes that follow each other. A thread owns one column
// of an odd number of rows at a time, so that columns a tile apart fall on different banks. Bytes: x and y
// (grad_output, x and grad_input in the backward) once, halo rows again from L2.
#pragma once

#include "backward.cuh"
#include "forward.cuh"
#include "stage.cuh"

namespace depthconv::cuda {

struct FlatParameters {
  FastDivisor row_groups, plane_groups, width, tiles, row_step, channels, multiplier;
  const void *input, *weight, *bias, *grad_output;
  void *output, *grad_input;
  double* partial;
  int64_t input_n, input_c, output_n, output_c;        // forward: strides between planes
  int64_t grad_output_n, grad_output_c, grad_input_n;  // backward: grad_input is contiguous within an image
  int64_t weight_filter, weight_tap, bias_step;
  int images, planes, planes_a_block, rows_a_block;
  int H, H_out, padding, dilation, taps;
  int input_width, stride_w, padding_w;  // forward: output column c reads input column c * stride_w - padding_w
  int stage_elements;                    // elements of shared memory for the first run
  int splits;
  bool with_bias, staged;
};

// A block's slab: rows [row, row + rows) of planes [plane, plane + planes).
struct Slab {
  int plane, planes, row, rows;
  unsigned image;
};

__device__ __forceinline__ Slab find_slab(const FlatParameters& p, unsigned index, int height) {
  Slab s;
  unsigned row_group, group;
  s.image = divide(divide(index, p.row_groups, row_group), p.plane_groups, group);
  s.plane = group * p.planes_a_block;
  s.planes = min(p.planes_a_block, p.planes - s.plane);
  s.row = row_group * p.rows_a_block;
  s.rows = min(p.rows_a_block, height - s.row);
  return s;
}

// A thread's column within a slab: plane b of it, column c, rows from `row` on (counted from the slab's first).
struct Column {
  int b, c, row;
};

template <int Rows>
__device__ __forceinline__ Column find_column(const FlatParameters& p, unsigned unit) {
  Column at;
  unsigned c, tile, phase;
  const unsigned rest = divide(unit, p.width, c);
  at.b = static_cast<int>(divide(rest, p.tiles, tile));
  const unsigned base = divide(tile, p.row_step, phase);
  at.c = static_cast<int>(c);
  at.row = static_cast<int>(base * p.row_step.divisor * Rows + phase);
  return at;
}

template <typename T, int V>
__device__ __forceinline__ Pack<T, V> load_shared(const T* address) {
  using word = typename Word<sizeof(T) * V>::type;
  const word bits = *reinterpret_cast<const word*>(address);
  Pack<T, V> pack;
  memcpy(&pack, &bits, sizeof(bits));
  return pack;
}

// V: elements of a column, more than one where rows are aligned to that.
template <typename T, int V, int Taps, int Rows>
__global__ void __launch_bounds__(flat_threads) flat_forward_kernel(const __grid_constant__ FlatParameters p) {
  using A = accumulate_t<T>;
  extern __shared__ double shared_memory[];
  T* x = reinterpret_cast<T*>(shared_memory);
  const Slab slab = find_slab(p, blockIdx.x, p.H_out);
  const int width = p.width.divisor * V, x_width = p.input_width, reach = (Taps - 1) * p.dilation;
  const bool whole =
      p.planes_a_block > 1;  // planes follow each other, so each is staged from its first row to its last
  const int top = whole ? 0 : max(0, slab.row - p.padding);
  const int x_rows = whole ? p.H : max(0, min(p.H, slab.row + slab.rows + reach - p.padding) - top);
  unsigned unused;
  const int64_t input_plane = divide(slab.plane, p.multiplier, unused);
  const T* source = static_cast<const T*>(p.input) + slab.image * p.input_n + input_plane * p.input_c +
                    top * static_cast<int64_t>(x_width);
  const int x_offset = word_offset(source);
  stage(x, source, slab.planes * x_rows * x_width);
  T* target = static_cast<T*>(p.output) + slab.image * p.output_n + slab.plane * p.output_c +
              slab.row * static_cast<int64_t>(width);
  // A warp's columns are neighbours, so results go straight to memory, unless rows are shorter than that.
  T* y = x + p.stage_elements;
  const int y_offset = word_offset(target);
  wait_for_stage();

  const unsigned units = slab.planes * p.tiles.divisor * p.width.divisor;
  const int x_pitch = p.dilation * x_width, y_pitch = p.dilation * width;
  A w[Taps], bias = A(0);
  int loaded = -1;
  for (unsigned unit = threadIdx.x; unit < units; unit += blockDim.x) {
    const Column at = find_column<Rows>(p, unit);
    if (at.row >= slab.rows) continue;
    unsigned channel;
    divide(slab.plane + at.b, p.channels, channel);
    if (static_cast<int>(channel) != loaded) {
      loaded = static_cast<int>(channel);
      const T* weight = static_cast<const T*>(p.weight) + channel * p.weight_filter;
#pragma unroll
      for (int k = 0; k < Taps; ++k) w[k] = widen(__ldg(weight + k * p.weight_tap));
      if (p.bias) bias = widen(__ldg(static_cast<const T*>(p.bias) + channel * p.bias_step));
    }
    A sum[Rows][V];
#pragma unroll
    for (int i = 0; i < Rows; ++i)
#pragma unroll
      for (int v = 0; v < V; ++v) sum[i][v] = bias;
    // Rows first + j * dilation, of which those from `low` to below `high` are there.
    const int first = slab.row + at.row - p.padding - top;
    int low = 0, high = Rows + Taps - 1;
    if (first < 0 || first + (Rows + Taps - 2) * p.dilation >= x_rows) {
      unsigned rest;
      low = first < 0 ? divide(-first + p.dilation - 1, p.row_step, rest) : 0;
      high = first < x_rows ? divide(x_rows - first + p.dilation - 1, p.row_step, rest) : 0;
    }
    const int column = at.c * V * p.stride_w - p.padding_w;
    if (static_cast<unsigned>(column) >= static_cast<unsigned>(x_width)) high = 0;
    const T* source_row = x + x_offset + (at.b * x_rows + first) * x_width + column;
#pragma unroll
    for (int j = 0; j < Rows + Taps - 1; ++j) {
      const Pack<T, V> pack = j >= low && j < high ? load_shared<T, V>(source_row) : zero_pack<T, V>();
      source_row += x_pitch;
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        if (j - i < 0 || j - i >= Taps) continue;
#pragma unroll
        for (int v = 0; v < V; ++v) sum[i][v] += w[j - i] * widen(pack.value[v]);
      }
    }
    const int rows = (slab.rows - at.row + p.dilation - 1) / p.dilation;
    if (V == 1 && p.staged) {
      T* result = y + y_offset + (at.b * slab.rows + at.row) * width + at.c;
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        if (i < rows) *result = narrow<T, A>(sum[i][0]);
        result += y_pitch;
      }
    } else {
      T* result = target + (at.b * p.H_out + at.row) * width + at.c * V;
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        if (i < rows) store<T, V>(result, sum[i]);
        result += y_pitch;
      }
    }
  }
  if (V > 1 || !p.staged) return;
  __syncthreads();
  unstage(target, y, y_offset, slab.planes * slab.rows * width);
}

// Running sums of one thread in registers, with compensation.
template <typename A, int Slots>
struct RegisterSums {
  A sum[Slots], lost[Slots];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Slots; ++i) sum[i] = lost[i] = A(0);
  }
  __device__ __forceinline__ void add(int slot, A term) { compensated_add(sum[slot], lost[slot], term); }
};

// grad_input (unless it is null), grad_weight and grad_bias in one pass. A block keeps its slab's place and walks every
// splits-th image, so a thread's running sums stay with one channel; grad_input takes x's place in shared memory.
template <typename T, int Taps>
__global__ void __launch_bounds__(flat_threads, 4) flat_backward_kernel(const __grid_constant__ FlatParameters p) {
  using A = accumulate_t<T>;
  extern __shared__ double shared_memory[];
  T* x = reinterpret_cast<T*>(shared_memory);
  T* dy = x + p.stage_elements;
  const unsigned place = blockIdx.x / p.splits, split = blockIdx.x % p.splits;
  const Slab slab = find_slab(p, place, p.H);
  const int width = p.width.divisor, reach = (Taps - 1) * p.dilation;
  // grad_output rows that the slab's rows meet: i + p - k * d.
  const bool whole = p.planes_a_block > 1;
  const int top = whole ? 0 : max(0, slab.row + p.padding - reach);
  const int dy_rows = whole ? p.H_out : max(0, min(p.H_out, slab.row + slab.rows + p.padding) - top);
  const int count = slab.planes * slab.rows * width;
  const unsigned units = slab.planes * p.tiles.divisor * width;
  RegisterSums<A, Taps + 1> sums;
  sums.clear();
  for (unsigned image = split; image < p.images; image += p.splits) {
    const T* x_source = static_cast<const T*>(p.input) + image * p.input_n + slab.plane * p.input_c +
                        slab.row * static_cast<int64_t>(width);
    const T* dy_source = static_cast<const T*>(p.grad_output) + image * p.grad_output_n + slab.plane * p.grad_output_c +
                         top * static_cast<int64_t>(width);
    const int x_offset = word_offset(x_source), dy_offset = word_offset(dy_source);
    stage(x, x_source, count);
    stage(dy, dy_source, slab.planes * dy_rows * width);
    wait_for_stage();
    for (unsigned unit = threadIdx.x; unit < units; unit += blockDim.x) {
      const Column at = find_column<flat_rows>(p, unit);
      if (at.row >= slab.rows) continue;
      const T* weight = static_cast<const T*>(p.weight) + (slab.plane + at.b) * p.weight_filter;
      T* column = x + x_offset + (at.b * slab.rows + at.row) * width + at.c;
      const int x_rows = min(flat_rows, (slab.rows - at.row + p.dilation - 1) / p.dilation);
      A value[flat_rows], grad_input[flat_rows], w[Taps], grad_weight[Taps], bias = A(0);
#pragma unroll
      for (int t = 0; t < flat_rows; ++t) {
        value[t] = t < x_rows ? widen(column[t * p.dilation * width]) : A(0);
        grad_input[t] = A(0);
      }
#pragma unroll
      for (int k = 0; k < Taps; ++k) {
        w[k] = widen(__ldg(weight + k * p.weight_tap));
        grad_weight[k] = A(0);
      }
      const int first = slab.row + at.row + p.padding - reach;
      const int base = dy_offset + (at.b * dy_rows + first - top) * width + at.c;
      const int bias_from = !p.with_bias ? flat_rows + Taps : slab.row + at.row < p.dilation ? 0 : Taps - 1;
#pragma unroll
      for (int j = 0; j < flat_rows + Taps - 1; ++j) {
        const int row = first + j * p.dilation;
        // A pair exists only where both rows do: a zero standing for a missing row must not meet an inf of the other.
        if (row < 0 || row >= top + dy_rows) continue;
        const A gradient = widen(dy[base + j * p.dilation * width]);
        if (j >= bias_from) bias += gradient;
#pragma unroll
        for (int t = 0; t < flat_rows; ++t) {
          const int k = t + Taps - 1 - j;
          if (k < 0 || k >= Taps || t >= x_rows) continue;
          grad_input[t] += w[k] * gradient;
          grad_weight[k] += value[t] * gradient;
        }
      }
#pragma unroll
      for (int k = 0; k < Taps; ++k) sums.add(k, grad_weight[k]);
      if (p.with_bias) sums.add(Taps, bias);
#pragma unroll
      for (int t = 0; t < flat_rows; ++t)
        if (t < x_rows) column[t * p.dilation * width] = narrow<T, A>(grad_input[t]);
    }
    __syncthreads();
    T* target = static_cast<T*>(p.grad_input) + image * p.grad_input_n +
                (slab.plane * static_cast<int64_t>(p.H) + slab.row) * width;
    unstage(target, x, x_offset, p.grad_input ? count : 0);
    __syncthreads();
  }
  // Threads of a plane are neighbours: unit / (tiles * width) is its plane. A warp adds a plane's threads for one slot.
  double* total = shared_memory;
  const int a_plane = slab.planes == 1 ? blockDim.x : p.tiles.divisor * width;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
  for (int slot = 0; slot < Taps + 1; ++slot) {
    if (slot == Taps && !p.with_bias) continue;
    total[threadIdx.x] = static_cast<double>(sums.sum[slot]) - static_cast<double>(sums.lost[slot]);
    __syncthreads();
    for (int b = warp; b < slab.planes; b += warps) {
      double sum = 0;
      for (int i = lane; i < a_plane; i += 32) sum += total[b * a_plane + i];
      sum = warp_sum(sum);
      const int row_group = slab.row / p.rows_a_block;
      if (lane == 0)
        p.partial[(static_cast<int64_t>(slab.plane + b) * (Taps + 1) + slot) * (p.splits * p.row_groups.divisor) +
                  split * p.row_groups.divisor + row_group] = sum;
    }
    __syncthreads();
  }
}

using FlatKernel = void (*)(FlatParameters);

template <typename T, int V>
FlatKernel pick_flat_forward(int64_t taps, int rows) {
#define DEPTHCONV_CASE(K)                                                                       \
  case K:                                                                                       \
    if constexpr (V == 1)                                                                       \
      return rows == flat_rows ? flat_forward_kernel<T, V, K, flat_rows>                        \
                               : flat_forward_kernel<T, V, K, flat_tall_rows>;                  \
    if constexpr (V > 1 && flat_vector_taps(K)) return flat_forward_kernel<T, V, K, flat_rows>; \
    break;
  switch (taps) { DEPTHCONV_FLAT_TAPS(DEPTHCONV_CASE) }
#undef DEPTHCONV_CASE
  return nullptr;
}

template <typename T>
FlatKernel pick_flat_forward(int64_t taps, const FlatPlan& plan) {
  if (plan.vector_width == 1) return pick_flat_forward<T, 1>(taps, plan.rows);
  if constexpr (sizeof(T) == 2)
    return plan.vector_width == 2 ? pick_flat_forward<T, 2>(taps, plan.rows) : pick_flat_forward<T, 4>(taps, plan.rows);
  return nullptr;
}
#define DEPTHCONV_CASE(K)                                                                \
  case K:                                                                                \
    if constexpr (K <= flat_backward_most(sizeof(T))) return flat_backward_kernel<T, K>; \
    break;
template <typename T>
FlatKernel pick_flat_backward(int64_t taps) {
  switch (taps) { DEPTHCONV_FLAT_TAPS(DEPTHCONV_CASE) }
  return nullptr;
}
#undef DEPTHCONV_CASE

inline FlatParameters flat_parameters(const FlatPlan& plan, int64_t width, int64_t channels) {
  FlatParameters p{};
  p.row_groups = FastDivisor(plan.row_groups);
  p.plane_groups = FastDivisor(plan.plane_groups);
  p.width = FastDivisor(width);
  p.tiles = FastDivisor(plan.tiles);
  p.channels = FastDivisor(channels);
  p.images = static_cast<int>(plan.images);
  p.planes = static_cast<int>(plan.planes);
  p.planes_a_block = plan.planes_a_block;
  p.rows_a_block = plan.rows_a_block;
  p.stage_elements = plan.stage_elements;
  p.splits = plan.splits;
  return p;
}

template <typename T>
const char* launch_flat_forward(const Convolution& c, const FlatPlan& plan, cudaStream_t stream) {
  FlatParameters p = flat_parameters(plan, c.W_out / plan.vector_width, c.C_out);
  p.staged = plan.staged;
  p.input_width = static_cast<int>(c.W);
  p.stride_w = static_cast<int>(c.stride.w);
  p.padding_w = static_cast<int>(c.padding.w);
  p.row_step = FastDivisor(c.dilation.h);
  p.multiplier = FastDivisor(c.multiplier);
  p.input = c.input.data;
  p.weight = c.weight.data;
  p.bias = c.bias.data;
  p.output = c.output.data;
  p.input_n = c.input.stride.n;
  p.output_n = c.output.stride.n;
  // Planes that follow each other need not lie a channel stride apart: with C = 1 that stride means nothing.
  p.input_c = plan.joined ? c.H * c.W : c.input.stride.c;
  p.output_c = plan.joined ? c.H_out * c.W_out : c.output.stride.c;
  p.weight_filter = c.weight.filter;
  p.weight_tap = c.weight.tap;
  p.bias_step = c.bias.step;
  p.H = static_cast<int>(c.H);
  p.H_out = static_cast<int>(c.H_out);
  p.padding = static_cast<int>(c.padding.h);
  p.dilation = static_cast<int>(c.dilation.h);
  const FlatKernel kernel = pick_flat_forward<T>(c.K, plan);
  if (!kernel) return "depthconv: the plan names a kernel that was not compiled";
  if (const char* error = allow_shared(reinterpret_cast<const void*>(kernel), plan.shared_bytes)) return error;
  kernel<<<static_cast<unsigned>(plan.blocks), flat_threads, plan.shared_bytes, stream>>>(p);
  return launch_error();
}

template <typename T>
const char* launch_flat_backward(const BackwardArguments& a, const FlatPlan& plan, bool with_bias, double* partial,
                                 cudaStream_t stream) {
  const Geometry& g = a.geometry;
  FlatParameters p = flat_parameters(plan, g.W, g.C);
  p.row_step = FastDivisor(g.dilation.h);
  p.input = a.input.data;
  p.weight = a.weight.data;
  p.grad_output = a.grad_output.data;
  p.grad_input = a.grad_input.data;
  p.partial = partial;
  p.input_n = a.input.stride.n;
  p.input_c = a.input.stride.c;
  p.grad_output_n = a.grad_output.stride.n;
  p.grad_output_c = a.grad_output.stride.c;
  p.grad_input_n = a.grad_input.stride.n;
  p.weight_filter = a.weight.filter;
  p.weight_tap = a.weight.tap;
  p.H = static_cast<int>(g.H);
  p.H_out = static_cast<int>(g.H_out);
  p.padding = static_cast<int>(g.padding.h);
  p.dilation = static_cast<int>(g.dilation.h);
  p.with_bias = with_bias;
  const FlatKernel kernel = pick_flat_backward<T>(g.K);
  if (!kernel) return "depthconv: the plan names a kernel that was not compiled";
  if (const char* error = allow_shared(reinterpret_cast<const void*>(kernel), plan.shared_bytes)) return error;
  kernel<<<static_cast<unsigned>(plan.blocks), flat_threads, plan.shared_bytes, stream>>>(p);
  return launch_error();
}

}  // namespace depthconv::cuda
