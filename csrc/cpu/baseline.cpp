// The CPU kernels for any machine: 16-byte vectors, which every x86-64 and AArch64 has.
#include "kernels.h"

#define VECTOR_BYTES 16

namespace depthconv::cpu {
namespace baseline {
#include "vec.h"
#include "kernel_set.h"
}  // namespace baseline

const Kernels baseline_kernels = {
    "baseline", VECTOR_BYTES, DEPTHCONV_KERNELS(baseline, forward_any), DEPTHCONV_KERNELS(baseline, backward_any)};
}  // namespace depthconv::cpu
