// The filter bank: channel multipliers and few output rows, as in EEG models (H_out = 1, K = H, 1 to 32 filters a
// channel). A tile of rows would keep sums that no row needs and would read x once a filter.
//
// A thread owns one place, V elements side by side of one output row of one input channel, keeps the sums of Filters
// filters there, and streams the input rows past them, `ahead` loads in flight. A warp covers 32 neighbouring places. A
// block keeps one channel: more filters are the work of other warps, which find x in L1, and where the problem is too
// small to fill the machine warps share an output's taps and add their sums through shared memory, in order. Weights
// come from shared memory, the same word for the whole warp. Bytes: x once and y once; (K - 1) / K of x again from L1
// or L2 where several output rows read it.
//
// The spread is the same sum for grad_input of H_out = 1: dx[k - p] = sum over q of w[q][k] * dy[q], so rows of dx are
// the filters and rows of dy, a channel apart, are the taps.
#pragma once

#include "launch.cuh"

namespace depthconv::cuda {

struct BankParameters {
  FastDivisor channels, filter_groups, cols, rows, dilation, taps_divisor;
  const void *input, *weight, *bias;
  void* output;
  int64_t input_n, input_c, input_h, input_w, input_tap;
  int64_t output_n, output_c, output_filter, output_h, output_w;
  int64_t weight_c, weight_filter, weight_tap;
  int64_t bias_c, bias_filter;
  unsigned count;          // places a channel, of this launch
  int taps, filters;       // filters of a channel
  int chunks, tap_splits;  // of a block
  int pitch;               // between the weights of two taps
  int item_warps;          // warps that lie side by side along the places
  int H, W;
  int stride_h, stride_w, padding_h, padding_w;
};

// Blocks of 256 threads that must fit a multiprocessor: bounds the registers of a thread to 128, 80 or 64.
constexpr int bank_blocks(int size, int filters, int width) {
  return filters * width >= 16 || size * width == 16 ? 2 : filters * width >= 8 ? 3 : 4;
}

// The weights of one tap for this thread's filters.
template <int Filters>
__device__ __forceinline__ void read_weights(float (&w)[Filters], const float* shared) {
  if constexpr (Filters >= 4) {
#pragma unroll
    for (int f = 0; f < Filters; f += 4) {
      const float4 four = *reinterpret_cast<const float4*>(shared + f);
      w[f] = four.x, w[f + 1] = four.y, w[f + 2] = four.z, w[f + 3] = four.w;
    }
  } else if constexpr (Filters == 2) {
    const float2 two = *reinterpret_cast<const float2*>(shared);
    w[0] = two.x, w[1] = two.y;
  } else {
    w[0] = *shared;
  }
}

template <typename T, int V, int Filters>
__global__ void __launch_bounds__(256, bank_blocks(sizeof(T), Filters, V))
    bank_kernel(const __grid_constant__ BankParameters p) {
  constexpr int ahead = 8;
  extern __shared__ float4 shared_words[];
  float* weights = reinterpret_cast<float*>(shared_words);
  const int pitch = p.pitch;
  const int warp = threadIdx.x / 32, part = warp / p.item_warps;
  const int chunk = part % p.chunks, split = part / p.chunks;
  const int slot = (warp % p.item_warps) * 32 + threadIdx.x % 32, items = p.item_warps * 32;
  unsigned channel, filter_group, col, ho;
  const unsigned group = divide(divide(blockIdx.x, p.filter_groups, filter_group), p.channels, channel);
  const unsigned item = group * items + slot;
  const bool live = item < p.count;
  const unsigned n = divide(divide(live ? item : 0, p.cols, col), p.rows, ho);

  // The taps whose row lies in the input, and this split's share of them.
  const int first = static_cast<int>(ho) * p.stride_h - p.padding_h;
  const int wi = static_cast<int>(col) * V * p.stride_w - p.padding_w;
  unsigned unused;
  int begin = first < 0 ? divide(p.dilation.divisor - 1 - first, p.dilation, unused) : 0;
  int end = first < p.H ? min(p.taps, static_cast<int>(divide(p.H - 1 - first, p.dilation, unused)) + 1) : 0;
  if (p.tap_splits > 1) {
    begin = max(begin, p.taps * split / p.tap_splits);
    end = min(end, p.taps * (split + 1) / p.tap_splits);
  }
  if (!live || static_cast<unsigned>(wi) >= static_cast<unsigned>(p.W)) end = begin;
  const T* row = static_cast<const T*>(p.input) + n * p.input_n + channel * p.input_c + first * p.input_h +
                 begin * p.input_tap + wi * p.input_w;
  Pack<T, V> buffer[ahead];
#pragma unroll
  for (int j = 0; j < ahead; ++j) {
    buffer[j] = begin + j < end ? load<T, V>(row) : zero_pack<T, V>();
    row += p.input_tap;
  }

  // While those are on their way: the block's weights, zeros for filters that are not there.
  const int block_filter = static_cast<int>(filter_group) * p.chunks * Filters;
  const T* weight = static_cast<const T*>(p.weight) + channel * p.weight_c;
  for (unsigned i = threadIdx.x; i < static_cast<unsigned>(p.chunks * Filters * p.taps); i += blockDim.x) {
    unsigned tap;
    const int f = static_cast<int>(divide(i, p.taps_divisor, tap));
    weights[tap * pitch + f] = block_filter + f < p.filters
                                   ? widen(__ldg(weight + (block_filter + f) * p.weight_filter + tap * p.weight_tap))
                                   : 0.0f;
  }
  __syncthreads();

  const int filter = block_filter + chunk * Filters;
  float sum[Filters][V];
#pragma unroll
  for (int f = 0; f < Filters; ++f) {
    const bool biased = p.bias && split == 0 && filter + f < p.filters;
    const float bias =
        biased ? widen(__ldg(static_cast<const T*>(p.bias) + channel * p.bias_c + (filter + f) * p.bias_filter)) : 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) sum[f][v] = bias;
  }
  const float* tap_weights = weights + begin * pitch + chunk * Filters;
  auto add_tap = [&](const Pack<T, V>& pack) {
    float w[Filters];
    read_weights(w, tap_weights);
    tap_weights += pitch;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const float value = widen(pack.value[v]);
#pragma unroll
      for (int f = 0; f < Filters; ++f) sum[f][v] += w[f] * value;
    }
  };
  int left = end - begin;
  for (; left >= ahead; left -= ahead) {
#pragma unroll
    for (int j = 0; j < ahead; ++j) {
      add_tap(buffer[j]);
      if (left > j + ahead) buffer[j] = load<T, V>(row);
      row += p.input_tap;
    }
  }
