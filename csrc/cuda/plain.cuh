// One element a thread, 64-bit indices, any strides: for extents that the other kernels' 32-bit arithmetic cannot hold.
// Bytes: x (or grad_output) K times, mostly from L1 or L2; the output once.
#pragma once

#include "launch.cuh"
#include "reduce.cuh"

namespace depthconv::cuda {

// Walks a tensor's elements in the order of its memory: (n, c, h, w), or (n, h, w, c).
struct Walk {
  int64_t C, H, W;
  bool channels_last;

  __device__ void find(int64_t index, int64_t& n, int64_t& c, int64_t& h, int64_t& w) const {
    if (channels_last) c = index % C, index /= C;
    w = index % W, index /= W;
    h = index % H, index /= H;
    if (!channels_last) c = index % C, index /= C;
    n = index;
  }
};

struct PlainParameters {
  Walk walk;
  int64_t count;
  const void *input, *weight, *bias, *grad_output;
  void *output, *grad_input;
  double* partial;
  Strides input_stride, output_stride, grad_output_stride, grad_input_stride;
  int64_t weight_filter, weight_tap, bias_step;
  int64_t K, multiplier, H, W, H_out, W_out, splits;
  Pair stride, padding, dilation;
};

inline __device__ int64_t offset(const Strides& s, int64_t n, int64_t c, int64_t h, int64_t w) {
  return n * s.n + c * s.c + h * s.h + w * s.w;
}

template <typename T>
__global__ void plain_forward_kernel(const __grid_constant__ PlainParameters p) {
  using A = accumulate_t<T>;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count; i += threads) {
    int64_t n, co, ho, wo;
    p.walk.find(i, n, co, ho, wo);
    A sum = p.bias ? widen(static_cast<const T*>(p.bias)[co * p.bias_step]) : A(0);
    const int64_t w = wo * p.stride.w - p.padding.w;
    if (w >= 0 && w < p.W)
      for (int64_t k = 0; k < p.K; ++k) {
        const int64_t h = ho * p.stride.h + k * p.dilation.h - p.padding.h;
        if (h < 0 || h >= p.H) continue;
        sum += widen(static_cast<const T*>(p.weight)[co * p.weight_filter + k * p.weight_tap]) *
               widen(static_cast<const T*>(p.input)[offset(p.input_stride, n, co / p.multiplier, h, w)]);
      }
    static_cast<T*>(p.output)[offset(p.output_stride, n, co, ho, wo)] = narrow<T, A>(sum);
  }
}

template <typename T>
__global__ void plain_grad_input_kernel(const __grid_constant__ PlainParameters p) {
  using A = accumulate_t<T>;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count; i += threads) {
    int64_t n, c, h, w;
    p.walk.find(i, n, c, h, w);
    A sum = A(0);
    const int64_t reach_w = w + p.padding.w, wo = reach_w / p.stride.w;
    if (reach_w % p.stride.w == 0 && wo < p.W_out)
      for (int64_t q = 0; q < p.multiplier; ++q)
        for (int64_t k = 0; k < p.K; ++k) {
          const int64_t reach = h + p.padding.h - k * p.dilation.h;
          if (reach < 0 || reach % p.stride.h != 0 || reach / p.stride.h >= p.H_out) continue;
          const int64_t co = c * p.multiplier + q;
          sum +=
              widen(static_cast<const T*>(p.weight)[co * p.weight_filter + k * p.weight_tap]) *
              widen(static_cast<const T*>(p.grad_output)[offset(p.grad_output_stride, n, co, reach / p.stride.h, wo)]);
        }
    static_cast<T*>(p.grad_input)[offset(p.grad_input_stride, n, c, h, w)] = narrow<T, A>(sum);
  }
}

