// grad_input (unless it is null), grad_weight and grad_bias for stride 1 in one pass, marching: for taps that are
// compiled in and packs of 4, 8 or 16 bytes. Input row i needs exactly the grad_output rows i + p - k * d for both
// sums.
//
// A thread owns one column (V elements side by side) of a tile of input rows and walks down it: the last Taps
// grad_output rows lie in a ring of registers; x row i meets them all, giving one row of grad_input and one product a
// tap. Rows of both tensors arrive through private queues in shared memory. A block keeps one channel (channels_last:
// up to 32 packs of V) and walks every splits-th turn of its lines; sums are made as backward.cuh says. Bytes: x and
// grad_output read once, grad_input written once; (Taps - 1) / rows of grad_output again from L2.
#pragma once

#include "backward.cuh"
#include "queue.cuh"

namespace depthconv::cuda {

template <typename T, int V>
__device__ __forceinline__ bool all_finite(const accumulate_t<T> (&value)[V]) {
  bool finite = true;
#pragma unroll
  for (int v = 0; v < V; ++v) finite = finite && isfinite(value[v]);
  return finite;
}

// Step 3 for channels_last: threads `block_cols` apart share V channels.
template <typename A, int V>
__device__ __forceinline__ void store_channel_partials(const BackwardParameters& p, const TapSums<A>& sums,
                                                       unsigned channel, int split, bool with_bias) {
  __syncthreads();
  const int cols = static_cast<int>(p.tiling.block_cols.divisor), lines = static_cast<int>(p.tiling.block_lines);
  const int slots = p.taps + (with_bias ? 1 : 0);
  for (int index = threadIdx.x; index < slots * V * cols; index += blockDim.x) {
    const int col = index % cols, slot = index / cols;  // slot: tap * V + v
    const unsigned filter = channel + col * V + slot % V;
    if (filter >= p.channels) continue;
    double total = 0;
    for (int line = 0; line < lines; ++line) total += sums.total(slot, line * cols + col);
    p.partial[(static_cast<int64_t>(filter) * (p.taps + 1) + slot / V) * p.splits + split] = total;
  }
}

template <typename T, int V, int Taps, bool ChannelsLast>
__global__ void __launch_bounds__(march_threads, march_backward_blocks(sizeof(T), V, Taps, ChannelsLast))
    march_backward_kernel(const __grid_constant__ BackwardParameters p) {
  using A = accumulate_t<T>;
  constexpr int depth = march_depth;
  constexpr int filters = ChannelsLast ? V : 1;  // that a thread sums for
  extern __shared__ double shared_memory[];
  unsigned char* shared = reinterpret_cast<unsigned char*>(shared_memory);
  constexpr int queue_bytes = depth * march_threads * sizeof(Pack<T, V>);
  RowQueue<T, V, depth> dy_queue(shared, march_threads), x_queue(shared + queue_bytes, march_threads);
  TapSums<A> sums{reinterpret_cast<A*>(shared + 2 * queue_bytes), march_threads};
  const int split = blockIdx.x % p.splits, group = blockIdx.x / p.splits;
  sums.clear((Taps + 1) * filters);
  unsigned tx;
  const unsigned ty = divide(threadIdx.x, p.tiling.block_cols, tx);
  const unsigned turns =
      p.tiling.col_groups.divisor * ((p.tiling.lines + p.tiling.block_lines - 1) / p.tiling.block_lines);
  // channels_last: a block keeps block_cols packs of V channels, a line is one column of the width.
  const unsigned first_channel = ChannelsLast ? group * p.tiling.block_cols.divisor * V : group;
  const unsigned channel = ChannelsLast ? first_channel + tx * V : group;
  const bool working = channel < p.channels && ty < p.tiling.block_lines;
  const T* weight = static_cast<const T*>(p.weight) + (working ? channel : 0) * p.weight_filter;
  A w[Taps][filters];
#pragma unroll
  for (int k = 0; k < Taps; ++k)
#pragma unroll
    for (int f = 0; f < filters; ++f) w[k][f] = widen(__ldg(weight + k * p.weight_tap + f * p.weight_filter));
  const int row_step =
      static_cast<int>(p.tiling.row_step.divisor);  // the dilation: both tensors' rows lie so far apart
  const int64_t x_pitch = row_step * p.input_stride.h, dy_pitch = row_step * p.grad_output_stride.h;
  const int64_t dx_pitch = row_step * p.grad_input_stride.h;
  const bool with_input = p.grad_input != nullptr;

  for (unsigned turn = split; turn < turns && working; turn += p.splits) {
    Turn at;
    if (!find_turn<ChannelsLast>(p, turn, tx, ty, p.rows, at) || at.row >= p.H) continue;
    const unsigned col = ChannelsLast ? at.col : at.col * V;
    const int left = (p.H - at.row + row_step - 1) / row_step;
    const int rows = left < p.rows ? left : p.rows;
    const int steps = rows + Taps - 1;
    // Step u brings grad_output row first + u * d, and from step Taps - 1 on x row at.row + (u - Taps + 1) * d.
    const int first = at.row + p.padding_h - row_step * (Taps - 1);
    const T* dy = static_cast<const T*>(p.grad_output) + at.n * p.grad_output_stride.n +
                  channel * p.grad_output_stride.c + first * p.grad_output_stride.h +
                  (col + p.padding_w) * p.grad_output_stride.w;
    const T* x = static_cast<const T*>(p.input) + at.n * p.input_stride.n + channel * p.input_stride.c +
                 at.row * p.input_stride.h + col * p.input_stride.w;
    T* dx = static_cast<T*>(p.grad_input) + at.n * p.grad_input_stride.n + channel * p.grad_input_stride.c +
            at.row * p.grad_input_stride.h + col * p.grad_input_stride.w;
    auto inside = [&](int u) { return static_cast<unsigned>(first + u * row_step) < static_cast<unsigned>(p.H_out); };
    const T *dy_source = dy, *x_source = x;
    int dy_row = first, pushed = 0;
    auto push = [&] {
      if (pushed < steps) {
        const bool present = static_cast<unsigned>(dy_row) < static_cast<unsigned>(p.H_out);
        dy_queue.push(pushed, present ? dy_source : static_cast<const T*>(p.grad_output), present);
        if (pushed >= Taps - 1) {
          x_queue.push(pushed, x_source, true);
          x_source += x_pitch;
        }
        dy_source += dy_pitch;
        dy_row += row_step;
        ++pushed;
      }
      commit_step();
    };
#pragma unroll
    for (int u = 0; u < depth - 1; ++u) push();
    // grad_bias: a tile owns the grad_output rows that tap 0 reads, the first tile also those before them.
    const int bias_from = !p.with_bias ? steps : at.row < row_step ? 0 : Taps - 1;
    A ring[Taps][V], grad_weight[Taps][filters], bias[filters], bias_lost[filters];
#pragma unroll
    for (int f = 0; f < filters; ++f) {
      bias[f] = bias_lost[f] = A(0);
#pragma unroll
      for (int k = 0; k < Taps; ++k) grad_weight[k][f] = A(0);
    }
    for (int group = 0; group < steps; group += Taps) {
#pragma unroll
      for (int s = 0; s < Taps; ++s) {
        const int u = group + s;
        if (u >= steps) break;
        wait_for_step<depth - 2>();
        const Pack<T, V> dy_pack = dy_queue.at(u);
        const Pack<T, V> x_pack = x_queue.at(u);
        push();
#pragma unroll
        for (int v = 0; v < V; ++v) ring[s][v] = widen(dy_pack.value[v]);
        if (u >= bias_from) {
          if constexpr (ChannelsLast) {
#pragma unroll
            for (int v = 0; v < V; ++v) compensated_add(bias[v], bias_lost[v], ring[s][v]);
          } else {
            A row = ring[s][0];
#pragma unroll
            for (int v = 1; v < V; ++v) row += ring[s][v];
            compensated_add(bias[0], bias_lost[0], row);
          }
        }
        if (u < Taps - 1) continue;
        A value[V];
#pragma unroll
        for (int v = 0; v < V; ++v) value[v] = widen(x_pack.value[v]);
        if (with_input) {
          A grad_input[V];
#pragma unroll
          for (int v = 0; v < V; ++v) grad_input[v] = A(0);
#pragma unroll
          for (int k = 0; k < Taps; ++k)
#pragma unroll
            for (int v = 0; v < V; ++v) grad_input[v] += w[k][ChannelsLast ? v : 0] * ring[(s - k + Taps) % Taps][v];
          store<T, V>(dx, grad_input);
          dx += dx_pitch;
        }
        // The zeros that stand for missing grad_output rows must not meet an inf or NaN of x.
        const bool whole = inside(u) && inside(u - Taps + 1);
        if (whole || all_finite<T, V>(value)) {
#pragma unroll
          for (int k = 0; k < Taps; ++k)
#pragma unroll
            for (int v = 0; v < V; ++v)
              grad_weight[k][ChannelsLast ? v : 0] += value[v] * ring[(s - k + Taps) % Taps][v];
        } else {
          for (int k = 0; k < Taps; ++k) {
            if (!inside(u - k)) continue;
            const Pack<T, V> pack = load<T, V>(dy + (u - k) * dy_pitch);
            A product[filters] = {};
#pragma unroll
            for (int v = 0; v < V; ++v) product[ChannelsLast ? v : 0] += value[v] * widen(pack.value[v]);
#pragma unroll
            for (int f = 0; f < filters; ++f) sums.add(k * filters + f, product[f]);
          }
        }
      }
    }
#pragma unroll
    for (int f = 0; f < filters; ++f) {
#pragma unroll
      for (int k = 0; k < Taps; ++k) sums.add(k * filters + f, grad_weight[k][f]);
      if (p.with_bias) sums.add(Taps * filters + f, bias[f]), sums.add(Taps * filters + f, -bias_lost[f]);
    }
  }
  if constexpr (ChannelsLast)
    store_channel_partials<A, V>(p, sums, first_channel, split, p.with_bias);
  else
    store_partials<A, false>(p, sums, group, split, 0, Taps, p.with_bias);
}

template <typename T, int V, bool ChannelsLast>
BackwardKernel pick_march_backward(int taps) {
  switch (taps) {
#define DEPTHCONV_CASE(K)                                            \
  case K:                                                            \
    if constexpr (has_march_backward(sizeof(T), V, K, ChannelsLast)) \
      return march_backward_kernel<T, V, K, ChannelsLast>;           \
    break;
    DEPTHCONV_MARCH_BACKWARD_TAPS(DEPTHCONV_CASE)
#undef DEPTHCONV_CASE
  }
  return nullptr;
}

inline unsigned march_shared_bytes(int size, int vector_width, int taps, bool channels_last) {
  return march_threads *
         (2 * march_depth * size * vector_width + (taps + 1) * 2 * sizeof(float) * (channels_last ? vector_width : 1));
}

}  // namespace depthconv::cuda
