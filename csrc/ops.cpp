// The operators: schemas, checks of what tensors carry (layout, device, dtype), allocation, dispatch to CPU and CUDA.
// LibTorch's stable ABI only, so that one binary serves every torch from 2.10 on.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "failure.h"
#include "geometry.h"
#include "plan.h"

#ifdef DEPTHCONV_WITH_CUDA
// The only symbol of libtorch_cuda that is used: weak, so that the library loads beside a torch without CUDA.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);
#endif

namespace depthconv {
namespace {

using torch::stable::Tensor;

// A tensor's metadata, read once.
struct View {
  const char* name;
  int64_t rank;
  const int64_t* size;
  const int64_t* stride;
  int32_t dtype, device_type, device_index;

  std::vector<int64_t> sizes() const { return {size, size + rank}; }
};

void check(AOTITorchError code, const char* what) {
  if (code != AOTI_TORCH_SUCCESS) fail("depthconv: ", what, " failed");
}

View view(const char* name, const Tensor& tensor) {
  View v{name, 0, nullptr, nullptr, 0, 0, 0};
  int32_t layout = 0;
  int64_t *size = nullptr, *stride = nullptr;
  if (!tensor.defined()) fail("depthconv: ", name, " must be a tensor, but got None");
  check(aoti_torch_get_layout(tensor.get(), &layout), "reading a tensor's layout");
  if (layout != aoti_torch_layout_strided())
    fail("depthconv: ", name,
         " must be a dense (strided) tensor, but got another layout (sparse, quantized or opaque)");
  check(aoti_torch_get_dim(tensor.get(), &v.rank), "reading a tensor's rank");
  check(aoti_torch_get_sizes(tensor.get(), &size), "reading a tensor's sizes");
  check(aoti_torch_get_strides(tensor.get(), &stride), "reading a tensor's strides");
  check(aoti_torch_get_dtype(tensor.get(), &v.dtype), "reading a tensor's dtype");
  check(aoti_torch_get_device_type(tensor.get(), &v.device_type), "reading a tensor's device");
  check(aoti_torch_get_device_index(tensor.get(), &v.device_index), "reading a tensor's device");
  v.size = size;
  v.stride = stride;
  return v;
}

std::string device_text(const View& v) {
  std::string text = v.device_type == aoti_torch_device_type_cpu()    ? "cpu"
                     : v.device_type == aoti_torch_device_type_cuda() ? "cuda"
                                                                      : "device type " + std::to_string(v.device_type);
  if (v.device_type != aoti_torch_device_type_cpu()) text += ":" + std::to_string(v.device_index);
  return text;
}

std::string dtype_text(int32_t dtype) {
  const std::pair<int32_t, const char*> known[] = {
      {aoti_torch_dtype_float32(), "float32"},     {aoti_torch_dtype_float64(), "float64"},
      {aoti_torch_dtype_float16(), "float16"},     {aoti_torch_dtype_bfloat16(), "bfloat16"},
      {aoti_torch_dtype_int8(), "int8"},           {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_int32(), "int32"},         {aoti_torch_dtype_int64(), "int64"},
      {aoti_torch_dtype_uint8(), "uint8"},         {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_complex64(), "complex64"}, {aoti_torch_dtype_complex128(), "complex128"},
  };
  for (const auto& [value, name] : known)
    if (value == dtype) return name;
  return "dtype number " + std::to_string(dtype);
}

Dtype dtype_of(const View& v) {
  if (v.dtype == aoti_torch_dtype_float32()) return Dtype::float32;
  if (v.dtype == aoti_torch_dtype_bfloat16()) return Dtype::bfloat16;
  if (v.dtype == aoti_torch_dtype_float16()) return Dtype::float16;
  if (v.dtype == aoti_torch_dtype_float64()) return Dtype::float64;
  fail("depthconv: ", v.name, " must be float32, float64, float16 or bfloat16, but got ", dtype_text(v.dtype));
}

void same_device_and_dtype(const View& input, const View& other) {
  if (other.device_type != input.device_type || other.device_index != input.device_index)
    fail("depthconv: ", other.name, " must be on the same device as input, ", device_text(input), ", but got ",
         device_text(other));
  if (other.dtype != input.dtype)
    fail("depthconv: ", other.name, " must have the same dtype as input, ", dtype_text(input.dtype), ", but got ",
         dtype_text(other.dtype));
}

// Strides in (N, C, H, W) order; an unbatched tensor is a batch of one.
Strides strides_of(const View& v) {
  if (v.rank == 4) return {v.stride[0], v.stride[1], v.stride[2], v.stride[3]};
  return {0, v.stride[0], v.stride[1], v.stride[2]};
}

void* data_of(const Tensor& tensor) {
  void* data = nullptr;
  check(aoti_torch_get_data_ptr(tensor.get(), &data), "reading a tensor's address");
  return data;
}

Tensor empty(const std::vector<int64_t>& size, const std::vector<int64_t>& stride, int32_t dtype, const View& like) {
  AtenTensorHandle handle = nullptr;
  check(aoti_torch_empty_strided(static_cast<int64_t>(size.size()), size.data(), stride.data(), dtype, like.device_type,
                                 like.device_index, &handle),
        "allocating a tensor");
  return Tensor(handle);
}

Operand operand(const Tensor& tensor, const View& v) { return {data_of(tensor), strides_of(v)}; }

Operand fresh_operand(const Tensor& tensor, const std::vector<int64_t>& stride) {
  const size_t at = stride.size() - 3;
  return {data_of(tensor), {at ? stride[0] : 0, stride[at], stride[at + 1], stride[at + 2]}};
}

#ifdef DEPTHCONV_WITH_CUDA
void* current_stream(int device) {
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream)
    fail("depthconv: input is on a CUDA device, but this process's torch has no CUDA");
  check(aoti_torch_get_current_cuda_stream(device, &stream), "reading the current CUDA stream");
  return stream;
}
#endif

void run_forward(const ForwardArguments& arguments, const View& input) {
  if (input.device_type == aoti_torch_device_type_cpu()) return cpu::forward(arguments);
#ifdef DEPTHCONV_WITH_CUDA
  if (const char* error = cuda::forward(arguments, input.device_index, current_stream(input.device_index)))
    fail(cuda::explain_failure(error, input.device_index));
#endif
}

void run_backward(const BackwardArguments& arguments, const View& input) {
  if (input.device_type == aoti_torch_device_type_cpu()) return cpu::backward(arguments);
#ifdef DEPTHCONV_WITH_CUDA
  const int device = input.device_index;
  const BackwardPlan plan = plan_backward(arguments, cuda::multiprocessors(device), cuda::capability(device));
  // Freed when this returns: the allocator hands it on only to work queued after these kernels on the same stream.
  std::optional<Tensor> workspace;
  if (plan.workspace > 0) workspace = empty({plan.workspace}, {1}, aoti_torch_dtype_float64(), input);
  double* partial = workspace ? static_cast<double*>(data_of(*workspace)) : nullptr;
  if (const char* error = cuda::backward(arguments, plan, partial, device, current_stream(device)))
    fail(cuda::explain_failure(error, device));
#endif
}

Tensor forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
               const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
               const std::vector<int64_t>& dilation) {
  const View x = view("input", input), w = view("weight", weight);
  const Dtype dtype = dtype_of(x);
  same_device_and_dtype(x, w);
  std::optional<View> b;
  std::vector<int64_t> bias_size;
  if (bias) {
    b = view("bias", *bias);
    same_device_and_dtype(x, *b);
    bias_size = b->sizes();
  }
  const Geometry g = make_geometry(x.sizes(), w.sizes(), bias ? &bias_size : nullptr, stride, padding, dilation);
  const std::vector<int64_t> size = g.output_size();
  const std::vector<int64_t> strides = layout_strides(size, is_channels_last(x.rank, x.size, x.stride));
  Tensor output = empty(size, strides, x.dtype, x);
  if (g.N == 0) return output;
  ForwardArguments arguments;
  arguments.geometry = g;
  arguments.dtype = dtype;
  arguments.input = operand(input, x);
  arguments.weight = {data_of(weight), w.stride[0], w.stride[2]};
  if (bias) arguments.bias = {data_of(*bias), b->stride[0]};
  arguments.output = fresh_operand(output, strides);
  run_forward(arguments, x);
  return output;
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                            const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                                            const std::vector<int64_t>& dilation,
                                            const std::vector<bool>& output_mask) {
  const View x = view("input", input), w = view("weight", weight), dy = view("grad_output", grad_output);
  const Dtype dtype = dtype_of(x);
  same_device_and_dtype(x, w);
  same_device_and_dtype(x, dy);
  const Geometry g = make_geometry(x.sizes(), w.sizes(), nullptr, stride, padding, dilation);
  if (dy.sizes() != g.output_size())
    fail("depthconv: grad_output must have the output's size, ", show(g.output_size()), ", but got ", show(dy.sizes()));
  if (output_mask.size() != 3)
    fail("depthconv: output_mask must have three values (input, weight, bias), but got ",
         static_cast<int64_t>(output_mask.size()));
  Tensor grad_input, grad_weight, grad_bias;
  BackwardArguments arguments;
  arguments.geometry = g;
  arguments.dtype = dtype;
  if (output_mask[0]) {
    const std::vector<int64_t> strides = layout_strides(x.sizes(), is_channels_last(x.rank, x.size, x.stride));
    grad_input = empty(x.sizes(), strides, x.dtype, x);
    arguments.grad_input = fresh_operand(grad_input, strides);
  }
  if (output_mask[1]) {
    const std::vector<int64_t> strides = grad_weight_strides(w.sizes(), w.stride);
    grad_weight = empty(w.sizes(), strides, x.dtype, x);
    arguments.grad_weight = {data_of(grad_weight), strides[0], strides[2]};
  }
  if (output_mask[2]) {
    grad_bias = empty({g.C_out()}, {1}, x.dtype, x);
    arguments.grad_bias = {data_of(grad_bias), 1};
  }
  if (g.N == 0) {
    for (const auto& [wanted, sum] : {std::pair{output_mask[1], &grad_weight}, std::pair{output_mask[2], &grad_bias}})
      if (wanted) check(aoti_torch_zero_(sum->get()), "clearing a gradient");
  } else if (output_mask[0] || output_mask[1] || output_mask[2]) {
    arguments.grad_output = operand(grad_output, dy);
    arguments.input = operand(input, x);
    arguments.weight = {data_of(weight), w.stride[0], w.stride[2]};
    run_backward(arguments, x);
  }
  return {grad_input, grad_weight, grad_bias};
}

