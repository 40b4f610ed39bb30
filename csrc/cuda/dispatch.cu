// The CUDA backend's entry points: the device, the dtype, and the plan's word between plain and planned kernels.
#include "launch_backward.cuh"

namespace depthconv::cuda {

#define DEPTHCONV_ELSEWHERE(T)                                                                         \
  extern template const char* launch_forward<T>(const Convolution&, const ForwardPlan&, cudaStream_t); \
  extern template const char* launch_backward<T>(const BackwardArguments&, const BackwardPlan&, double*, cudaStream_t)
DEPTHCONV_ELSEWHERE(float);
DEPTHCONV_ELSEWHERE(double);
DEPTHCONV_ELSEWHERE(__half);
DEPTHCONV_ELSEWHERE(__nv_bfloat16);

namespace {

// Makes a device current for a launch and gives the old one back.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    cudaGetDevice(&previous_);
    if (device != previous_) cudaSetDevice(device), changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

template <typename Call>
const char* with_dtype(Dtype dtype, Call call) {
  switch (dtype) {
    case Dtype::float32: return call(float{});
    case Dtype::float64: return call(double{});
    case Dtype::float16: return call(__half{});
    default: return call(__nv_bfloat16{});
  }
}

}  // namespace

namespace {

// Asked once a device: the answers do not change, and each question costs a microsecond.
struct Machine {
  int multiprocessors = 0, capability = 0;
};

Machine ask_machine(int device) {
  Machine m;
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&m.multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess || m.multiprocessors < 1)
    return {1, 0};
  m.capability = 10 * major + minor;
  return m;
}

Machine machine(int device) {
  constexpr int most = 64;
  static Machine known[most];
  if (device < 0 || device >= most) return ask_machine(device);
  if (!known[device].multiprocessors) known[device] = ask_machine(device);
  return known[device];
}

}  // namespace

int multiprocessors(int device) { return machine(device).multiprocessors; }
int capability(int device) { return machine(device).capability; }

const char* forward(const ForwardArguments& arguments, int device, void* stream) {
  const DeviceGuard guard(device);
  const Convolution convolution = as_convolution(arguments);
  const ForwardPlan plan = plan_forward(convolution, multiprocessors(device), capability(device));
  return with_dtype(arguments.dtype, [&](auto zero) {
    using T = decltype(zero);
    return plan.kernel == kernel_name::plain ? launch_plain_forward<T>(arguments, static_cast<cudaStream_t>(stream))
                                             : launch_forward<T>(convolution, plan, static_cast<cudaStream_t>(stream));
  });
}

const char* backward(const BackwardArguments& arguments, const BackwardPlan& plan, double* workspace, int device,
                     void* stream) {
  const DeviceGuard guard(device);
  return with_dtype(arguments.dtype, [&](auto zero) {
    return launch_backward<decltype(zero)>(arguments, plan, workspace, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace depthconv::cuda
