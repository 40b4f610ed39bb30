// Sizes, argument checks and output layout of a depthwise convolution: the one place for every backend.
// Plain C++: no torch, no CUDA, so that the plan, the kernels' hosts and the tests can share it.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace depthconv {

enum class Dtype : int { float32, float64, float16, bfloat16 };

inline int element_size(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32: return 4;
    case Dtype::float64: return 8;
    default: return 2;
  }
}

inline const char* name_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32: return "float32";
    case Dtype::float64: return "float64";
    case Dtype::float16: return "float16";
    default: return "bfloat16";
  }
}

struct Pair {
  int64_t h = 0, w = 0;
};

// Strides in elements, in (N, C, H, W) order.
struct Strides {
  int64_t n = 0, c = 0, h = 0, w = 0;
};

// One problem: input (N, C, H, W), weight (C * multiplier, 1, K, 1), output (N, C * multiplier, H_out, W_out).
struct Geometry {
  int64_t N = 0, C = 0, H = 0, W = 0;
  int64_t multiplier = 1;
  int64_t K = 0;
  Pair stride{1, 1}, padding{0, 0}, dilation{1, 1};
  int64_t H_out = 0, W_out = 0;
  bool batched = true;

  int64_t C_out() const { return C * multiplier; }
  std::vector<int64_t> output_size() const {
    if (batched) return {N, C_out(), H_out, W_out};
    return {C_out(), H_out, W_out};
  }
};

// Messages are put together without iostreams, whose locales do not survive two C++ runtimes in one process.
inline void append(std::string& text, const char* part) { text += part; }
inline void append(std::string& text, const std::string& part) { text += part; }
inline void append(std::string& text, int64_t part) { text += std::to_string(part); }

template <typename... Parts>
[[noreturn]] inline void fail(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  throw std::runtime_error(text);
}

