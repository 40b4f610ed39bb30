// Chooses the compiled forward kernel that a plan names, and launches it.
#pragma once

#include "band.cuh"
#include "bank.cuh"
#include "flat.cuh"
#include "forward.cuh"
#include "march_forward.cuh"

namespace depthconv::cuda {

template <typename T, int V, bool ChannelsLast>
ForwardKernel pick_forward(const ForwardPlan& plan) {
  if constexpr (sizeof(T) < 8 && V > 1)
    if (plan.march) return pick_march_forward<T, V, ChannelsLast>(plan.taps);
  constexpr int widest = ChannelsLast ? (sizeof(T) == 8 ? 2 : 4) : 16 / sizeof(T);
  if constexpr (V == 1 || V == widest) return pick_kernel<T, V, ChannelsLast>(plan);
  return nullptr;
}

template <typename T>
ForwardKernel pick_forward(const ForwardPlan& plan) {
  switch (plan.vector_width) {
    case 1: return plan.channels_last ? pick_forward<T, 1, true>(plan) : pick_forward<T, 1, false>(plan);
    case 2: return plan.channels_last ? pick_forward<T, 2, true>(plan) : pick_forward<T, 2, false>(plan);
    case 4:
      if constexpr (sizeof(T) < 8)
        return plan.channels_last ? pick_forward<T, 4, true>(plan) : pick_forward<T, 4, false>(plan);
      break;
    case 8:
      if constexpr (sizeof(T) == 2) return plan.channels_last ? nullptr : pick_forward<T, 8, false>(plan);
  }
  return nullptr;
}

// Follows the plan, plan.images of the batch a launch. Returns null or the error's text.
template <typename T>
const char* launch_forward(const Convolution& c, const ForwardPlan& plan, cudaStream_t stream) {
  if constexpr (sizeof(T) < 8) {
    if (plan.bank.use) return launch_bank<T>(c, plan, stream);
    if (plan.flat.use) return launch_flat_forward<T>(c, plan.flat, stream);
  }
  if constexpr (sizeof(T) == 2)
    if (plan.band_steps) return launch_band<T>(c, plan, stream);
  for (int64_t n = 0; n < c.N; n += plan.images) {
    Tiling tiling = plan.tiling;
    tiling.lines = tiling.lines / c.N * std::min(plan.images, c.N - n);
    tiling.blocks = tiling.col_groups * ceil_div(tiling.lines, tiling.block_lines);
    ForwardParameters p;
    p.tiling = DeviceTiling(tiling);
    p.channels = FastDivisor(plan.channels_last ? c.C_out / plan.vector_width : c.C_out);
    p.multiplier = FastDivisor(c.multiplier);
    p.spread_w = FastDivisor(c.spread_w);
    p.input = at<T>(c.input.data, n * c.input.stride.n);
    p.weight = c.weight.data;
    p.bias = c.bias.data;
    p.output = const_cast<T*>(at<T>(c.output.data, n * c.output.stride.n));
    p.input_stride = c.input.stride;
    p.output_stride = c.output.stride;
    p.weight_filter = c.weight.filter;
    p.weight_tap = c.weight.tap;
    p.bias_step = c.bias.step;
    p.taps = static_cast<int>(c.K);
    p.fold = static_cast<int>(c.fold);
    p.rows = tiling.rows;
    p.H = static_cast<int>(c.H);
    p.W = static_cast<int>(c.W);
    p.H_out = static_cast<int>(c.H_out);
    p.stride_h = static_cast<int>(c.stride.h);
    p.stride_w = static_cast<int>(c.stride.w);
    p.padding_h = static_cast<int>(c.padding.h);
    p.padding_w = static_cast<int>(c.padding.w);
    p.dilation_h = static_cast<int>(c.dilation.h);
    const ForwardKernel kernel = pick_forward<T>(plan);
    if (!kernel) return "depthconv: the plan names a kernel that was not compiled";
    kernel<<<static_cast<unsigned>(tiling.blocks), plan.threads, 0, stream>>>(p);
    if (const char* error = launch_error()) return error;
  }
  return nullptr;
}

}  // namespace depthconv::cuda
