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

int multiprocessors(int device) {
  // Asked once a device: the answer does not change, and the question costs a microsecond.
  constexpr int most = 64;
  static int known[most] = {};
  if (device >= 0 && device < most && known[device]) return known[device];
  int count = 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess || count < 1) return 1;
  if (device >= 0 && device < most) known[device] = count;
  return count;
}

const char* forward(const ForwardArguments& arguments, int device, void* stream) {
  const DeviceGuard guard(device);
  const Convolution convolution = as_convolution(arguments);
  const ForwardPlan plan = plan_forward(convolution, multiprocessors(device));
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
