// Gradients of the filter bank where H_out = 1: each tap of a channel reads one row of x, so grad_weight is a product
// of matrices, [filters x columns] times [columns x taps], and grad_input (stride 1) is [taps x filters] times [filters
// x columns] of the same two tiles.
//
// A block keeps one channel (at most 32 of its filters, at most 36 of its taps, 24 beside more than 16 filters) and
// walks every splits-th tile of tile_cols columns: x rows and grad_output rows arrive in shared memory by asynchronous
// copies, the next tile on its way while this one is used. For grad_weight a thread owns Filters filters by 6 taps and
// every slices-th group of 4 columns; a row of ones makes grad_bias one more tap. For grad_input a warp owns 6 rows, a
// lane 4 columns. Bytes: x and grad_output read once (grad_output again for each 36 or 24 taps, x for each 32 filters),
// grad_input written once.
//
// Order of the sums: a thread adds the products of at most 320 columns in float32; a warp's slices are added across
// lanes; warps add theirs in turn to the block's sums in float64; reduce_kernel adds the blocks' in float64.
#pragma once

#include "launch.cuh"
#include "reduce.cuh"

namespace depthconv::cuda {

struct BankGradientParameters {
  FastDivisor col_tiles, filter_groups, tap_groups, splits;
  const void *grad_output, *input, *weight;
  void* grad_input;                                     // null: not in this pass
  double* partial;                                      // [filter][K + 1][splits]; the last row is the bias
  int64_t grad_output_n, grad_output_c, grad_output_w;  // c: between filters
  int64_t input_n, input_c, input_tap, grad_input_n, grad_input_c, grad_input_tap;
  int64_t weight_filter, weight_tap;
  unsigned tiles;
  int multiplier, filters_a_block;
  int K, first_tap, taps, tap_chunk;
  int filter_rows, tap_rows, lanes;
  int tile_cols, W;
  bool with_bias;
};

constexpr int bank_flush = 256;  // columns that a thread sums before the block adds up

// Starts copying a pack to shared memory, or zeros where it is missing. `source` must be readable either way.
template <typename T, int V>
__device__ __forceinline__ void copy_pack(T* target, const T* source, bool present) {
  constexpr int bytes = sizeof(T) * V;
#if __CUDA_ARCH__ >= 800
  if constexpr (bytes >= 4) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(target));
    const int read = present ? bytes : 0;  // what is not read is filled with zeros
    if constexpr (bytes == 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "r"(read) : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(source), "n"(bytes), "r"(read)
                   : "memory");
    return;
  }
#endif
  *reinterpret_cast<Pack<T, V>*>(target) = present ? load<T, V>(source) : zero_pack<T, V>();
}

template <typename T, int V>
__device__ __forceinline__ Pack<T, V> shared_pack(const T* address) {
  using word = typename Word<sizeof(T) * V>::type;
  const word bits = *reinterpret_cast<const word*>(address);
  Pack<T, V> pack;
  memcpy(&pack, &bits, sizeof(bits));
  return pack;
}

// grad_input of one tile: rows `warp`, `warp + warps`, ... in units of 6.
template <typename T, int V, int Filters>
__device__ __forceinline__ void bank_input_tile(const BankGradientParameters& p, const T* dy, const float* weights,
                                                int filters, int taps, int count, T* target) {
  constexpr int together = Filters == 4 ? 4 : 1;  // filters a turn of the loop
  constexpr int packs = 4 / V, pitch = bank_tile + 16 / sizeof(T);
  const int lane = threadIdx.x % 32, warps = bank_gradient_threads / 32, row_weights = p.tap_rows * bank_weights;
  // A lane past the tile works on its first column: no branch, and nothing is stored.
  const T* column[packs];
#pragma unroll
  for (int g = 0; g < packs; ++g) column[g] = dy + ((lane + g * 32) * V < p.tile_cols ? (lane + g * 32) * V : 0);
  for (int unit = threadIdx.x / 32; unit * bank_taps < taps; unit += warps) {
    float sum[bank_taps][packs][V];
#pragma unroll
    for (int i = 0; i < bank_taps; ++i)
#pragma unroll
      for (int g = 0; g < packs; ++g)
#pragma unroll
        for (int v = 0; v < V; ++v) sum[i][g][v] = 0.0f;
    const float* w_row = weights + unit * bank_weights;
#pragma unroll together
    for (int q = 0; q < filters; ++q) {
      const float4 four = *reinterpret_cast<const float4*>(w_row + q * row_weights);
      const float2 two = *reinterpret_cast<const float2*>(w_row + q * row_weights + 4);
      const float w[bank_taps] = {four.x, four.y, four.z, four.w, two.x, two.y};
#pragma unroll
      for (int g = 0; g < packs; ++g) {
        const Pack<T, V> value = shared_pack<T, V>(column[g] + q * pitch);
#pragma unroll
        for (int i = 0; i < bank_taps; ++i)
#pragma unroll
          for (int v = 0; v < V; ++v) sum[i][g][v] += w[i] * widen(value.value[v]);
      }
    }
#pragma unroll
    for (int i = 0; i < bank_taps; ++i) {
      const int row = unit * bank_taps + i;
      if (row >= taps) break;
#pragma unroll
      for (int g = 0; g < packs; ++g) {
        const int col = (lane + g * 32) * V;
        if (col < count) store<T, V>(target + row * p.grad_input_tap + col, sum[i][g]);
      }
    }
  }
}

