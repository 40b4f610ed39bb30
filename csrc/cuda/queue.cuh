// A thread's private queue of rows in shared memory, filled by asynchronous copies: as many loads in flight as the
// queue is deep, without a register for any of them and without a barrier, since a thread reads only what it copied
// itself.
#pragma once

#include "vec.cuh"

namespace depthconv::cuda {

// Starts copying a pack into shared memory, or zeros where it is not `present`.
template <typename T, int V>
__device__ __forceinline__ void copy_pack(Pack<T, V>* slot, const T* source, bool present) {
  constexpr int bytes = sizeof(T) * V;
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "what an asynchronous copy moves");
#if __CUDA_ARCH__ >= 800
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(slot));
  const int read = present ? bytes : 0;  // what is not read is filled with zeros
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(read) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(bytes), "r"(read)
                 : "memory");
#else
  *slot = present ? load<T, V>(source) : zero_pack<T, V>();
#endif
}

template <typename T, int V>
__device__ __forceinline__ Pack<T, V> read_pack(const Pack<T, V>* slot) {
  using word = typename Word<sizeof(T) * V>::type;
  const word bits = *reinterpret_cast<const word*>(slot);
  Pack<T, V> pack;
  memcpy(&pack, &bits, sizeof(bits));
  return pack;
}

// Depth packs a thread, threads side by side: consecutive threads touch consecutive banks.
template <typename T, int V, int Depth>
class RowQueue {
  static_assert((Depth & (Depth - 1)) == 0, "a power of two");

 public:
  __device__ explicit RowQueue(void* shared, int threads)
      : slots_(static_cast<Pack<T, V>*>(shared) + threadIdx.x), threads_(threads) {}

  // Starts copying a row's pack to place `index`, or zeros where the row is missing. One commit closes what belongs to
  // a step.
  __device__ __forceinline__ void push(int index, const T* source, bool present) {
    copy_pack<T, V>(slots_ + (index & (Depth - 1)) * threads_, source, present);
  }

  __device__ __forceinline__ Pack<T, V> at(int index) const {
    return read_pack<T, V>(slots_ + (index & (Depth - 1)) * threads_);
  }

 private:
  Pack<T, V>* slots_;
  int threads_;
};

__device__ __forceinline__ void commit_step() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the newest `Newer` steps have arrived.
template <int Newer>
__device__ __forceinline__ void wait_for_step() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(Newer) : "memory");
#endif
}

}  // namespace depthconv::cuda
