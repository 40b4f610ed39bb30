// What the CUDA runtime knows of a device on which a kernel did not start. Part of CUDA builds only.
#include "failure.h"

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/library.h>

#include "build_record.h"

namespace depthconv::cuda {

std::string explain_failure(const char* error, int device) {
  Machine machine;
  cudaDriverGetVersion(&machine.driver);
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, device) == cudaSuccess) {
    machine.major = properties.major;
    machine.minor = properties.minor;
    machine.device = properties.name;
  }
  cudaGetLastError();  // what failed here is no failure of the next launch
  return depthconv::explain_failure(error, DEPTHCONV_ARCHITECTURES, DEPTHCONV_CUDA, machine);
}

}  // namespace depthconv::cuda

namespace {

std::string explain(std::string error, int64_t device) {
  return depthconv::cuda::explain_failure(error.c_str(), static_cast<int>(device));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(depthconv, m) { m.def("_explain_failure(str error, int device) -> str"); }

STABLE_TORCH_LIBRARY_IMPL(depthconv, CompositeExplicitAutograd, m) { m.impl("_explain_failure", TORCH_BOX(&explain)); }