inline std::string show(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// A list of one or two ints as ATen reads it: one value stands for both axes.
inline Pair as_pair(const char* argument, const std::vector<int64_t>& values, int64_t least) {
  if (values.size() != 1 && values.size() != 2)
    fail("depthconv: ", argument, " must have one or two values (height, width), but got ", show(values));
  const Pair pair{values[0], values.back()};
  if (pair.h < least || pair.w < least)
    fail("depthconv: ", argument, " must be at least ", least, " along both axes, but got ", show(values));
  return pair;
}

// floor((size + 2 * padding - dilation * (kernel - 1) - 1) / stride) + 1, checked against overflow.
inline int64_t output_extent(const char* axis, int64_t size, int64_t kernel, int64_t stride, int64_t padding,
                             int64_t dilation) {
  int64_t padded = 0, reach = 0;
  if (__builtin_mul_overflow(padding, int64_t{2}, &padded) || __builtin_add_overflow(padded, size, &padded))
    fail("depthconv: padding along the ", axis, " is out of range: got ", padding);
  if (__builtin_mul_overflow(dilation, kernel - 1, &reach) || __builtin_add_overflow(reach, int64_t{1}, &reach))
    fail("depthconv: dilation along the ", axis, " is out of range: got ", dilation, " with ", kernel, " taps");
  if (reach > padded)
    fail("depthconv: the kernel must not be larger than the padded input along the ", axis,
         ": dilation * (K - 1) + 1 = ", reach, " against ", axis, " + 2 * padding = ", padded);
  return (padded - reach) / stride + 1;
}

// Checks every size and builds the geometry. Dtypes and devices are the caller's to check first.
inline Geometry make_geometry(const std::vector<int64_t>& input, const std::vector<int64_t>& weight,
                              const std::vector<int64_t>* bias, const std::vector<int64_t>& stride,
                              const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation) {
  Geometry g;
  if (input.size() != 3 && input.size() != 4)
    fail("depthconv: input must be (N, C, H, W) or (C, H, W), but got size ", show(input));
  if (weight.size() != 4) fail("depthconv: weight must be 4-D, (C * multiplier, 1, K, 1), but got size ", show(weight));
  if (weight[1] != 1)
    fail("depthconv: weight must have size 1 in dimension 1 (one input channel a filter), but got size ", show(weight));
  if (weight[3] != 1)
    fail("depthconv: weight must have kernel width 1, (C * multiplier, 1, K, 1), but got size ", show(weight));
  if (weight[2] < 1) fail("depthconv: weight must have at least one tap along the height, but got size ", show(weight));
  g.batched = input.size() == 4;
  const size_t at = g.batched ? 1 : 0;
  g.N = g.batched ? input[0] : 1;
  g.C = input[at];
  g.H = input[at + 1];
  g.W = input[at + 2];
  g.K = weight[2];
  if (g.C < 1) fail("depthconv: input must have at least one channel, but got size ", show(input));
  if (weight[0] < 1 || weight[0] % g.C != 0)
    fail("depthconv: weight must have C * multiplier filters for the C = ", g.C, " channels of input, but got size ",
         show(weight));
  g.multiplier = weight[0] / g.C;
  if (bias && (bias->size() != 1 || (*bias)[0] != weight[0]))
    fail("depthconv: bias must be 1-D with one value a filter, [", weight[0], "], but got size ", show(*bias));
  g.stride = as_pair("stride", stride, 1);
  g.padding = as_pair("padding", padding, 0);
  g.dilation = as_pair("dilation", dilation, 1);
  // As ATen has it: an empty batch is fine, an empty plane in a batch that is not empty is a mistake.
  if (g.N > 0 && (g.H < 1 || g.W < 1))
    fail("depthconv: input must not be empty along the height or the width, but got size ", show(input));
  g.H_out = output_extent("height", g.H, g.K, g.stride.h, g.padding.h, g.dilation.h);
  g.W_out = output_extent("width", g.W, 1, g.stride.w, g.padding.w, 1);
  if (g.K == 1) g.dilation.h = 1;  // a single tap has none
  int64_t count = 1;  // an empty batch counts as one: strides have to fit as well
  for (int64_t size : g.output_size())
    if (__builtin_mul_overflow(count, size > 1 ? size : 1, &count))
      fail("depthconv: the output has more elements than 64 bits count: size ", show(g.output_size()));
  return g;
}

// Whether walking the axes from the innermost finds positive strides that never shrink. Axes of size 1 or 0 say
// nothing.
inline bool ordered_by_strides(const int64_t* size, const int64_t* stride, const std::array<int, 4>& innermost_first) {
  int64_t least = 1;
  for (int axis : innermost_first) {
    if (size[axis] <= 1) continue;
    if (stride[axis] < least) return false;
    least = stride[axis];
  }
  return true;
}

// The rule for y from x and for grad_input from x: channels_last exactly when the tensor is 4-D, channels_last-ordered
// by its strides and not NCHW-ordered as well; contiguous otherwise.
inline bool is_channels_last(int64_t rank, const int64_t* size, const int64_t* stride) {
  return rank == 4 && ordered_by_strides(size, stride, {1, 3, 2, 0}) && !ordered_by_strides(size, stride, {3, 2, 1, 0});
}

// Strides of a fresh tensor of this size (rank 3 or 4) in the given layout.
inline std::vector<int64_t> layout_strides(const std::vector<int64_t>& size, bool channels_last) {
  std::vector<int64_t> stride(size.size());
  auto span = [](int64_t extent) { return extent > 1 ? extent : 1; };
  if (channels_last) {
    stride = {span(size[1]) * span(size[2]) * span(size[3]), 1, span(size[1]) * span(size[3]), span(size[1])};
    return stride;
  }
  int64_t step = 1;
  for (size_t i = size.size(); i-- > 0;) {
    stride[i] = step;
    step *= span(size[i]);
  }
  return stride;
}

// grad_weight keeps the strides of a weight that is dense, as torch.empty_like would; contiguous otherwise.
inline std::vector<int64_t> grad_weight_strides(const std::vector<int64_t>& size, const int64_t* stride) {
  const int64_t filters = size[0], taps = size[2];
  const bool filter_major = (filters <= 1 || stride[0] == taps) && (taps <= 1 || stride[2] == 1);
  const bool tap_major = (filters <= 1 || stride[0] == 1) && (taps <= 1 || stride[2] == filters);
  if (filter_major || tap_major) return {stride[0], stride[1], stride[2], stride[3]};
  return layout_strides(size, false);
}

}  // namespace depthconv