template <typename T, int V, int Filters>
__global__ void __launch_bounds__(bank_gradient_threads, bank_gradient_blocks(Filters))
    bank_gradient_kernel(const __grid_constant__ BankGradientParameters p) {
  constexpr int pitch = bank_tile + 16 / sizeof(T);
  const int tap_entries = p.tap_rows * bank_taps, filter_entries = p.filter_rows * Filters;
  const int entries = tap_entries * filter_entries, tile = (tap_entries + filter_entries) * pitch;
  extern __shared__ float4 shared_words[];
  double* totals = reinterpret_cast<double*>(shared_words);  // [filter][tap], as the weights, padded
  float* weights = reinterpret_cast<float*>(totals + entries);
  T* tiles = reinterpret_cast<T*>(weights + filter_entries * p.tap_rows * bank_weights);

  unsigned split, tap_group, filter_group;
  const unsigned channel =
      divide(divide(divide(blockIdx.x, p.splits, split), p.tap_groups, tap_group), p.filter_groups, filter_group);
  const int first_filter = static_cast<int>(filter_group) * p.filters_a_block;
  const int filters = min(p.filters_a_block, p.multiplier - first_filter);
  const int first = static_cast<int>(tap_group) * p.tap_chunk;  // counted from p.first_tap
  const int taps = min(p.tap_chunk, p.taps - first);
  const bool ones = p.with_bias && tap_group == 0;
  const int64_t co = static_cast<int64_t>(channel) * p.multiplier + first_filter;

  // Rows and columns that no copy fills hold zeros, the row of ones excepted.
  for (int i = threadIdx.x; i < 2 * tile; i += bank_gradient_threads) tiles[i] = narrow<T, float>(0.0f);
  const T* weight = static_cast<const T*>(p.weight) + co * p.weight_filter + (p.first_tap + first) * p.weight_tap;
  for (int i = threadIdx.x; i < entries; i += bank_gradient_threads) totals[i] = 0;
  for (int i = threadIdx.x; i < filter_entries * p.tap_rows * bank_weights; i += bank_gradient_threads) {
    const int word = i / bank_weights, q = word / p.tap_rows;
    const int k = word % p.tap_rows * bank_taps + i % bank_weights;
    weights[i] = q < filters && k < taps ? widen(__ldg(weight + q * p.weight_filter + k * p.weight_tap)) : 0.0f;
  }
  __syncthreads();
  if (ones)
    for (int i = threadIdx.x; i < p.tile_cols; i += bank_gradient_threads)
      tiles[taps * pitch + i] = tiles[tile + taps * pitch + i] = narrow<T, float>(1.0f);

  const T* x = static_cast<const T*>(p.input) + channel * p.input_c + first * p.input_tap;
  const T* dy = static_cast<const T*>(p.grad_output) + co * p.grad_output_c;
  T* dx = static_cast<T*>(p.grad_input) + channel * p.grad_input_c + first * p.grad_input_tap;

  // A thread copies the same pack of every rows_at_once-th row.
  const int packs = p.tile_cols / V, rows_at_once = bank_gradient_threads / packs;
  const int copy_row = threadIdx.x / packs, copy_col = threadIdx.x % packs * V;
  auto stage = [&](unsigned index, T* buffer) {
    unsigned col_tile;
    const unsigned n = divide(index, p.col_tiles, col_tile);
    const int start = static_cast<int>(col_tile) * p.tile_cols, count = min(p.tile_cols, p.W - start);
    // Groups of 4 columns are used whole.
    if (copy_row >= rows_at_once || copy_col >= (count + 3) / 4 * 4) return;
    const bool present = copy_col < count;
    const int col = present ? start + copy_col : start;
    const T* source = x + n * p.input_n + copy_row * p.input_tap + col;
    T* target = buffer + copy_row * pitch + copy_col;
    for (int row = copy_row; row < taps; row += rows_at_once) {
      copy_pack<T, V>(target, source, present);
      source += rows_at_once * p.input_tap;
      target += rows_at_once * pitch;
    }
    source = dy + n * p.grad_output_n + copy_row * p.grad_output_c + col * p.grad_output_w;
    target = buffer + (tap_entries + copy_row) * pitch + copy_col;
    for (int row = copy_row; row < filters; row += rows_at_once) {
      copy_pack<T, V>(target, source, present);
      source += rows_at_once * p.grad_output_c;
      target += rows_at_once * pitch;
    }
  };
  auto commit = [] {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  };

  // grad_weight: which filters, taps and columns are this thread's. Neighbours read rows on other banks.
  const int pair = threadIdx.x % p.lanes, slice = threadIdx.x / p.lanes;
  const int slices = bank_gradient_threads / p.lanes;
  const int qb = pair % p.filter_rows, kb = pair / p.filter_rows;
  const bool working = kb < p.tap_rows;
  float sum[Filters][bank_taps];
#pragma unroll
  for (int f = 0; f < Filters; ++f)
#pragma unroll
    for (int i = 0; i < bank_taps; ++i) sum[f][i] = 0.0f;
  auto flush = [&] {
    for (int offset = p.lanes; offset < 32; offset *= 2) {
#pragma unroll
      for (int f = 0; f < Filters; ++f)
#pragma unroll
        for (int i = 0; i < bank_taps; ++i) sum[f][i] += __shfl_down_sync(0xffffffffu, sum[f][i], offset);
    }
    const int team = max(p.lanes, 32);
    const bool adds = working && static_cast<int>(threadIdx.x) % team < p.lanes;
    for (int turn = 0; turn < bank_gradient_threads / team; ++turn) {
      if (adds && static_cast<int>(threadIdx.x) / team == turn) {
#pragma unroll
        for (int f = 0; f < Filters; ++f)
#pragma unroll
          for (int i = 0; i < bank_taps; ++i)
            totals[(qb + f * p.filter_rows) * tap_entries + kb * bank_taps + i] += static_cast<double>(sum[f][i]);
      }
      __syncthreads();
    }
#pragma unroll
    for (int f = 0; f < Filters; ++f)
#pragma unroll
      for (int i = 0; i < bank_taps; ++i) sum[f][i] = 0.0f;
  };

  const unsigned step = p.splits.divisor;
  int summed = 0;
  T *now = tiles, *next = tiles + tile;
  if (split < p.tiles) stage(split, now);
  commit();
  for (unsigned index = split; index < p.tiles; index += step) {
    if (index + step < p.tiles) stage(index + step, next);
    commit();
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
    __syncthreads();
    unsigned col_tile;
    const unsigned n = divide(index, p.col_tiles, col_tile);
    const int start = static_cast<int>(col_tile) * p.tile_cols, count = min(p.tile_cols, p.W - start);
    const T* dy_tile = now + tap_entries * pitch;
    const int groups = (count + 3) / 4;
    if (working) {
      const T* taps_at = now + kb * bank_taps * pitch;
      const T* filters_at = dy_tile + qb * pitch;
      for (int g = slice; g < groups; g += slices) {
        float value[Filters][4];
#pragma unroll
        for (int f = 0; f < Filters; ++f) {
          const Pack<T, 4> four = shared_pack<T, 4>(filters_at + f * p.filter_rows * pitch + g * 4);
#pragma unroll
          for (int v = 0; v < 4; ++v) value[f][v] = widen(four.value[v]);
        }
#pragma unroll
        for (int i = 0; i < bank_taps; ++i) {
          const Pack<T, 4> four = shared_pack<T, 4>(taps_at + i * pitch + g * 4);
#pragma unroll
          for (int f = 0; f < Filters; ++f)
#pragma unroll
            for (int v = 0; v < 4; ++v) sum[f][i] += value[f][v] * widen(four.value[v]);
        }
      }
    }
    if (p.grad_input)
      bank_input_tile<T, V, Filters>(p, dy_tile, weights, filters, taps, count, dx + n * p.grad_input_n + start);
    __syncthreads();
    summed += (groups + slices - 1) / slices * 4;
    if (summed >= bank_flush) {
      flush();
      summed = 0;
    }
    T* used = now;
    now = next;
    next = used;
  }
  flush();

  // One partial a filter and tap; taps whose row lies outside the input have none of their own.
  for (int i = threadIdx.x; i < filters * (p.K + 1); i += bank_gradient_threads) {
    const int q = i / (p.K + 1), k = i % (p.K + 1), local = k - p.first_tap - first;
    double total = 0;
    if (k == p.K) {
      if (!ones) continue;
      total = totals[q * tap_entries + taps];
    } else if (local >= 0 && local < taps) {
      total = totals[q * tap_entries + local];
    } else if (tap_group > 0 || (k >= p.first_tap && k < p.first_tap + p.taps)) {
      continue;  // another block's
    }
    p.partial[((co + q) * (p.K + 1) + k) * p.splits.divisor + split] = total;
  }
}