#pragma unroll
  for (int j = 0; j < ahead - 1; ++j)
    if (j < left) add_tap(buffer[j]);

  if (p.tap_splits > 1) {
    // [split - 1][chunk][filter, element][place]: neighbouring places on neighbouring banks.
    float* exchange = weights + p.taps * pitch;
    const int stride = p.chunks * Filters * V * items;
    float* mine = exchange + chunk * (Filters * V * items) + slot;
    if (split > 0) {
#pragma unroll
      for (int f = 0; f < Filters; ++f)
#pragma unroll
        for (int v = 0; v < V; ++v) mine[(split - 1) * stride + (f * V + v) * items] = sum[f][v];
    }
    __syncthreads();
    if (split > 0) return;
    for (int s = 1; s < p.tap_splits; ++s)
#pragma unroll
      for (int f = 0; f < Filters; ++f)
#pragma unroll
        for (int v = 0; v < V; ++v) sum[f][v] += mine[(s - 1) * stride + (f * V + v) * items];
  }
  if (!live) return;
  T* y = static_cast<T*>(p.output) + n * p.output_n + channel * p.output_c + filter * p.output_filter +
         ho * p.output_h + static_cast<int64_t>(col * V) * p.output_w;
#pragma unroll
  for (int f = 0; f < Filters; ++f) {
    if (filter + f < p.filters) store<T, V>(y + f * p.output_filter, sum[f]);
  }
}

using BankKernel = void (*)(BankParameters);

template <typename T, int V>
BankKernel pick_bank(int filters) {
  switch (filters) {
    case 1: return bank_kernel<T, V, 1>;
    case 2: return bank_kernel<T, V, 2>;
    case 4:
      if constexpr (V <= 4) return bank_kernel<T, V, 4>;
      break;
    case 8:
      if constexpr (V <= 4) return bank_kernel<T, V, 8>;
  }
  return nullptr;
}