// A block sums one share of one tap of one filter (row K: the bias) over (n, ho, wo), in float64.
template <typename T>
__global__ void __launch_bounds__(256) plain_grad_weight_kernel(const __grid_constant__ PlainParameters p) {
  const int64_t split = blockIdx.x % p.splits, sum_index = blockIdx.x / p.splits;
  const int64_t co = sum_index / (p.K + 1), k = sum_index % (p.K + 1);
  double sum = 0;
  for (int64_t i = split * blockDim.x + threadIdx.x; i < p.count; i += p.splits * blockDim.x) {
    const int64_t wo = i % p.W_out, ho = i / p.W_out % p.H_out, n = i / p.W_out / p.H_out;
    const double dy = widen(static_cast<const T*>(p.grad_output)[offset(p.grad_output_stride, n, co, ho, wo)]);
    if (k == p.K) {
      sum += dy;
      continue;
    }
    const int64_t w = wo * p.stride.w - p.padding.w, h = ho * p.stride.h + k * p.dilation.h - p.padding.h;
    if (w < 0 || w >= p.W || h < 0 || h >= p.H) continue;
    sum += dy * widen(static_cast<const T*>(p.input)[offset(p.input_stride, n, co / p.multiplier, h, w)]);
  }
  __shared__ double sums[256];
  sums[threadIdx.x] = sum;
  for (int half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) p.partial[sum_index * p.splits + split] = sums[0];
}

inline PlainParameters plain_parameters(const Geometry& g) {
  PlainParameters p{};
  p.K = g.K;
  p.multiplier = g.multiplier;
  p.H = g.H;
  p.W = g.W;
  p.H_out = g.H_out;
  p.W_out = g.W_out;
  p.stride = g.stride;
  p.padding = g.padding;
  p.dilation = g.dilation;
  return p;
}

inline unsigned plain_blocks(int64_t count) {
  return static_cast<unsigned>(std::min<int64_t>(ceil_div(count, 256), int64_t{1} << 20));
}

template <typename T>
const char* launch_plain_forward(const ForwardArguments& a, cudaStream_t stream) {
  const Geometry& g = a.geometry;
  PlainParameters p = plain_parameters(g);
  p.walk = {g.C_out(), g.H_out, g.W_out, a.output.stride.c == 1};
  p.count = g.N * g.C_out() * g.H_out * g.W_out;
  p.input = a.input.data;
  p.weight = a.weight.data;
  p.bias = a.bias.data;
  p.output = a.output.data;
  p.input_stride = a.input.stride;
  p.output_stride = a.output.stride;
  p.weight_filter = a.weight.filter;
  p.weight_tap = a.weight.tap;
  p.bias_step = a.bias.step;
  plain_forward_kernel<T><<<plain_blocks(p.count), 256, 0, stream>>>(p);
  return launch_error();
}

template <typename T>
const char* launch_plain_backward(const BackwardArguments& a, int splits, double* workspace, cudaStream_t stream) {
  const Geometry& g = a.geometry;
  PlainParameters p = plain_parameters(g);
  p.input = a.input.data;
  p.weight = a.weight.data;
  p.grad_output = a.grad_output.data;
  p.grad_input = a.grad_input.data;
  p.partial = workspace;
  p.input_stride = a.input.stride;
  p.grad_output_stride = a.grad_output.stride;
  p.grad_input_stride = a.grad_input.stride;
  p.weight_filter = a.weight.filter;
  p.weight_tap = a.weight.tap;
  if (a.grad_input.data) {
    p.walk = {g.C, g.H, g.W, a.grad_input.stride.c == 1};
    p.count = g.N * g.C * g.H * g.W;
    plain_grad_input_kernel<T><<<plain_blocks(p.count), 256, 0, stream>>>(p);
    if (const char* error = launch_error()) return error;
  }
  if (a.grad_weight.data || a.grad_bias.data) {
    p.count = g.N * g.H_out * g.W_out;
    p.splits = splits;
    const unsigned blocks = static_cast<unsigned>(g.C_out() * (g.K + 1) * splits);
    plain_grad_weight_kernel<T><<<blocks, 256, 0, stream>>>(p);
    if (const char* error = launch_error()) return error;
    ReduceParameters r;
    r.weight[0] = r.bias = {workspace, static_cast<int>(g.K), splits};
    r.tap_step = 1;
    return launch_reduce<T>(a, r, stream);
  }
  return nullptr;
}

}  // namespace depthconv::cuda
