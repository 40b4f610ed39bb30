// What a backend gets: raw pointers, strides and the geometry. The binding allocates, a backend fills.
#pragma once

#include "geometry.h"

namespace depthconv {

// A 4-D tensor: the first element's address and the strides in elements.
struct Operand {
  void* data = nullptr;
  Strides stride;
};

// The weight or its gradient: filter co, tap k lies at data[co * filter + k * tap].
struct Filters {
  void* data = nullptr;
  int64_t filter = 0, tap = 0;
};

// A vector over the filters: bias, or its gradient.
struct PerFilter {
  void* data = nullptr;
  int64_t step = 0;
};

// Fills output; bias.data is null without a bias. Never called with an empty output.
struct ForwardArguments {
  Geometry geometry;
  Dtype dtype;
  Operand input;
  Filters weight;
  PerFilter bias;
  Operand output;
};

// Fills what is asked for: grad_input.data, grad_weight.data, grad_bias.data are null where the gradient is not wanted.
// Strides of grad_output and input are any, stride 0 included. Never called with an empty batch.
// H_out or W_out is at least 1; H and W are at least 1.
struct BackwardArguments {
  Geometry geometry;
  Dtype dtype;
  Operand grad_output;
  Operand input;
  Filters weight;
  Operand grad_input;
  Filters grad_weight;
  PerFilter grad_bias;
};

namespace cpu {
void forward(const ForwardArguments& arguments);
void backward(const BackwardArguments& arguments);
const char* instruction_set();  // "avx512", "avx2" or "baseline": what the loader picked on this machine
}  // namespace cpu

}  // namespace depthconv