// The underscored operators take their integers one by one: a list costs an allocation on each side of the boundary.
Tensor plain_forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, int64_t stride_h,
                     int64_t stride_w, int64_t padding_h, int64_t padding_w, int64_t dilation_h, int64_t dilation_w) {
  return forward(input, weight, bias, {stride_h, stride_w}, {padding_h, padding_w}, {dilation_h, dilation_w});
}

std::tuple<Tensor, Tensor, Tensor> plain_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                                  int64_t stride_h, int64_t stride_w, int64_t padding_h,
                                                  int64_t padding_w, int64_t dilation_h, int64_t dilation_w,
                                                  bool of_input, bool of_weight, bool of_bias) {
  return backward(grad_output, input, weight, {stride_h, stride_w}, {padding_h, padding_w}, {dilation_h, dilation_w},
                  {of_input, of_weight, of_bias});
}

// Whatever is not a dense CPU or CUDA tensor ends here: the view names the argument that is at fault.
[[noreturn]] void reject(const View& input) {
  fail("depthconv: input must be a dense tensor on a CPU or CUDA device, but got ", device_text(input));
}

Tensor reject_forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                      const std::vector<int64_t>&, const std::vector<int64_t>&, const std::vector<int64_t>&) {
  const View x = view("input", input);
  same_device_and_dtype(x, view("weight", weight));
  if (bias) same_device_and_dtype(x, view("bias", *bias));
  dtype_of(x);
  reject(x);
}

