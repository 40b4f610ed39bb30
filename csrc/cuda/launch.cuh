// What every launcher shares: the division of flat indices on the device, types by dtype, the launch check.
#pragma once

#include <cuda_runtime.h>

#include "../plan.h"
#include "vec.cuh"

namespace depthconv::cuda {

__device__ __forceinline__ unsigned divide(unsigned n, const FastDivisor& d, unsigned& remainder) {
  const unsigned quotient = (__umulhi(n, d.magic) + n) >> d.shift;
  remainder = n - quotient * d.divisor;
  return quotient;
}

// The device's form of a Tiling: where a thread of a block finds its column and line, and a line its tile and plane.
struct DeviceTiling {
  FastDivisor block_cols, col_groups, tiles, row_step;
  unsigned cols, lines, block_lines;

  DeviceTiling() = default;
  explicit DeviceTiling(const Tiling& t)
      : block_cols(t.block_cols),
        col_groups(t.col_groups),
        tiles(t.tiles),
        row_step(t.row_step),
        cols(static_cast<unsigned>(t.cols)),
        lines(static_cast<unsigned>(t.lines)),
        block_lines(static_cast<unsigned>(t.block_lines)) {}
};

// First row of a tile: tiles count the interleaved phases first.
__device__ __forceinline__ int first_row(const DeviceTiling& t, unsigned tile, int rows) {
  unsigned phase;
  const unsigned base = divide(tile, t.row_step, phase);
  return static_cast<int>(base * t.row_step.divisor * rows + phase);
}

template <typename T>
const T* at(const void* base, int64_t offset) {
  return static_cast<const T*>(base) + offset;
}

// null, or what the runtime says of the launch just made.
inline const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// More than 48 KB of shared memory a block must be asked for.
inline const char* allow_shared(const void* kernel, unsigned bytes) {
  if (bytes <= 48 * 1024) return nullptr;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace depthconv::cuda
