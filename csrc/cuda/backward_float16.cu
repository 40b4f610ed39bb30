#include "launch_backward.cuh"

extern template const char* depthconv::cuda::launch_forward<__half>(const Convolution&, const ForwardPlan&,
                                                                    cudaStream_t);
template const char* depthconv::cuda::launch_backward<__half>(const BackwardArguments&, const BackwardPlan&, double*,
                                                              cudaStream_t);
