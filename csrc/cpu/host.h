// What both entries do before and after the kernels run: absorb the width, bring operands into a layout that the
// kernels take, convert weights, split the work, run it on torch's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "kernels.h"

namespace depthconv::cpu {

inline int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }  // a >= 0
inline int64_t padded_channels(int64_t channels) { return quotient_up(channels, most_lanes) * most_lanes; }

// Output columns [begin, end) read an input column, begin + i the column first + i * step; the others read padding.
struct Columns {
  int64_t begin, end, first, step;
  int64_t count() const { return end - begin; }
};
Columns absorb_width(const Geometry& geometry);

// The address `elements` further.
inline void* advance(void* data, Dtype dtype, int64_t elements) {
  return data ? static_cast<char*>(data) + elements * element_size(dtype) : nullptr;
}

struct Extent {
  int64_t N, C, H, W;
};

// Whether a kernel family takes this operand as it is. Vectors run along the width for rows (along the height where
// the width is 1), along the channels for channels_last.
bool suits(const Operand& operand, const Extent& extent, bool channels_last);

// Large memory that is written whole asks for huge pages: 4 KB at a time, its first touch takes longer than the
// convolution. Below the size from which the C library maps memory afresh at every call, pages are there already.
void prefer_huge_pages(void* data, int64_t bytes);
std::unique_ptr<char[]> fresh_memory(int64_t bytes);

// A dense copy in the family's layout, in `memory`.
Operand dense_copy(const Operand& from, const Extent& extent, Dtype dtype, bool channels_last,
                   std::unique_ptr<char[]>* memory);
Operand dense(void* data, const Extent& extent, bool channels_last);
void copy(const Operand& to, const Operand& from, const Extent& extent, Dtype dtype);

// How many pixels of these channels make a run of whole vectors that is worth a loop.
inline int64_t pixels_to_merge(int64_t channels, int64_t width) {
  if (channels >= 64 || channels % most_lanes == 0) return 1;
  int64_t merged = 1;
  while (merged < 16 && (merged * channels < 32 || merged * channels % most_lanes != 0)) ++merged;
  return std::max<int64_t>(std::min(merged, width), 1);
}

// Weights as float or double, in the order that the family reads (kernels.h), channels_last ones `merged` times over
// in rows of padded_channels; without data, zeros.
void convert(const Geometry& geometry, Dtype dtype, const Job& job, const Filters& from, int64_t taps, void* to);
// out[co] or weight[co, k] from double.
void store_value(void* to, Dtype dtype, int64_t index, double value);

// Whether no converted weight is infinite or NaN: such a one must not meet a zero that stands for a missing row.
bool all_finite(Dtype dtype, const void* sums, int64_t count);

inline int sum_size(Dtype dtype) { return dtype == Dtype::float64 ? 8 : 4; }

// Calls body(begin, end) over [0, count) in pieces of at least `grain`. The body must not throw.
template <typename Body>
void parallel(int64_t count, int64_t grain, const Body& body) {
  if (count > 0) torch::stable::parallel_for(0, count, std::max<int64_t>(grain, 1), body);
}

// The same with scratch memory for each piece.
template <typename Body>
void parallel_with_scratch(int64_t count, int64_t grain, size_t scratch_bytes, const Body& body) {
  std::atomic<bool> out_of_memory{false};
  parallel(count, grain, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<char[]> memory(new (std::nothrow) char[scratch_bytes + 64]);
    if (!memory) {
      out_of_memory = true;
      return;
    }
    body(begin, end, reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t{63}));
  });
  if (out_of_memory) fail("depthconv: out of memory: ", scratch_bytes, " bytes of scratch for a thread on the CPU");
}

constexpr int64_t task_work = 1 << 15;  // multiply-adds worth a thread's start
constexpr int64_t wanted_tasks = 64;    // where the work allows: enough for many threads, few enough to add up

}  // namespace depthconv::cpu
