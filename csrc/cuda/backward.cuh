// Backward kernels. Every sum over a channel is made without atomics, in an order that depends on sizes alone:
//   1. a thread sums the products of one tile of rows in registers;
//   2. adds that to its running sum of the tap in shared memory, with compensation (Kahan), tile after tile;
//   3. a warp adds the block's threads in float64, lane by lane and then across lanes, into one partial a tap and
//   block;
//   4. `reduce_kernel` adds a tap's partials in float64, lane by lane and then across lanes.
#pragma once

#include <type_traits>

#include "launch.cuh"
#include "reduce.cuh"

namespace depthconv::cuda {

struct BackwardParameters {
  DeviceTiling tiling;  // of one channel: of the input planes in one_pass, of the output planes in weight_gradient
  FastDivisor width;    // channels_last: lines are (w, tile, n)
  const void *grad_output, *input, *weight;
  void* grad_input;
  double* partial;  // [filter][K + 1][splits]; the last row is the bias
  Strides grad_output_stride, input_stride, grad_input_stride;
  int64_t weight_filter, weight_tap;
  int channels, multiplier;  // channels: that the grid covers (C, or C_out)
  int taps, first_tap_step;  // K; taps a block of weight_gradient sums
  int splits, tap_chunks, rows;
  int N, H, W, H_out, W_out;
  int stride_h, stride_w, padding_h, padding_w, dilation_h;
  bool with_bias;
};

// Adds a term to a running sum and keeps what rounding lost (Kahan).
template <typename A>
__device__ __forceinline__ void compensated_add(A& sum, A& lost, A term) {
  const A y = term - lost, before = sum, after = before + y;
  // An infinite sum must stay infinite: its compensation would be NaN.
  lost = isfinite(after) ? (after - before) - y : A(0);
  sum = after;
}

// Running sums of one thread in shared memory: value and compensation of every tap, threads side by side.
template <typename A>
struct TapSums {
  A* value;
  int threads;