std::tuple<Tensor, Tensor, Tensor> reject_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                                   const std::vector<int64_t>&, const std::vector<int64_t>&,
                                                   const std::vector<int64_t>&, const std::vector<bool>&) {
  const View x = view("input", input);
  same_device_and_dtype(x, view("weight", weight));
  same_device_and_dtype(x, view("grad_output", grad_output));
  dtype_of(x);
  reject(x);
}

std::string cpu_instruction_set() { return cpu::instruction_set(); }

#ifndef DEPTHCONV_WITH_CUDA
[[noreturn]] void no_cuda_kernels() {
  fail(
      "depthconv: input is on a CUDA device, but this is a CPU build of depthconv, without CUDA kernels. Rebuild where "
      "nvcc is found (`python -m depthconv` shows how this build was made), or move the tensors to the CPU.");
}
Tensor missing_forward(const Tensor&, const Tensor&, const std::optional<Tensor>&, const std::vector<int64_t>&,
                       const std::vector<int64_t>&, const std::vector<int64_t>&) {
  no_cuda_kernels();
}
std::tuple<Tensor, Tensor, Tensor> missing_backward(const Tensor&, const Tensor&, const Tensor&,
                                                    const std::vector<int64_t>&, const std::vector<int64_t>&,
                                                    const std::vector<int64_t>&, const std::vector<bool>&) {
  no_cuda_kernels();
}
#endif

}  // namespace
}  // namespace depthconv

