// depthconv._C: importing it loads the operators that lie beside it; it offers what is not an operator: the build's
// facts, the geometry and the plan of a problem. pybind11 headers only, nothing of libtorch. pybind11 internals of our
// own: shared ones hold the exception translators of every other extension in the process, and an exception of ours has
// been seen to crash in one of them.
#define PYBIND11_COMPILER_TYPE "_depthconv"
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "failure.h"
#include "geometry.h"
#include "plan.h"

#define DEPTHCONV_TEXT_OF(x) #x
#define DEPTHCONV_TEXT(x) DEPTHCONV_TEXT_OF(x)
#define DEPTHCONV_BINDING                                                                                        \
  "CPython " DEPTHCONV_TEXT(PY_MAJOR_VERSION) "." DEPTHCONV_TEXT(PY_MINOR_VERSION) ", pybind11 " DEPTHCONV_TEXT( \
      PYBIND11_VERSION_MAJOR) "." DEPTHCONV_TEXT(PYBIND11_VERSION_MINOR) ", compiler " __VERSION__

namespace py = pybind11;
using namespace depthconv;

namespace {

using Ints = std::vector<int64_t>;

Dtype dtype_named(const std::string& name) {
  for (Dtype dtype : {Dtype::float32, Dtype::float64, Dtype::float16, Dtype::bfloat16})
    if (name == name_of(dtype)) return dtype;
  throw py::value_error("dtype must be float32, float64, float16 or bfloat16, but got " + name);
}

py::dict geometry(const Ints& input_size, const Ints& input_stride, const Ints& weight_size, const Ints& weight_stride,
                  const std::optional<Ints>& bias_size, const Ints& stride, const Ints& padding, const Ints& dilation) {
  const Geometry g =
      make_geometry(input_size, weight_size, bias_size ? &*bias_size : nullptr, stride, padding, dilation);
  if (input_stride.size() != input_size.size() || weight_stride.size() != weight_size.size())
    throw py::value_error("input_stride and weight_stride must have one value an axis");
  const bool channels_last =
      is_channels_last(static_cast<int64_t>(input_size.size()), input_size.data(), input_stride.data());
  py::dict out;
  out["output_size"] = g.output_size();
  out["output_stride"] = layout_strides(g.output_size(), channels_last);
  out["channels_last"] = channels_last;
  out["grad_input_stride"] = layout_strides(input_size, channels_last);
  out["grad_weight_stride"] = grad_weight_strides(weight_size, weight_stride.data());
  return out;
}

// A made-up address with the given remainder modulo 16, so that the plan sees the alignment that the tensor has.
void* address(int64_t offset_bytes) { return reinterpret_cast<void*>(uintptr_t{1} << 20 | (offset_bytes & 15)); }

Operand operand(const Ints& stride, int64_t offset_bytes) {
  if (stride.size() == 4) return {address(offset_bytes), {stride[0], stride[1], stride[2], stride[3]}};
  if (stride.size() == 3) return {address(offset_bytes), {0, stride[0], stride[1], stride[2]}};
  throw py::value_error("strides must have three or four values");
}

py::dict describe(const Tiling& t) {
  py::dict out;
  out["rows"] = t.rows;
  out["row_step"] = t.row_step;
  out["cols"] = t.cols;
  out["tiles"] = t.tiles;
  out["lines"] = t.lines;
  out["block_cols"] = t.block_cols;
  out["block_lines"] = t.block_lines;
  return out;
}

py::dict describe(const ForwardPlan& plan) {
  py::dict out = describe(plan.tiling);
  out["kernel"] = plan.kernel;
  out["reason"] = plan.reason;
  out["vector_width"] = plan.vector_width;
  out["taps"] = plan.taps;
  out["step"] = plan.step;
  out["threads"] = plan.threads;
  out["blocks"] = plan.tiling.blocks;
  if (plan.bank.use) {
    out["filters"] = plan.bank.filters;
    out["chunks"] = plan.bank.chunks;
    out["filter_groups"] = plan.bank.filter_groups;
    out["tap_splits"] = plan.bank.tap_splits;
    out["shared_bytes"] = plan.bank.shared_bytes;
  }
  return out;
}

py::dict describe(const ReductionPlan& plan) {
  py::dict out = describe(plan.tiling);
  out["kernel"] = plan.kernel;
  out["reason"] = plan.reason;
  out["vector_width"] = plan.vector_width;
  out["taps"] = plan.taps;
  out["threads"] = plan.threads;
  out["splits"] = plan.splits;
  out["tap_chunks"] = plan.tap_chunks;
  out["blocks"] = int64_t{plan.channel_groups} * plan.splits * plan.tap_chunks;
  if (plan.bank.use) {
    out["filters"] = plan.bank.filters;
    out["filters_a_block"] = plan.bank.filters_a_block;
    out["tap_chunk"] = plan.bank.tap_chunk;
    out["shared_bytes"] = plan.bank.shared_bytes;
  }
  return out;
}

py::dict describe(const Phase& phase) {
  py::dict out;
  out["row"] = phase.row;
  out["height"] = phase.height;
  out["first_tap"] = phase.first_tap;
  out["tap_step"] = phase.tap_step;
  out["taps"] = phase.taps;
  out["padding"] = phase.padding;
  out["dilation"] = phase.dilation;
  return out;
}

py::dict named(const char* kernel, const char* reason) {
  py::dict out;
  out["kernel"] = kernel;
  out["reason"] = reason;
  return out;
}

py::dict plan(const std::string& direction, const std::string& device, const std::string& dtype_name,
              const Ints& input_size, const Ints& input_stride, int64_t input_offset_bytes, const Ints& weight_size,
              const Ints& weight_stride, const Ints& stride, const Ints& padding, const Ints& dilation,
              const std::optional<Ints>& grad_output_stride, int64_t grad_output_offset_bytes,
              const std::vector<bool>& output_mask, int multiprocessors, int capability) {
  if (direction != "forward" && direction != "backward")
    throw py::value_error("direction must be 'forward' or 'backward', but got " + direction);
  if (device != "cpu" && device != "cuda") throw py::value_error("device must be 'cpu' or 'cuda', but got " + device);
  if (output_mask.size() != 3) throw py::value_error("output_mask must have three values");
  const Dtype dtype = dtype_named(dtype_name);
  const Geometry g = make_geometry(input_size, weight_size, nullptr, stride, padding, dilation);
  const bool channels_last =
      is_channels_last(static_cast<int64_t>(input_size.size()), input_size.data(), input_stride.data());
  const Operand input = operand(input_stride, input_offset_bytes);
  const Filters weight{address(0), weight_stride.at(0), weight_stride.at(2)};
  const bool forward = direction == "forward";
  if (g.N == 0) return named("none", "an empty batch: nothing to compute");
  if (device == "cpu") {
    const char* layout = channels_last ? "channels_last" : "contiguous";
    py::dict out = named("cpu", layout);
    out["reason"] = std::string("CPU tensors: loops over the ") + layout + " output, on all of torch's threads";
    return out;
  }
  if (forward) {
    ForwardArguments a{g, dtype, input, weight, {}, operand(layout_strides(g.output_size(), channels_last), 0)};
    return describe(plan_forward(as_convolution(a), multiprocessors, capability));
  }
  BackwardArguments a;
  a.geometry = g;
  a.dtype = dtype;
  a.input = input;
  a.weight = weight;
  a.grad_output = operand(grad_output_stride ? *grad_output_stride : layout_strides(g.output_size(), channels_last),
                          grad_output_offset_bytes);
  if (output_mask[0]) a.grad_input = operand(layout_strides(input_size, channels_last), 0);
  if (output_mask[1]) a.grad_weight = weight;
  if (output_mask[2]) a.grad_bias = {address(0), 1};
  const BackwardPlan chosen = plan_backward(a, multiprocessors, capability);
  py::list kernels;
  if (chosen.plain) kernels.append(named(kernel_name::plain, chosen.reason));
  for (const PhasePlan& phase : chosen.phases) {
    const bool strided = g.stride.h > 1;
    auto add = [&](py::dict kernel) {
      if (strided) kernel["phase"] = phase.phase.row;
      kernels.append(kernel);
    };
    if (phase.input) {
      py::dict kernel = describe(phase.input_plan);
      if (strided && phase.phase.taps == 0) kernel["reason"] = "no output reads these rows of the input: zeros";
      add(kernel);
    }
    if (phase.reduces()) add(describe(phase.reduction));
  }
  if (chosen.input_strided) {
    py::dict gather =
        named(kernel_name::strided_input_gradient, "a large stride: each input row gathers the outputs that read it");
    gather["vector_width"] = chosen.strided_vector_width;
    kernels.append(gather);
  }
  if (chosen.weight) kernels.append(describe(chosen.weight_plan));
  if (!chosen.plain && (output_mask[1] || output_mask[2]))
    kernels.append(named(kernel_name::reduce, "adds the blocks' partial sums in a fixed order"));
  py::dict out;
  out["kernels"] = kernels;
  if (chosen.phases.size() > 1) {
    py::list phases;
    for (const PhasePlan& phase : chosen.phases) phases.append(describe(phase.phase));
    out["phases"] = phases;
  }
  out["workspace_bytes"] = chosen.workspace * 8;
  return out;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "What depthconv offers beside its operators: build record, geometry and plan.";
  // The operators need libtorch's symbols, which importing torch provides.
  const py::module_ torch = py::module_::import("torch");
  const py::object path = py::module_::import("depthconv").attr("__path__").attr("__getitem__")(0);
  torch.attr("ops").attr("load_library")(py::str("{}/_ops.so").format(path));

  m.def(
      "build_info",
      [] {
        const py::object operators = py::module_::import("torch").attr("ops").attr("depthconv");
        py::dict record = py::module_::import("json").attr("loads")(operators.attr("_build_record")());
        record["binding"] = DEPTHCONV_BINDING;
        record["cpu_instruction_set"] = operators.attr("_cpu_instruction_set")();
        return record;
      },
      "How the operators and this module were built, and the CPU instruction set that was picked on this machine.");
  m.def(
      "explain_failure",
      [](const std::string& error, const std::string& architectures, const std::string& cuda, int driver,
         std::pair<int, int> capability, const std::string& device) {
        return explain_failure(error, architectures, cuda, {driver, capability.first, capability.second, device});
      },
      py::arg("error"), py::arg("architectures"), py::arg("cuda"), py::arg("driver"), py::arg("capability"),
      py::arg("device"), "What a failed launch would say of a build and a machine.");
  m.def("geometry", &geometry, py::arg("input_size"), py::arg("input_stride"), py::arg("weight_size"),
        py::arg("weight_stride"), py::arg("bias_size") = py::none(), py::arg("stride") = Ints{1},
        py::arg("padding") = Ints{0}, py::arg("dilation") = Ints{1},
        "Checked sizes and the strides that the operators give their results.");
  m.def("plan", &plan, py::arg("direction"), py::arg("device"), py::arg("dtype"), py::arg("input_size"),
        py::arg("input_stride"), py::arg("input_offset_bytes"), py::arg("weight_size"), py::arg("weight_stride"),
        py::arg("stride") = Ints{1}, py::arg("padding") = Ints{0}, py::arg("dilation") = Ints{1},
        py::arg("grad_output_stride") = py::none(), py::arg("grad_output_offset_bytes") = 0,
        py::arg("output_mask") = std::vector<bool>{true, true, true}, py::arg("multiprocessors") = 132,
        py::arg("capability") = 90, "The kernels that would run a problem, and why.");
}