  __device__ __forceinline__ A& sum(int slot) { return value[(2 * slot) * threads + threadIdx.x]; }
  __device__ __forceinline__ A& lost(int slot) { return value[(2 * slot + 1) * threads + threadIdx.x]; }
  __device__ __forceinline__ void clear(int slots) {
    for (int slot = 0; slot < slots; ++slot) sum(slot) = lost(slot) = A(0);
  }
  __device__ __forceinline__ void add(int slot, A term) { compensated_add(sum(slot), lost(slot), term); }
  __device__ __forceinline__ double total(int slot, int thread) const {
    return static_cast<double>(value[(2 * slot) * threads + thread]) -
           static_cast<double>(value[(2 * slot + 1) * threads + thread]);
  }
};

// Step 3. Rows: all threads of a block share a channel. channels_last: threads with the same lane do.
template <typename A, bool ChannelsLast>
__device__ __forceinline__ void store_partials(const BackwardParameters& p, const TapSums<A>& sums, int group,
                                               int split, int first_tap, int taps, bool with_bias) {
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (int slot = warp; slot < taps + (with_bias ? 1 : 0); slot += warps) {
    double total = 0;
    for (int w = 0; w < warps; ++w) total += sums.total(slot, w * 32 + lane);
    const int row = slot < taps ? first_tap + slot : p.taps;
    int channel = group;
    bool write = lane == 0;
    if (ChannelsLast) {
      channel = group * 32 + lane;
      write = channel < p.channels;
    } else {
      total = warp_sum(total);
    }
    if (write) p.partial[(static_cast<int64_t>(channel) * (p.taps + 1) + row) * p.splits + split] = total;
  }
}

// Where a thread's turn lies: its column, tile and image.
struct Turn {
  unsigned col, n;
  int row;
};

template <bool ChannelsLast>
__device__ __forceinline__ bool find_turn(const BackwardParameters& p, unsigned turn, unsigned tx, unsigned ty,
                                          int rows, Turn& at) {
  unsigned group_col, tile;
  const unsigned group_line = divide(turn, p.tiling.col_groups, group_col);
  unsigned line = group_line * p.tiling.block_lines + ty;
  at.col = group_col * p.tiling.block_cols.divisor + tx;
  if (ty >= p.tiling.block_lines || line >= p.tiling.lines) return false;
  if (ChannelsLast)
    line = divide(line, p.width, at.col);
  else if (at.col >= p.tiling.cols)
    return false;
  at.n = divide(line, p.tiling.tiles, tile);
  at.row = first_row(p.tiling, tile, rows);
  return true;
}

// One chunk of taps of a tile in one_pass: streams the grad_output rows that x rows 0..Rows-1 meet through these taps.
// grad_output row j (counted from the window's start) meets x row t with tap t + Taps - 1 - j.
template <int Taps, int Rows, typename T, int V>
__device__ __forceinline__ void pass_taps(accumulate_t<T> (&grad_input)[Rows][V], const Pack<T, V> (&x)[Rows],
                                          int x_rows, const T* row, int64_t pitch, int first, int step, int height,
                                          const T* weight, int64_t weight_tap, TapSums<accumulate_t<T>>& sums, int slot,
                                          int bias_from, accumulate_t<T>& bias) {
  using A = accumulate_t<T>;
  constexpr int window = Rows + Taps - 1;
  constexpr int budget = V == 8 ? 4 : 6;  // loads in flight
  constexpr int ahead = window < budget ? window : budget;
  Pack<T, V> buffer[ahead];
  auto valid = [&](int j) { return static_cast<unsigned>(first + j * step) < static_cast<unsigned>(height); };
  auto fetch = [&](int j) { return valid(j) ? load<T, V>(row + j * pitch) : zero_pack<T, V>(); };
#pragma unroll
  for (int j = 0; j < ahead; ++j) buffer[j] = fetch(j);
  A w[Taps], grad_weight[Taps];
#pragma unroll
  for (int k = 0; k < Taps; ++k) {
    w[k] = widen(__ldg(weight + k * weight_tap));
    grad_weight[k] = A(0);
  }
#pragma unroll
  for (int j = 0; j < window; ++j) {
    A dy[V];
#pragma unroll
    for (int v = 0; v < V; ++v) dy[v] = widen(buffer[j % ahead].value[v]);
    if (j + ahead < window) buffer[j % ahead] = fetch(j + ahead);
    // A pair exists only where both rows do: a zero standing for a missing row must not meet an inf of the other.
    if (!valid(j)) continue;
    if (j >= bias_from) {
#pragma unroll
      for (int v = 0; v < V; ++v) bias += dy[v];
    }
#pragma unroll
    for (int t = 0; t < Rows; ++t) {
      const int k = t + Taps - 1 - j;
      if (k < 0 || k >= Taps) continue;
#pragma unroll
      for (int v = 0; v < V; ++v) grad_input[t][v] += w[k] * dy[v];
    }
    if (x_rows == Rows) {
#pragma unroll
      for (int t = 0; t < Rows; ++t) {
        const int k = t + Taps - 1 - j;
        if (k < 0 || k >= Taps) continue;
#pragma unroll
        for (int v = 0; v < V; ++v) grad_weight[k] += widen(x[t].value[v]) * dy[v];
      }
    } else {
#pragma unroll
      for (int t = 0; t < Rows; ++t) {
        const int k = t + Taps - 1 - j;
        if (k < 0 || k >= Taps || t >= x_rows) continue;
#pragma unroll
        for (int v = 0; v < V; ++v) grad_weight[k] += widen(x[t].value[v]) * dy[v];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < Taps; ++k) sums.add(slot + k, grad_weight[k]);
}

// grad_input (unless it is null), grad_weight and grad_bias for stride 1 in one pass: input row i needs exactly the
// grad_output window i + p - k * d for both sums.
//
// A thread owns one column of Rows input rows at a time: x in registers, the grad_output window streamed past it. A
// block keeps one channel (channels_last: 32 of them, one a lane) and walks every splits-th turn of the channel's
// lines. Bytes: x and grad_output read once, grad_input written once; (Taps - 1) / Rows of grad_output again from L1 or
// L2.
template <typename T, int V, int Taps, int Rows, bool ChannelsLast>
__global__ void __launch_bounds__(reduction_threads, 3) one_pass_kernel(const __grid_constant__ BackwardParameters p) {
  using A = accumulate_t<T>;
  extern __shared__ double shared[];
  TapSums<A> sums{reinterpret_cast<A*>(shared), reduction_threads};
  const int split = blockIdx.x % p.splits, group = blockIdx.x / p.splits;
  const int taps = Taps > 0 ? Taps : p.taps;
  sums.clear(taps + 1);
  unsigned tx;
  const unsigned ty = divide(threadIdx.x, p.tiling.block_cols, tx);
  const unsigned channel = ChannelsLast ? group * 32 + tx : group;
  const unsigned turns =
      p.tiling.col_groups.divisor * ((p.tiling.lines + p.tiling.block_lines - 1) / p.tiling.block_lines);
  if (channel < p.channels) {
    const T* weight = static_cast<const T*>(p.weight) + channel * p.weight_filter;
    for (unsigned turn = split; turn < turns; turn += p.splits) {
      Turn at;
      if (!find_turn<ChannelsLast>(p, turn, tx, ty, Rows, at) || at.row >= p.H) continue;
      const int row_step = static_cast<int>(p.tiling.row_step.divisor);
      const unsigned col = at.col * V;
      const T* x_row = static_cast<const T*>(p.input) + at.n * p.input_stride.n + channel * p.input_stride.c +
                       at.row * p.input_stride.h + col * p.input_stride.w;
      Pack<T, V> x[Rows];
      A grad_input[Rows][V];
      const int left = (p.H - at.row + row_step - 1) / row_step;
      const int x_rows = left < Rows ? left : Rows;
#pragma unroll
      for (int t = 0; t < Rows; ++t) {
        x[t] = t < x_rows ? load<T, V>(x_row + t * (row_step * p.input_stride.h)) : zero_pack<T, V>();
#pragma unroll
        for (int v = 0; v < V; ++v) grad_input[t][v] = A(0);
      }
      // The window of taps [k0, k0 + n) starts at grad_output row at.row + p - d * (k0 + n - 1).
      const T* dy_column = static_cast<const T*>(p.grad_output) + at.n * p.grad_output_stride.n +
                           channel * p.grad_output_stride.c + (col + p.padding_w) * p.grad_output_stride.w;
      const int64_t pitch = p.dilation_h * p.grad_output_stride.h;
      A bias = A(0);
      // grad_bias: a tile owns the grad_output rows that tap 0 reads, the first tile also those before them.
      const bool first_tile = at.row < row_step;
      const int bias_from = !p.with_bias ? Rows + Taps : first_tile ? 0 : Taps - 1;
      auto pass = [&](auto chunk, int k0) {
        constexpr int n = decltype(chunk)::value;
        const int first = at.row + p.padding_h - p.dilation_h * (k0 + n - 1);
        pass_taps<n, Rows, T, V>(grad_input, x, x_rows, dy_column + first * p.grad_output_stride.h, pitch, first,
                                 p.dilation_h, p.H_out, weight + k0 * p.weight_tap, p.weight_tap, sums, k0,
                                 Taps > 0 ? bias_from : Rows + n, bias);
      };
      if constexpr (Taps > 0) {
        pass(std::integral_constant<int, Taps>{}, 0);
      } else {
        int k0 = 0;
        for (; k0 + 8 <= p.taps; k0 += 8) pass(std::integral_constant<int, 8>{}, k0);
        if (p.taps & 4) pass(std::integral_constant<int, 4>{}, k0), k0 += 4;
        if (p.taps & 2) pass(std::integral_constant<int, 2>{}, k0), k0 += 2;
        if (p.taps & 1) pass(std::integral_constant<int, 1>{}, k0);
        if (p.with_bias) {
          const int last = at.row + p.padding_h + (Rows - 1) * p.dilation_h;
          const int own = at.row + p.padding_h;
          // From the first row of this chain that exists; the padding of a height stride's phase may be negative.
          int row = own;
          if (first_tile || own < 0) row = (own % p.dilation_h + p.dilation_h) % p.dilation_h;
          for (; row <= last && row < p.H_out; row += p.dilation_h) {
            const Pack<T, V> dy = load<T, V>(dy_column + row * p.grad_output_stride.h);
#pragma unroll
            for (int v = 0; v < V; ++v) bias += widen(dy.value[v]);
          }
        }
      }
      if (p.with_bias) sums.add(taps, bias);
      T* dx = static_cast<T*>(p.grad_input) + at.n * p.grad_input_stride.n + channel * p.grad_input_stride.c +
              at.row * p.grad_input_stride.h + col * p.grad_input_stride.w;
#pragma unroll
      for (int t = 0; t < Rows; ++t)
        if (t < x_rows && p.grad_input) store<T, V>(dx + t * (row_step * p.grad_input_stride.h), grad_input[t]);
    }
  }
  store_partials<A, ChannelsLast>(p, sums, group, split, 0, taps, p.with_bias);
}

// One chunk of taps of a tile in weight_gradient: streams the x rows that grad_output rows 0..Rows-1 read.
template <int Taps, int Rows, typename T, int V>
__device__ __forceinline__ void meet_taps(const Pack<T, V> (&dy)[Rows], int dy_rows, const T* row, int64_t pitch,
                                          int first, int step, int height, TapSums<accumulate_t<T>>& sums, int slot) {
  using A = accumulate_t<T>;
  constexpr int window = Rows + Taps - 1;
  A grad_weight[Taps];
#pragma unroll
  for (int k = 0; k < Taps; ++k) grad_weight[k] = A(0);
#pragma unroll
  for (int j = 0; j < window; ++j) {
    if (static_cast<unsigned>(first + j * step) >= static_cast<unsigned>(height)) continue;
    const Pack<T, V> x = load<T, V>(row + j * pitch);
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const int k = j - i;
      if (k < 0 || k >= Taps || i >= dy_rows) continue;
#pragma unroll
      for (int v = 0; v < V; ++v) grad_weight[k] += widen(x.value[v]) * widen(dy[i].value[v]);
    }
  }
#pragma unroll
  for (int k = 0; k < Taps; ++k) sums.add(slot + k, grad_weight[k]);
}

// grad_weight and grad_bias alone, any stride: seen from grad_output, of which each element is read once.
//
// A thread owns one column of Rows grad_output rows at a time, kept in registers, and streams the x rows past them. A
// block keeps one channel (channels_last: 32, one a lane) and one chunk of taps.
// Bytes: grad_output once a chunk of taps, x once, and (Taps - 1) / Rows of x again from L1 or L2.
template <typename T, int V, int Rows, bool ChannelsLast>
__global__ void __launch_bounds__(reduction_threads, 4)
    weight_gradient_kernel(const __grid_constant__ BackwardParameters p) {
  using A = accumulate_t<T>;
  extern __shared__ double shared[];
  TapSums<A> sums{reinterpret_cast<A*>(shared), reduction_threads};
  const int split = blockIdx.x % p.splits;
  const int chunk = blockIdx.x / p.splits % p.tap_chunks, group = blockIdx.x / p.splits / p.tap_chunks;
  const int first_tap = chunk * p.first_tap_step;
  const int taps = p.first_tap_step < p.taps - first_tap ? p.first_tap_step : p.taps - first_tap;
  const bool with_bias = p.with_bias && chunk == 0;
  sums.clear(taps + 1);
  unsigned tx;
  const unsigned ty = divide(threadIdx.x, p.tiling.block_cols, tx);
  const unsigned channel = ChannelsLast ? group * 32 + tx : group;
  const unsigned turns =
      p.tiling.col_groups.divisor * ((p.tiling.lines + p.tiling.block_lines - 1) / p.tiling.block_lines);
  if (channel < p.channels) {
    for (unsigned turn = split; turn < turns; turn += p.splits) {
      Turn at;
      if (!find_turn<ChannelsLast>(p, turn, tx, ty, Rows, at) || at.row >= p.H_out) continue;
      const int row_step = static_cast<int>(p.tiling.row_step.divisor);
      const unsigned col = at.col * V;
      const T* dy_row = static_cast<const T*>(p.grad_output) + at.n * p.grad_output_stride.n +
                        channel * p.grad_output_stride.c + at.row * p.grad_output_stride.h +
                        col * p.grad_output_stride.w;
      Pack<T, V> dy[Rows];
      const int left = (p.H_out - at.row + row_step - 1) / row_step;
      const int dy_rows = left < Rows ? left : Rows;
#pragma unroll
      for (int i = 0; i < Rows; ++i)
        dy[i] = i < dy_rows ? load<T, V>(dy_row + i * (row_step * p.grad_output_stride.h)) : zero_pack<T, V>();
      if (with_bias) {
        A bias = A(0);
#pragma unroll
        for (int i = 0; i < Rows; ++i)
#pragma unroll
          for (int v = 0; v < V; ++v) bias += widen(dy[i].value[v]);
        sums.add(taps, bias);
      }
      const int wi = static_cast<int>(col) * p.stride_w - p.padding_w;
      if (static_cast<unsigned>(wi) >= static_cast<unsigned>(p.W)) continue;
      const T* x_column = static_cast<const T*>(p.input) + at.n * p.input_stride.n +
                          channel / p.multiplier * p.input_stride.c + wi * p.input_stride.w;
      const int64_t pitch = p.dilation_h * p.input_stride.h;
      auto meet = [&](auto count, int k0) {
        constexpr int n = decltype(count)::value;
        const int first = at.row * p.stride_h - p.padding_h + (first_tap + k0) * p.dilation_h;
        meet_taps<n, Rows, T, V>(dy, dy_rows, x_column + first * p.input_stride.h, pitch, first, p.dilation_h, p.H,
                                 sums, k0);
      };
      int k0 = 0;
      for (; k0 + 8 <= taps; k0 += 8) meet(std::integral_constant<int, 8>{}, k0);
      if (taps & 4) meet(std::integral_constant<int, 4>{}, k0), k0 += 4;
      if (taps & 2) meet(std::integral_constant<int, 2>{}, k0), k0 += 2;
      if (taps & 1) meet(std::integral_constant<int, 1>{}, k0);
    }
  }
  store_partials<A, ChannelsLast>(p, sums, group, split, first_tap, taps, with_bias);
}

// grad_input for a stride above 1: row i gathers grad_output row (i + p - k * d) / s over the taps that divide evenly.
// Those taps lie s / gcd(s, d) apart and their rows d / gcd(s, d); the first is found once a row.
//
// A thread owns one column (V elements side by side) of gather_rows input rows. Bytes: grad_output K / s times, mostly
// from L1, grad_input written once.
struct GatherParameters {
  FastDivisor cols, tiles, channels, stride_h, stride_w, divisor;  // divisor: gcd(stride_h, dilation_h)
  const void *grad_output, *weight;
  void* grad_input;
  Strides grad_output_stride, grad_input_stride;
  int64_t weight_filter, weight_tap;
  unsigned count;
  int taps, multiplier, H, H_out, W_out;
  int padding_h, padding_w, dilation_h;
  bool channels_last;  // the channel varies fastest over the threads, then the column
};

template <typename T, int V>
__global__ void __launch_bounds__(256, 4) strided_input_gradient_kernel(const __grid_constant__ GatherParameters p) {
  using A = accumulate_t<T>;
  unsigned rest = blockIdx.x * blockDim.x + threadIdx.x, col, tile, channel;
  if (rest >= p.count) return;
  if (p.channels_last) rest = divide(rest, p.channels, channel);
  rest = divide(rest, p.cols, col);
  unsigned n = divide(rest, p.tiles, tile);
  if (!p.channels_last) n = divide(n, p.channels, channel);
  col *= V;
  unsigned off_w, off, step, unused;
  const int wo = static_cast<int>(divide(col + p.padding_w, p.stride_w, off_w));
  const bool column = off_w == 0 && wo < p.W_out;
  const int stride = p.stride_h.divisor, tap_step = stride / p.divisor.divisor,
            row_step = p.dilation_h / p.divisor.divisor;
  divide(p.dilation_h, p.stride_h, step);
  int i = static_cast<int>(tile) * gather_rows;
  int top = static_cast<int>(divide(i + p.padding_h, p.stride_h, off));
  const T* dy = static_cast<const T*>(p.grad_output) + n * p.grad_output_stride.n + wo * p.grad_output_stride.w;
  T* dx = static_cast<T*>(p.grad_input) + n * p.grad_input_stride.n + channel * p.grad_input_stride.c +
          i * p.grad_input_stride.h + col * p.grad_input_stride.w;
  const int end = min(i + gather_rows, p.H);
  for (; i < end; ++i, dx += p.grad_input_stride.h) {
    A sum[V];
#pragma unroll
    for (int v = 0; v < V; ++v) sum[v] = A(0);
    // The first tap whose row divides evenly: k * d and i + p leave the same remainder.
    int first = 0, met = 0;
    while (met != static_cast<int>(off) && first < p.taps) {
      ++first;
      met += step;
      if (met >= stride) met -= stride;
    }
    if (column && first < p.taps) {
      const int first_row = top - static_cast<int>(divide(first * p.dilation_h - met, p.stride_h, unused));
      for (int q = 0; q < p.multiplier; ++q) {
        const int64_t filter = static_cast<int64_t>(channel) * p.multiplier + q;
        const T* source = dy + filter * p.grad_output_stride.c;
        const T* weight = static_cast<const T*>(p.weight) + filter * p.weight_filter;
        int row = first_row;
        for (int k = first; k < p.taps && row >= 0; k += tap_step, row -= row_step) {
          if (row >= p.H_out) continue;
          const A w = widen(__ldg(weight + k * p.weight_tap));
          const Pack<T, V> value = load<T, V>(source + row * p.grad_output_stride.h);
#pragma unroll
          for (int v = 0; v < V; ++v) sum[v] += w * widen(value.value[v]);
        }
      }
    }
    store<T, V>(dx, sum);
    if (++off == static_cast<unsigned>(stride)) off = 0, ++top;
  }
}

using BackwardKernel = void (*)(BackwardParameters);

}  // namespace depthconv::cuda