using BankGradientKernel = void (*)(BankGradientParameters);

template <typename T, int V>
BankGradientKernel pick_bank_gradient(int filters) {
  switch (filters) {
    case 1: return bank_gradient_kernel<T, V, 1>;
    case 2: return bank_gradient_kernel<T, V, 2>;
    default: return bank_gradient_kernel<T, V, 4>;
  }
}

// grad_weight, grad_bias where it is wanted, and grad_input where the plan has it here, into `partial`.
template <typename T>
const char* launch_bank_gradient(const BackwardArguments& a, const BankGradientPlan& plan, double* partial,
                                 cudaStream_t stream) {
  const Geometry& g = a.geometry;
  BankGradientParameters p{};
  p.col_tiles = FastDivisor(plan.col_tiles);
  p.filter_groups = FastDivisor(plan.filter_groups);
  p.tap_groups = FastDivisor(plan.tap_groups);
  p.splits = FastDivisor(plan.splits);
  p.grad_output = a.grad_output.data;
  p.weight = a.weight.data;
  p.partial = partial;
  p.grad_output_n = a.grad_output.stride.n;
  p.grad_output_c = a.grad_output.stride.c;
  p.grad_output_w = a.grad_output.stride.w;
  p.input = at<T>(a.input.data, (plan.first_tap * g.dilation.h - g.padding.h) * a.input.stride.h);
  p.input_n = a.input.stride.n;
  p.input_c = a.input.stride.c;
  p.input_tap = g.dilation.h * a.input.stride.h;
  if (plan.with_input) {
    p.grad_input = a.grad_input.data;  // row 0 is the first tap's
    p.grad_input_n = a.grad_input.stride.n;
    p.grad_input_c = a.grad_input.stride.c;
    p.grad_input_tap = a.grad_input.stride.h;
  }
  p.weight_filter = a.weight.filter;
  p.weight_tap = a.weight.tap;
  p.tiles = static_cast<unsigned>(plan.tiles);
  p.multiplier = static_cast<int>(g.multiplier);
  p.filters_a_block = plan.filters_a_block;
  p.K = static_cast<int>(g.K);
  p.first_tap = static_cast<int>(plan.first_tap);
  p.taps = static_cast<int>(plan.taps);
  p.tap_chunk = plan.tap_chunk;
  p.filter_rows = plan.filter_rows;
  p.tap_rows = plan.tap_rows;
  p.lanes = plan.lanes;
  p.tile_cols = plan.tile_cols;
  p.W = static_cast<int>(g.W);
  p.with_bias = a.grad_bias.data;
  const BankGradientKernel kernel = plan.vector_width == 4   ? pick_bank_gradient<T, 4>(plan.filters)
                                    : plan.vector_width == 2 ? pick_bank_gradient<T, 2>(plan.filters)
                                                             : pick_bank_gradient<T, 1>(plan.filters);
  if (const char* error = allow_shared(reinterpret_cast<const void*>(kernel), plan.shared_bytes)) return error;
  const unsigned grid = static_cast<unsigned>(g.C * plan.filter_groups * plan.tap_groups * plan.splits);
  kernel<<<grid, bank_gradient_threads, plan.shared_bytes, stream>>>(p);
  return launch_error();
}

}  // namespace depthconv::cuda
