// Contiguous runs of a tensor in shared memory: what a block needs is copied in whole 16-byte words, however its rows
// are aligned, and written back so.
#pragma once

#include "vec.cuh"

namespace depthconv::cuda {

// Where a run starts within its 16-byte word, in elements: a staged run keeps that offset, so that words stay words.
template <typename T>
__device__ __forceinline__ int word_offset(const T* address) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address) % 16 / sizeof(T));
}

__device__ __forceinline__ void copy_word(void* target, const void* source) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(target))),
      "l"(source)
      : "memory");
#else
  *static_cast<uint4*>(target) = __ldg(static_cast<const uint4*>(source));
#endif
}

// Starts copying source[0, count) to shared[word_offset, ...). The whole block calls it; wait_for_stage() ends it.
template <typename T>
__device__ __forceinline__ void stage(T* shared, const T* source, int count) {
  constexpr int word = 16 / sizeof(T);
  const int offset = word_offset(source);
  const int lead = offset ? min(word - offset, count) : 0;
  const int words = (count - lead) / word;
  for (int i = threadIdx.x; i < words; i += blockDim.x)
    copy_word(shared + offset + lead + i * word, source + lead + i * word);
  const int done = lead + words * word;
  if (threadIdx.x < lead) shared[offset + threadIdx.x] = source[threadIdx.x];
  if (threadIdx.x < count - done) shared[offset + done + threadIdx.x] = source[done + threadIdx.x];
}

__device__ __forceinline__ void wait_for_stage() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
  __syncthreads();
}

// Writes shared[offset, offset + count) to target[0, count): in words where both lie alike, else element by element.
template <typename T>
__device__ __forceinline__ void unstage(T* target, const T* shared, int offset, int count) {
  constexpr int word = 16 / sizeof(T);
  if (offset != word_offset(target)) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) target[i] = shared[offset + i];
    return;
  }
  const int lead = offset ? min(word - offset, count) : 0;
  const int words = (count - lead) / word;
  for (int i = threadIdx.x; i < words; i += blockDim.x)
    *reinterpret_cast<uint4*>(target + lead + i * word) =
        *reinterpret_cast<const uint4*>(shared + offset + lead + i * word);
  const int done = lead + words * word;
  if (threadIdx.x < lead) target[threadIdx.x] = shared[offset + threadIdx.x];
  if (threadIdx.x < count - done) target[done + threadIdx.x] = shared[offset + done + threadIdx.x];
}

}  // namespace depthconv::cuda
