#include "launch_forward.cuh"

template const char* depthconv::cuda::launch_forward<float>(const Convolution&, const ForwardPlan&, cudaStream_t);
