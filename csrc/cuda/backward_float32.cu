#include "launch_backward.cuh"

extern template const char* depthconv::cuda::launch_forward<float>(const Convolution&, const ForwardPlan&,
                                                                   cudaStream_t);
template const char* depthconv::cuda::launch_backward<float>(const BackwardArguments&, const BackwardPlan&, double*,
                                                             cudaStream_t);
