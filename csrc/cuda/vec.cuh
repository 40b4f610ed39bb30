// Elements, packs of elements that move in one load or store, and the type they accumulate in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace depthconv::cuda {

template <typename T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <typename T>
using accumulate_t = typename Accumulate<T>::type;

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T, typename A>
__device__ __forceinline__ T narrow(A value);
template <>
__device__ __forceinline__ float narrow<float, float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ float narrow<float, double>(double value) {
  return static_cast<float>(value);
}
template <>
__device__ __forceinline__ double narrow<double, double>(double value) {
  return value;
}
template <>
__device__ __forceinline__ __half narrow<__half, float>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __half narrow<__half, double>(double value) {
  return __double2half(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16, float>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16, double>(double value) {
  return __double2bfloat16(value);
}

// V elements side by side. A pack of 16, 8 or 4 bytes moves in one instruction.
template <typename T, int V>
struct alignas(sizeof(T) * V) Pack {
  T value[V];
};

template <int Bytes>
struct Word;
template <>
struct Word<16> {
  using type = uint4;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<4> {
  using type = unsigned int;
};
template <>
struct Word<2> {
  using type = unsigned short;
};

// Through the read-only path: nothing in a launch writes what it reads.
template <typename T, int V>
__device__ __forceinline__ Pack<T, V> load(const T* address) {
  using word = typename Word<sizeof(T) * V>::type;
  const word bits = __ldg(reinterpret_cast<const word*>(address));
  Pack<T, V> pack;
  memcpy(&pack, &bits, sizeof(bits));
  return pack;
}

template <typename T, int V>
__device__ __forceinline__ Pack<T, V> zero_pack() {
  Pack<T, V> pack;
  memset(&pack, 0, sizeof(pack));
  return pack;
}

template <typename T, int V>
__device__ __forceinline__ void store(T* address, const accumulate_t<T> (&value)[V]) {
  using word = typename Word<sizeof(T) * V>::type;
  Pack<T, V> pack;
#pragma unroll
  for (int v = 0; v < V; ++v) pack.value[v] = narrow<T, accumulate_t<T>>(value[v]);
  word bits;
  memcpy(&bits, &pack, sizeof(bits));
  *reinterpret_cast<word*>(address) = bits;
}

}  // namespace depthconv::cuda
