// The CPU kernels for AVX2, FMA and F16C: 32-byte vectors. Chosen at load, never by the compiler's flags.
#include "kernels.h"

#if defined(__x86_64__)

// After the includes, so that no inline function of a header is compiled for this target.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define VECTOR_BYTES 32

namespace depthconv::cpu {
namespace avx2 {
#include "vec.h"
#include "kernel_set.h"
}  // namespace avx2
}  // namespace depthconv::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace depthconv::cpu {
const Kernels avx2_kernels = {
    "avx2", VECTOR_BYTES, DEPTHCONV_KERNELS(avx2, forward_any), DEPTHCONV_KERNELS(avx2, backward_any)};
}  // namespace depthconv::cpu

#endif
