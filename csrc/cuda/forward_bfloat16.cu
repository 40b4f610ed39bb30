#include "launch_forward.cuh"

template const char* depthconv::cuda::launch_forward<__nv_bfloat16>(const Convolution&, const ForwardPlan&,
                                                                    cudaStream_t);
