// The forward kernel: y = bias + sum over taps, for rows (vectors along the width) and channels_last (vectors along the
// channels). It also computes grad_input of height stride 1, which is the same sum over grad_output with the taps
// reversed; of a width stride, only the columns that some output reads get it, the others are zero.
//
// A thread owns one column (V elements side by side) of Rows output rows, keeps their sums in registers and streams the
// input rows past them, `ahead` loads in flight; each input row is loaded once a thread and used for every output row
// that reads it. A warp covers up to 32 neighbouring columns; a block stacks tiles, so that a halo row is found in L1.
// Bytes: x once and y once, plus (Taps - 1) / Rows of x again from L1 or L2.
#pragma once

#include <type_traits>

#include "launch.cuh"

namespace depthconv::cuda {

struct ForwardParameters {
  DeviceTiling tiling;
  FastDivisor channels;  // rows: output channels; channels_last: column vectors of one pixel
  FastDivisor multiplier;
  FastDivisor spread_w;  // see Convolution
  const void *input, *weight, *bias;
  void* output;
  Strides input_stride, output_stride;
  int64_t weight_filter, weight_tap, bias_step;
  int taps, fold, rows;
  int H, W, H_out;
  int stride_h, stride_w, padding_h, padding_w, dilation_h;
};

// One thread's rows and columns of x, ready to stream.
template <typename T>
struct InputColumn {
  const T* row;       // the row that tap 0 of output row 0 reads; may lie outside the plane
  int64_t row_pitch;  // elements between rows that neighbouring taps read
  int first, step;    // index of that row, and what a tap adds to it
  int height;
  bool inside;  // the column lies in the input, not in the width padding
};

// What a thread computes: columns of `channel` (the first of V in channels_last) from output row `row` on.
struct ForwardPlace {
  unsigned n, channel, wo;
  int row;
};

template <int V, bool ChannelsLast>
__device__ __forceinline__ bool find_place(const ForwardParameters& p, int rows, ForwardPlace& at) {
  unsigned tx, group_col, tile;
  const unsigned ty = divide(threadIdx.x, p.tiling.block_cols, tx);
  const unsigned group_line = divide(blockIdx.x, p.tiling.col_groups, group_col);
  const unsigned col = group_col * p.tiling.block_cols.divisor + tx;
  const unsigned line = group_line * p.tiling.block_lines + ty;
  if (ty >= p.tiling.block_lines || col >= p.tiling.cols || line >= p.tiling.lines) return false;
  const unsigned plane = divide(line, p.tiling.tiles, tile);
  at.row = first_row(p.tiling, tile, rows);
  if (at.row >= p.H_out) return false;
  if (ChannelsLast) {
    at.n = plane;
    at.wo = divide(col, p.channels, at.channel);
    at.channel *= V;
  } else {
    at.n = divide(plane, p.channels, at.channel);
    at.wo = col * V;
  }
  return true;
}

template <typename T, bool Spread = false>
__device__ __forceinline__ InputColumn<T> input_column(const ForwardParameters& p, const ForwardPlace& at) {
  unsigned unused, off = 0;
  const int64_t channel = static_cast<int64_t>(divide(at.channel, p.multiplier, unused)) * p.fold;
  int wi = static_cast<int>(at.wo) * p.stride_w - p.padding_w;
  if (Spread) wi = static_cast<int>(divide(static_cast<unsigned>(wi), p.spread_w, off));
  InputColumn<T> x;
  x.first = at.row * p.stride_h - p.padding_h;
  x.step = p.dilation_h;
  x.height = p.H;
  x.inside = off == 0 && static_cast<unsigned>(wi) < static_cast<unsigned>(p.W);
  x.row_pitch = p.dilation_h * p.input_stride.h;
  x.row = static_cast<const T*>(p.input) + at.n * p.input_stride.n + channel * p.input_stride.c +
          x.first * p.input_stride.h + wi * p.input_stride.w;
  return x;
}

// The output pack at the place's first row.
template <typename T>
__device__ __forceinline__ T* output_column(const ForwardParameters& p, const ForwardPlace& at) {
  return static_cast<T*>(p.output) + at.n * p.output_stride.n + at.channel * p.output_stride.c +
         at.row * p.output_stride.h + at.wo * p.output_stride.w;
}

template <typename T, int V>
__device__ __forceinline__ Pack<T, V> load_row(const InputColumn<T>& x, int j) {
  const bool valid = x.inside && static_cast<unsigned>(x.first + j * x.step) < static_cast<unsigned>(x.height);
  return valid ? load<T, V>(x.row + j * x.row_pitch) : zero_pack<T, V>();
}

// A load that the compiler leaves where it stands, rather than all of them at the start, into too many registers.
__device__ __forceinline__ float load_here(const float* address) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(address));
  return value;
}

