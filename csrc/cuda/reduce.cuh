// The last step of grad_weight and grad_bias: adds the partial sums that blocks left, in a fixed order, in float64.
#pragma once

#include "launch.cuh"

namespace depthconv::cuda {

__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_down_sync(0xffffffffu, value, offset);
  return value;
}

// Where a kernel left its partial sums: [filter][taps + 1][splits], the last row for the bias. Without splits: zeros.
struct Partials {
  const double* data = nullptr;
  int taps = 0, splits = 0;
};

// A warp adds one tap's partials. Reads splits doubles, writes one element. The taps of a height stride come from
// several phases: tap k is number k / tap_step of the phase whose first tap is k % tap_step.
struct ReduceParameters {
  Partials weight[most_phases], bias;
  void *grad_weight, *grad_bias;
  int64_t weight_filter, weight_tap, bias_step;
  int64_t sums;  // filters * (K + 1)
  int taps, tap_step;
};

template <typename T>
__global__ void __launch_bounds__(256) reduce_kernel(const __grid_constant__ ReduceParameters p) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (index >= p.sums) return;
  const int64_t filter = index / (p.taps + 1);
  const int row = static_cast<int>(index % (p.taps + 1));
  const bool is_bias = row == p.taps;
  if (is_bias ? !p.grad_bias : !p.grad_weight) return;
  const int lane = threadIdx.x % 32;
  const Partials& from = is_bias ? p.bias : p.weight[row % p.tap_step];
  const int from_row = is_bias ? from.taps : row / p.tap_step;
  const double* partial = from.data + (filter * (from.taps + 1) + from_row) * from.splits;
  double total = 0;
  for (int split = lane; split < from.splits; split += 32) total += partial[split];
  total = warp_sum(total);
  if (lane != 0) return;
  if (is_bias)
    static_cast<T*>(p.grad_bias)[filter * p.bias_step] = narrow<T, double>(total);
  else
    static_cast<T*>(p.grad_weight)[filter * p.weight_filter + row * p.weight_tap] = narrow<T, double>(total);
}

// The caller has filled p.weight, p.bias and p.tap_step.
template <typename T>
const char* launch_reduce(const BackwardArguments& a, ReduceParameters& p, cudaStream_t stream) {
  p.grad_weight = a.grad_weight.data;
  p.grad_bias = a.grad_bias.data;
  p.weight_filter = a.grad_weight.filter;
  p.weight_tap = a.grad_weight.tap;
  p.bias_step = a.grad_bias.step;
  p.sums = a.geometry.C_out() * (a.geometry.K + 1);
  p.taps = static_cast<int>(a.geometry.K);
  reduce_kernel<T><<<static_cast<unsigned>(ceil_div(p.sums, 8)), 256, 0, stream>>>(p);
  return launch_error();
}

}  // namespace depthconv::cuda