#define DEPTHCONV_FORWARD_SCHEMA                                                               \
  "(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, SymInt[2] padding=0, " \
  "SymInt[2] dilation=1) -> Tensor"
#define DEPTHCONV_BACKWARD_SCHEMA                                                                               \
  "(Tensor grad_output, Tensor input, Tensor weight, SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, " \
  "bool[3] output_mask) -> (Tensor, Tensor, Tensor)"

#define DEPTHCONV_PLAIN_FORWARD_SCHEMA                                                                     \
  "(Tensor input, Tensor weight, Tensor? bias, int stride_h, int stride_w, int padding_h, int padding_w, " \
  "int dilation_h, int dilation_w) -> Tensor"
#define DEPTHCONV_PLAIN_BACKWARD_SCHEMA                                                                          \
  "(Tensor grad_output, Tensor input, Tensor weight, int stride_h, int stride_w, int padding_h, int padding_w, " \
  "int dilation_h, int dilation_w, bool of_input, bool of_weight, bool of_bias) -> (Tensor, Tensor, Tensor)"

// forward and backward are the public operators, which Python gives autograd, fake kernels and autocast. The
// underscored twins never get any: they are what an eager call runs when it needs none of that, at a fraction of the
// host time.
STABLE_TORCH_LIBRARY(depthconv, m) {
  m.def("forward" DEPTHCONV_FORWARD_SCHEMA);
  m.def("backward" DEPTHCONV_BACKWARD_SCHEMA);
  m.def("_forward" DEPTHCONV_PLAIN_FORWARD_SCHEMA);
  m.def("_backward" DEPTHCONV_PLAIN_BACKWARD_SCHEMA);
  m.def("_cpu_instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(depthconv, CompositeExplicitAutograd, m) {
  m.impl("_cpu_instruction_set", TORCH_BOX(&depthconv::cpu_instruction_set));
}

#define DEPTHCONV_IMPLEMENT(key, forward_kernel, backward_kernel) \
  STABLE_TORCH_LIBRARY_IMPL(depthconv, key, m) {                  \
    m.impl("forward", TORCH_BOX(&depthconv::forward_kernel));     \
    m.impl("backward", TORCH_BOX(&depthconv::backward_kernel));   \
  }
#define DEPTHCONV_IMPLEMENT_PLAIN(key)                          \
  STABLE_TORCH_LIBRARY_IMPL(depthconv, key, m) {                \
    m.impl("_forward", TORCH_BOX(&depthconv::plain_forward));   \
    m.impl("_backward", TORCH_BOX(&depthconv::plain_backward)); \
  }

DEPTHCONV_IMPLEMENT(CPU, forward, backward)
DEPTHCONV_IMPLEMENT_PLAIN(CPU)
#ifdef DEPTHCONV_WITH_CUDA
DEPTHCONV_IMPLEMENT(CUDA, forward, backward)
DEPTHCONV_IMPLEMENT_PLAIN(CUDA)
#else
DEPTHCONV_IMPLEMENT(CUDA, missing_forward, missing_backward)
#endif
DEPTHCONV_IMPLEMENT(SparseCPU, reject_forward, reject_backward)
DEPTHCONV_IMPLEMENT(SparseCUDA, reject_forward, reject_backward)
DEPTHCONV_IMPLEMENT(SparseCsrCPU, reject_forward, reject_backward)
DEPTHCONV_IMPLEMENT(SparseCsrCUDA, reject_forward, reject_backward)
DEPTHCONV_IMPLEMENT(QuantizedCPU, reject_forward, reject_backward)
DEPTHCONV_IMPLEMENT(QuantizedCUDA, reject_forward, reject_backward)
DEPTHCONV_IMPLEMENT(MkldnnCPU, reject_forward, reject_backward)
