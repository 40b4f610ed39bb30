// What the entries (forward.cpp, backward.cpp) and the kernels of each instruction set (kernel_set.h) share: plain
// structs and tables of functions. A job is a problem whose width has been absorbed (see absorb_width): every output
// column reads the input column of the same index, so that only the height still has a stride, padding and dilation.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../arguments.h"

#define DEPTHCONV_INLINE inline __attribute__((always_inline))
#define DEPTHCONV_UNROLL _Pragma("GCC unroll 8")  // loops over the registers of a tile

namespace depthconv::cpu {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

constexpr int64_t most_padded_planes = 16;
constexpr int64_t most_lanes = 16;  // of any instruction set here: channel counts are padded to it

// Rows of taps along the height and the split of the work; the split depends on sizes only, never on threads.
struct Job {
  int64_t N = 0, C = 0, multiplier = 1, K = 0, H = 0, H_out = 0;
  int64_t W = 0;  // columns that both sides have
  int64_t stride = 1, padding = 0, dilation = 1;
  bool channels_last = false;
  bool flat = false;  // rows follow each other without a gap on both sides: neighbours merge
  int64_t batch_chunk = 1, channel_chunk = 1, row_chunk = 1;     // sizes of one task
  int64_t batch_chunks = 1, channel_chunks = 1, row_chunks = 1;  // their number
  // channels_last without gaps between pixels: so many of them make one run of merged_pixels * C channels, whose
  // weights and sums are repeated alike, so that few channels fill vectors too.
  int64_t merged_pixels = 1;
  int64_t padded_channels = 0;  // merged_pixels * C rounded up to most_lanes
  int64_t padded_planes = 0;    // above 0: so many at a time are copied between rows of zeros
  int64_t padded_size = 0;      // sums that each takes
  int64_t tasks() const { return batch_chunks * channel_chunks * row_chunks; }
};

// Weights and biases come as sums (float or double): [C_out][K] and [C_out] for rows, [K][padded_channels] and
// [padded_channels] for channels_last.
struct ForwardJob : Job {
  Operand input, output;
  bool filters_together = false;  // a task makes all planes of a channel
  const void* weight = nullptr;
  const void* bias = nullptr;
};

struct BackwardJob : Job {
  Operand grad_output, input, grad_input;
  const void* weight = nullptr;
  int64_t W_out = 0;  // columns of all of grad_output, which grad_bias sums
  const void* all_grad_output = nullptr;
  bool want_weight = false, want_bias = false;
  double* partial = nullptr;  // [batch_chunks * row_chunks] of [C_out][K + 1], or of [K + 1][padded_channels]
  int64_t partial_size = 0;
};

struct Kernels {
  const char* name;
  int vector_bytes;
  // Run tasks begin to end; scratch is aligned to 64 bytes. Indexed by Dtype.
  void (*forward[4])(const ForwardJob&, int64_t begin, int64_t end, char* scratch);
  void (*backward[4])(const BackwardJob&, int64_t begin, int64_t end, char* scratch);
};

// The instantiations of one function template of a set, in the order of Dtype.
#define DEPTHCONV_KERNELS(set, function) \
  {set::function<float>, set::function<double>, set::function<Float16>, set::function<BFloat16>}

extern const Kernels baseline_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avx512_kernels;
#endif
const Kernels& kernels();  // the best that this machine has, or less by DEPTHCONV_CPU_CAPABILITY

}  // namespace depthconv::cpu