// Adds Taps taps to the sums of Rows output rows: input row j serves output row i with tap j - Step * i.
template <int Taps, int Rows, int Step, bool ChannelsLast, typename T, int V>
__device__ __forceinline__ void add_taps(accumulate_t<T> (&sum)[Rows][V], InputColumn<T> x, const T* weight,
                                         int64_t weight_tap, int64_t weight_filter) {
  using A = accumulate_t<T>;
  constexpr int filters = ChannelsLast ? V : 1;
  constexpr int input_rows = Step * (Rows - 1) + Taps;
  // Loads in flight, as many as the registers hold: a chunk of 8 taps sits in a larger kernel.
  constexpr int budget = sizeof(T) * V < 16                        ? 16
                         : Taps == 8 || Taps == 15                 ? 4
                         : Taps > 13 || (Taps == 13 && Rows == 16) ? 6
                                                                   : 8;
  constexpr int ahead = input_rows < budget ? input_rows : budget;
  Pack<T, V> buffer[ahead];
  auto fetch = [&](int j) {
    if constexpr (Taps == 8 || Taps < 7) return load_row<T, V>(x, j);
    // One address that moves on: with many rows the compiler would keep an address for each.
    const Pack<T, V> pack = load_row<T, V>(x, 0);
    x.row += x.row_pitch;
    x.first += x.step;
    return pack;
  };
#pragma unroll
  for (int j = 0; j < ahead; ++j) buffer[j] = fetch(j);
  // Many taps: only those that the tile's rows use at a time are held, the next ones come two rows ahead.
  constexpr bool streamed = has_long_tile_taps(sizeof(T), V, ChannelsLast) && Taps > 11;
  constexpr int held = streamed && Rows + 2 < Taps ? Rows + 2 : Taps;
  A w[held][filters];
  auto load_tap = [&](int k) {
#pragma unroll
    for (int f = 0; f < filters; ++f) {
      const T* address = weight + k * weight_tap + f * weight_filter;
      if constexpr (streamed)
        w[k % held][f] = load_here(address);
      else
        w[k % held][f] = widen(__ldg(address));
    }
  };
#pragma unroll
  for (int k = 0; k < Taps && (!streamed || k < 2); ++k) load_tap(k);
#pragma unroll
  for (int j = 0; j < input_rows; ++j) {
    A value[V];
#pragma unroll
    for (int v = 0; v < V; ++v) value[v] = widen(buffer[j % ahead].value[v]);
    if (j + ahead < input_rows) buffer[j % ahead] = fetch(j + ahead);
    if (streamed && j + 2 < Taps) load_tap(j + 2);
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const int k = j - Step * i;
      if (k < 0 || k >= Taps) continue;
#pragma unroll
      for (int v = 0; v < V; ++v) sum[i][v] += w[k % held][ChannelsLast ? v : 0] * value[v];
    }
  }
}

// Blocks that must fit a multiprocessor: bounds the registers of a thread to 64, 80, 128 or 168.
template <typename T, int V, int Taps, int Rows, bool ChannelsLast>
constexpr int resident_blocks() {
  if (V == 1 && sizeof(T) < 8) return 4;
  if (forward_threads(V, Taps, Rows, ChannelsLast) == 128) return 3;
  if (forward_threads(V, Taps, Rows, ChannelsLast) == 512) return 1;
  return Rows == 1 ? 3 : 2;
}

