#include "launch_forward.cuh"

template const char* depthconv::cuda::launch_forward<__half>(const Convolution&, const ForwardPlan&, cudaStream_t);
