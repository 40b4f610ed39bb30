// The forward kernel that marches: for taps that are compiled in and vectors.
//
// A thread owns one column (V elements side by side) of a tile of rows, tall enough that the halo hardly counts, and
// walks down it with the last Taps input rows in a ring of registers: each new row completes the sums of one output
// row. Rows arrive through a private queue in shared memory, `depth` in flight. A warp covers up to 32 neighbouring
// columns, a block stacks tiles. Bytes: x once and y once, and (Taps - 1) / rows of x again from L2.
#pragma once

#include "forward.cuh"
#include "queue.cuh"

namespace depthconv::cuda {

template <typename T, int V, int Taps, bool ChannelsLast>
__global__ void __launch_bounds__(march_threads, march_blocks(sizeof(T), V, Taps, ChannelsLast))
    march_forward_kernel(const __grid_constant__ ForwardParameters p) {
  using A = accumulate_t<T>;
  constexpr int filters = ChannelsLast ? V : 1;
  constexpr int depth = march_depth;
  __shared__ Pack<T, V> shared[depth * march_threads];
  ForwardPlace at;
  if (!find_place<V, ChannelsLast>(p, p.rows, at)) return;
  const InputColumn<T> x = input_column<T>(p, at);
  const int row_step = static_cast<int>(p.tiling.row_step.divisor);
  const int left = (p.H_out - at.row + row_step - 1) / row_step;
  const int rows = left < p.rows ? left : p.rows;
  const int steps = rows + Taps - 1;

  RowQueue<T, V, depth> queue(shared, march_threads);
  const T* source = x.row;
  int row = x.first, pushed = 0;
  auto push = [&] {
    if (pushed < steps) {
      const bool present = x.inside && static_cast<unsigned>(row) < static_cast<unsigned>(x.height);
      queue.push(pushed, present ? source : static_cast<const T*>(p.input), present);
      source += x.row_pitch;
      row += x.step;
      ++pushed;
    }
    commit_step();
  };
#pragma unroll
  for (int u = 0; u < depth - 1; ++u) push();
  const T* weight = static_cast<const T*>(p.weight) + at.channel * p.weight_filter;
  A w[Taps][filters], bias[filters], ring[Taps][V];
#pragma unroll
  for (int f = 0; f < filters; ++f) {
    bias[f] = p.bias ? widen(__ldg(static_cast<const T*>(p.bias) + (at.channel + f) * p.bias_step)) : A(0);
#pragma unroll
    for (int k = 0; k < Taps; ++k) w[k][f] = widen(__ldg(weight + k * p.weight_tap + f * p.weight_filter));
  }
  T* y = output_column<T>(p, at);
  const int64_t y_pitch = row_step * p.output_stride.h;
  for (int group = 0; group < steps; group += Taps) {
#pragma unroll
    for (int s = 0; s < Taps; ++s) {
      const int u = group + s;
      if (u >= steps) break;
      wait_for_step<depth - 2>();
      const Pack<T, V> pack = queue.at(u);
      push();
#pragma unroll
      for (int v = 0; v < V; ++v) ring[s][v] = widen(pack.value[v]);
      if (u < Taps - 1) continue;
      A sum[V];
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] = bias[ChannelsLast ? v : 0];
#pragma unroll
      for (int k = 0; k < Taps; ++k)
#pragma unroll
        for (int v = 0; v < V; ++v) sum[v] += w[k][ChannelsLast ? v : 0] * ring[(s + 1 + k) % Taps][v];
      store<T, V>(y, sum);
      y += y_pitch;
    }
  }
}

template <typename T, int V, bool ChannelsLast>
ForwardKernel pick_march_forward(int taps) {
  switch (taps) {
#define DEPTHCONV_CASE(K)                                                                                    \
  case K:                                                                                                    \
    if constexpr (V == march_width(sizeof(T), K, ChannelsLast) && !tile_taps(sizeof(T), V, ChannelsLast, K)) \
      return march_forward_kernel<T, V, K, ChannelsLast>;                                                    \
    break;
    DEPTHCONV_MARCH_TAPS(DEPTHCONV_CASE)
#undef DEPTHCONV_CASE
  }
  return nullptr;
}

}  // namespace depthconv::cuda