// Taps > 0: that many, compiled in. Taps == 0: any number, in chunks of 8, 4, 2 and 1, over `fold` input channels.
template <typename T, int V, int Taps, int Rows, int Step, bool ChannelsLast>
__global__ void __launch_bounds__(forward_threads(V, Taps, Rows, ChannelsLast),
                                  resident_blocks<T, V, Taps, Rows, ChannelsLast>())
    forward_kernel(const __grid_constant__ ForwardParameters p) {
  using A = accumulate_t<T>;
  ForwardPlace at;
  if (!find_place<V, ChannelsLast>(p, Rows, at)) return;
  // The plan asks only these kernels: the division would cost the others registers.
  constexpr bool spread = Taps == 0 && Rows <= 8 && (V == 1 || ChannelsLast);
  InputColumn<T> x = input_column<T, spread>(p, at);
  const T* weight = static_cast<const T*>(p.weight) + at.channel * p.fold * p.weight_filter;

  A sum[Rows][V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int64_t filter = at.channel + (ChannelsLast ? v : 0);
    const A bias = p.bias ? widen(__ldg(static_cast<const T*>(p.bias) + filter * p.bias_step)) : A(0);
#pragma unroll
    for (int i = 0; i < Rows; ++i) sum[i][v] = bias;
  }
  // Columns between those that outputs read are zeros, whatever the weight.
  const bool met = !spread || x.inside || p.spread_w.divisor == 1;
  if constexpr (Taps > 0) {
    add_taps<Taps, Rows, Step, ChannelsLast, T, V>(sum, x, weight, p.weight_tap, p.weight_filter);
  } else {
    for (int f = met ? 0 : p.fold; f < p.fold; ++f) {
      InputColumn<T> part = x;
      const T* w = weight;
      auto add = [&](auto count) {
        constexpr int n = decltype(count)::value;
        add_taps<n, Rows, Step, ChannelsLast, T, V>(sum, part, w, p.weight_tap, p.weight_filter);
        part.row += n * part.row_pitch;
        part.first += n * part.step;
        w += n * p.weight_tap;
      };
      for (int left = p.taps >> 3; left > 0; --left) add(std::integral_constant<int, 8>{});
      if (p.taps & 4) add(std::integral_constant<int, 4>{});
      if (p.taps & 2) add(std::integral_constant<int, 2>{});
      if (p.taps & 1) add(std::integral_constant<int, 1>{});
      x.row += p.input_stride.c;
      weight += p.weight_filter;
    }
  }
  T* y = output_column<T>(p, at);
  const int row_step = static_cast<int>(p.tiling.row_step.divisor);
#pragma unroll
  for (int i = 0; i < Rows; ++i) {
    if (at.row + i * row_step < p.H_out) store<T, V>(y + i * (row_step * p.output_stride.h), sum[i]);
  }
}

using ForwardKernel = void (*)(ForwardParameters);

template <typename T, int V, int Taps, int Step, bool ChannelsLast>
ForwardKernel pick_rows(int rows) {
  constexpr int tall = tall_rows(sizeof(T), V, Taps, ChannelsLast), low = low_rows(sizeof(T), V);
  if constexpr (Step == 1 && tall != low)
    if (rows == tall) return forward_kernel<T, V, Taps, tall, Step, ChannelsLast>;
  if (rows == low) return forward_kernel<T, V, Taps, low, Step, ChannelsLast>;
  return nullptr;
}

template <typename T, int V, bool ChannelsLast>
ForwardKernel pick_kernel(const ForwardPlan& plan) {
  if (plan.tiling.rows == 1) return forward_kernel<T, V, 0, 1, 1, ChannelsLast>;
  if constexpr (!ChannelsLast && sizeof(T) != 8)
    if (plan.step == 2) return pick_rows<T, V, 0, 2, ChannelsLast>(plan.tiling.rows);
#define DEPTHCONV_CASE(K) \
  case K: return pick_rows<T, V, K, 1, ChannelsLast>(plan.tiling.rows);
  if constexpr (has_tile_taps(sizeof(T), V, ChannelsLast)) switch (plan.taps) {
      DEPTHCONV_TILE_TAPS(DEPTHCONV_CASE)
    }
  if constexpr (has_long_tile_taps(sizeof(T), V, ChannelsLast)) switch (plan.taps) {
      DEPTHCONV_LONG_TILE_TAPS(DEPTHCONV_CASE)
    }
#undef DEPTHCONV_CASE
  return pick_rows<T, V, 0, 1, ChannelsLast>(plan.tiling.rows);
}

}  // namespace depthconv::cuda
