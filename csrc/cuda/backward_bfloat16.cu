#include "launch_backward.cuh"

extern template const char* depthconv::cuda::launch_forward<__nv_bfloat16>(const Convolution&, const ForwardPlan&,
                                                                           cudaStream_t);
template const char* depthconv::cuda::launch_backward<__nv_bfloat16>(const BackwardArguments&, const BackwardPlan&,
                                                                     double*, cudaStream_t);
