// Chooses the compiled backward kernels that a plan names, and launches them.
#pragma once

#include "backward.cuh"
#include "bank_backward.cuh"
#include "flat.cuh"
#include "launch_forward.cuh"
#include "march_backward.cuh"
#include "plain.cuh"

namespace depthconv::cuda {

inline BackwardParameters common_parameters(const BackwardArguments& a, const ReductionPlan& plan, double* workspace) {
  const Geometry& g = a.geometry;
  BackwardParameters p;
  p.tiling = DeviceTiling(plan.tiling);
  p.grad_output = a.grad_output.data;
  p.input = a.input.data;
  p.weight = a.weight.data;
  p.grad_input = a.grad_input.data;
  p.partial = workspace;
  p.grad_output_stride = a.grad_output.stride;
  p.input_stride = a.input.stride;
  p.grad_input_stride = a.grad_input.stride;
  p.weight_filter = a.weight.filter;
  p.weight_tap = a.weight.tap;
  p.multiplier = static_cast<int>(g.multiplier);
  p.taps = static_cast<int>(g.K);
  p.first_tap_step = plan.tap_chunk;
  p.splits = plan.splits;
  p.tap_chunks = plan.tap_chunks;
  p.rows = plan.tiling.rows;
  p.N = static_cast<int>(g.N);
  p.H = static_cast<int>(g.H);
  p.W = static_cast<int>(g.W);
  p.H_out = static_cast<int>(g.H_out);
  p.W_out = static_cast<int>(g.W_out);
  p.stride_h = static_cast<int>(g.stride.h);
  p.stride_w = static_cast<int>(g.stride.w);
  p.padding_h = static_cast<int>(g.padding.h);
  p.padding_w = static_cast<int>(g.padding.w);
  p.dilation_h = static_cast<int>(g.dilation.h);
  return p;
}

template <typename T>
unsigned shared_bytes_for(int taps) {
  return static_cast<unsigned>((taps + 1) * 2 * sizeof(accumulate_t<T>) * reduction_threads);
}

template <typename T, int V, bool ChannelsLast>
BackwardKernel pick_one_pass(int taps) {
  constexpr int rows = one_pass_rows(V);
  if constexpr (V == 1 && sizeof(T) < 8 && (ChannelsLast || sizeof(T) == 2)) switch (taps) {
      case 3: return one_pass_kernel<T, V, 3, rows, ChannelsLast>;
      case 5: return one_pass_kernel<T, V, 5, rows, ChannelsLast>;
      case 7: return one_pass_kernel<T, V, 7, rows, ChannelsLast>;
      case 11: return one_pass_kernel<T, V, 11, rows, ChannelsLast>;
    }
  return taps == 0 ? one_pass_kernel<T, V, 0, rows, ChannelsLast> : nullptr;
}

template <typename T, int V, bool ChannelsLast>
BackwardKernel pick_weight_gradient(int rows) {
  return rows == 1 ? weight_gradient_kernel<T, V, 1, ChannelsLast> : weight_gradient_kernel<T, V, 8, ChannelsLast>;
}

template <typename T, bool ChannelsLast>
BackwardKernel pick_march(const ReductionPlan& plan) {
  if constexpr (sizeof(T) < 8) switch (plan.vector_width) {
      case 1:
        if constexpr (sizeof(T) == 4) return pick_march_backward<T, 1, ChannelsLast>(plan.taps);
        break;
      case 2: return pick_march_backward<T, 2, ChannelsLast>(plan.taps);
      case 4: return pick_march_backward<T, 4, ChannelsLast>(plan.taps);
      case 8:
        if constexpr (sizeof(T) == 2) return pick_march_backward<T, 8, ChannelsLast>(plan.taps);
    }
  return nullptr;
}

template <typename T>
const char* launch_flat(const BackwardArguments& a, const FlatPlan& plan, bool with_bias, double* workspace,
                        cudaStream_t stream) {
  if constexpr (sizeof(T) == 8)
    return "depthconv: the plan names a kernel that was not compiled";
  else
    return launch_flat_backward<T>(a, plan, with_bias, workspace, stream);
}

// The one-pass kernels that own tiles of a channel: marching, or a tile of registers.
template <typename T>
const char* launch_one_pass(const BackwardArguments& a, const ReductionPlan& r, bool with_bias, double* workspace,
                            cudaStream_t stream) {
  constexpr int vector = 16 / sizeof(T);
  BackwardParameters p = common_parameters(a, r, workspace);
  p.channels = static_cast<int>(a.geometry.C);
  p.width = FastDivisor(a.geometry.W);
  p.with_bias = with_bias;
  unsigned shared = shared_bytes_for<T>(r.tap_chunk);
  BackwardKernel kernel = nullptr;
  if (r.march) {
    kernel = r.channels_last ? pick_march<T, true>(r) : pick_march<T, false>(r);
    if (!kernel) return "depthconv: the plan names a kernel that was not compiled";
    shared = march_shared_bytes(sizeof(T), r.vector_width, r.taps, r.channels_last);
    if (const char* error = allow_shared(reinterpret_cast<const void*>(kernel), shared)) return error;
  } else if (r.channels_last) {
    kernel = pick_one_pass<T, 1, true>(r.taps);
  } else {
    kernel = r.vector_width == 1 ? pick_one_pass<T, 1, false>(r.taps) : pick_one_pass<T, vector, false>(r.taps);
  }
  if (!kernel) return "depthconv: the plan names a kernel that was not compiled";
  kernel<<<static_cast<unsigned>(r.channel_groups * r.splits), r.threads, shared, stream>>>(p);
  return launch_error();
}

template <typename T>
const char* launch_weight_gradient(const BackwardArguments& a, const ReductionPlan& r, bool with_bias,
                                   double* workspace, cudaStream_t stream) {
  constexpr int vector = 16 / sizeof(T);
  BackwardParameters p = common_parameters(a, r, workspace);
  p.channels = static_cast<int>(a.geometry.C_out());
  p.width = FastDivisor(a.geometry.W_out);
  p.with_bias = with_bias;
  const BackwardKernel kernel = r.channels_last       ? pick_weight_gradient<T, 1, true>(r.tiling.rows)
                                : r.vector_width == 1 ? pick_weight_gradient<T, 1, false>(r.tiling.rows)
                                                      : pick_weight_gradient<T, vector, false>(r.tiling.rows);
  const unsigned blocks = static_cast<unsigned>(int64_t{r.channel_groups} * r.splits * r.tap_chunks);
  kernel<<<blocks, r.threads, shared_bytes_for<T>(r.tap_chunk), stream>>>(p);
  return launch_error();
}

template <typename T>
const char* launch_strided_input_gradient(const BackwardArguments& a, int width, cudaStream_t stream) {
  constexpr int vector = 16 / sizeof(T);
  const Geometry& g = a.geometry;
  GatherParameters p;
  p.cols = FastDivisor(g.W / width);
  p.tiles = FastDivisor(ceil_div(g.H, gather_rows));
  p.H = static_cast<int>(g.H);
  p.channels = FastDivisor(g.C);
  p.weight = a.weight.data;
  p.grad_output_stride = a.grad_output.stride;
  p.grad_input_stride = a.grad_input.stride;
  p.weight_filter = a.weight.filter;
  p.weight_tap = a.weight.tap;
  p.taps = static_cast<int>(g.K);
  p.multiplier = static_cast<int>(g.multiplier);
  p.H_out = static_cast<int>(g.H_out);
  p.W_out = static_cast<int>(g.W_out);
  p.stride_h = FastDivisor(g.stride.h);
  p.stride_w = FastDivisor(g.stride.w);
  p.padding_h = static_cast<int>(g.padding.h);
  p.padding_w = static_cast<int>(g.padding.w);
  p.dilation_h = static_cast<int>(g.dilation.h);
  p.divisor = FastDivisor(std::gcd(g.stride.h, g.dilation.h));
  p.channels_last = reads_channels_last(a.grad_input, g.C, g.W);
  const int64_t per_image = g.C * ceil_div(g.H, gather_rows) * (g.W / width);
  const int64_t images = std::max<int64_t>(1, index_limit / per_image);
  for (int64_t n = 0; n < g.N; n += images) {
    p.count = static_cast<unsigned>(std::min(images, g.N - n) * per_image);
    p.grad_output = at<T>(a.grad_output.data, n * a.grad_output.stride.n);
    p.grad_input = const_cast<T*>(at<T>(a.grad_input.data, n * a.grad_input.stride.n));
    const unsigned blocks = (p.count + 255) / 256;
    if (width == 1)
      strided_input_gradient_kernel<T, 1><<<blocks, 256, 0, stream>>>(p);
    else
      strided_input_gradient_kernel<T, vector><<<blocks, 256, 0, stream>>>(p);
    if (const char* error = launch_error()) return error;
  }
  return nullptr;
}

template <typename T>
const char* launch_bank(const BackwardArguments& a, const BankGradientPlan& plan, double* workspace,
                        cudaStream_t stream) {
  if constexpr (sizeof(T) == 8)
    return "depthconv: the plan names a kernel that was not compiled";
  else
    return launch_bank_gradient<T>(a, plan, workspace, stream);
}

// Follows the plan. `workspace` has plan.workspace doubles. Returns null or the error's text.
template <typename T>
const char* launch_backward(const BackwardArguments& a, const BackwardPlan& plan, double* workspace,
                            cudaStream_t stream) {
  if (plan.plain) return launch_plain_backward<T>(a, plan.plain_splits, workspace, stream);
  const Geometry& g = a.geometry;
  if (plan.input_strided)
    if (const char* error = launch_strided_input_gradient<T>(a, plan.strided_vector_width, stream)) return error;
  ReduceParameters sums;
  sums.tap_step = 1;
  for (const PhasePlan& each : plan.phases) {
    const BackwardArguments rows = phase_arguments(a, each.phase);
    if (each.input)
      if (const char* error = launch_forward<T>(grad_input_as_convolution(rows), each.input_plan, stream)) return error;
    sums.tap_step = static_cast<int>(each.phase.tap_step);
    if (!each.reduces()) continue;
    const ReductionPlan& r = each.reduction;
    const BackwardArguments read = columns_read(rows);
    const char* error = each.weight  ? launch_weight_gradient<T>(read, r, each.bias, workspace, stream)
                        : r.flat.use ? launch_flat<T>(read, r.flat, each.bias, workspace, stream)
                                     : launch_one_pass<T>(read, r, each.bias, workspace, stream);
    if (error) return error;
    const Partials left{workspace, static_cast<int>(each.phase.taps), r.splits};
    sums.weight[each.phase.first_tap] = left;
    if (each.bias) sums.bias = left;
    workspace += partial_sums(g.C_out(), each.phase.taps, r);
  }
  if (plan.weight) {
    const ReductionPlan& r = plan.weight_plan;
    const bool with_bias = a.grad_bias.data && !sums.bias.data;
    const char* error = r.bank.use ? launch_bank<T>(a, r.bank, workspace, stream)
                                   : launch_weight_gradient<T>(a, r, with_bias, workspace, stream);
    if (error) return error;
    const Partials left{workspace, static_cast<int>(g.K), r.splits};
    if (r.bank.use || plan.phases.empty()) sums.weight[0] = left, sums.tap_step = 1;
    if (with_bias) sums.bias = left;
  }
  return a.grad_weight.data || a.grad_bias.data ? launch_reduce<T>(a, sums, stream) : nullptr;
}

}  // namespace depthconv::cuda
