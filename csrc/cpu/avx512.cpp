// The CPU kernels for AVX-512 (F, BW, DQ, VL): 64-byte vectors. Chosen at load, never by the compiler's flags.
#include "kernels.h"

#if defined(__x86_64__)

// After the includes, so that no inline function of a header is compiled for this target.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define VECTOR_BYTES 64

namespace depthconv::cpu {
namespace avx512 {
#include "vec.h"
#include "kernel_set.h"
}  // namespace avx512
}  // namespace depthconv::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace depthconv::cpu {
const Kernels avx512_kernels = {
    "avx512", VECTOR_BYTES, DEPTHCONV_KERNELS(avx512, forward_any), DEPTHCONV_KERNELS(avx512, backward_any)};
}  // namespace depthconv::cpu

#endif