template <typename T>
BankKernel pick_bank(int width, int filters) {
  switch (width) {
    case 1: return pick_bank<T, 1>(filters);
    case 2: return pick_bank<T, 2>(filters);
    case 4: return pick_bank<T, 4>(filters);
    case 8:
      if constexpr (sizeof(T) == 2) return pick_bank<T, 8>(filters);
  }
  return nullptr;
}

// Follows the plan, plan.images of the batch a launch.
template <typename T>
const char* launch_bank(const Convolution& c, const ForwardPlan& plan, cudaStream_t stream) {
  const BankPlan& b = plan.bank;
  const int64_t rows = b.spread ? 1 : c.H_out, cols = c.W_out / plan.vector_width;
  const int64_t blocks = b.channels * b.filter_groups;
  BankParameters p{};
  p.channels = FastDivisor(b.channels);
  p.filter_groups = FastDivisor(b.filter_groups);
  p.cols = FastDivisor(cols);
  p.rows = FastDivisor(rows);
  p.taps_divisor = FastDivisor(b.taps);
  p.weight = c.weight.data;
  p.bias = c.bias.data;
  p.input_n = c.input.stride.n;
  p.input_h = c.input.stride.h;
  p.input_w = c.input.stride.w;
  p.output_n = c.output.stride.n;
  p.output_h = c.output.stride.h;
  p.output_w = c.output.stride.w;
  p.taps = static_cast<int>(b.taps);
  p.filters = static_cast<int>(b.outputs);
  p.chunks = b.chunks;
  p.tap_splits = b.tap_splits;
  p.pitch = bank_pitch(b.filters, b.chunks);
  p.item_warps = b.items / 32;
  p.W = static_cast<int>(c.W);
  p.stride_w = static_cast<int>(c.stride.w);
  p.padding_w = static_cast<int>(c.padding.w);
  if (b.spread) {
    // Output row f is row 0 of every folded channel times tap padding - f.
    p.dilation = FastDivisor(1);
    p.input_c = b.taps * c.input.stride.c;
    p.input_tap = c.input.stride.c;
    p.output_c = c.output.stride.c;
    p.output_filter = c.output.stride.h;
    p.weight = at<T>(c.weight.data, c.padding.h * c.weight.tap);
    p.weight_c = b.taps * c.weight.filter;
    p.weight_filter = -c.weight.tap;
    p.weight_tap = c.weight.filter;
    p.bias_c = c.bias.step;
    p.H = p.taps;
    p.stride_h = 1;
  } else {
    p.dilation = FastDivisor(c.dilation.h);
    p.input_c = c.input.stride.c;
    p.input_tap = c.dilation.h * c.input.stride.h;
    p.output_c = b.outputs * c.output.stride.c;
    p.output_filter = c.output.stride.c;
    p.weight_c = b.outputs * c.weight.filter;
    p.weight_filter = c.weight.filter;
    p.weight_tap = c.weight.tap;
    p.bias_c = b.outputs * c.bias.step;
    p.bias_filter = c.bias.step;
    p.H = static_cast<int>(c.H);
    p.stride_h = static_cast<int>(c.stride.h);
    p.padding_h = static_cast<int>(c.padding.h);
  }
  const BankKernel kernel = pick_bank<T>(plan.vector_width, b.filters);
  if (!kernel) return "depthconv: the plan names a kernel that was not compiled";
  for (int64_t n = 0; n < c.N; n += plan.images) {
    const int64_t count = std::min(plan.images, c.N - n) * rows * cols;
    p.count = static_cast<unsigned>(count);
    p.input = at<T>(c.input.data, n * c.input.stride.n);
    p.output = const_cast<T*>(at<T>(c.output.data, n * c.output.stride.n));
    const unsigned grid = static_cast<unsigned>(ceil_div(count, b.items) * blocks);
    kernel<<<grid, plan.threads, b.shared_bytes, stream>>>(p);
    if (const char* error = launch_error()) return error;
  }
  return nullptr;
}

}  // namespace depthconv::cuda
