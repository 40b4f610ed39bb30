#include "host.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cmath>
#include <cstdlib>
#include <string>

namespace depthconv::cpu {

namespace {

#define VECTOR_BYTES 16
#include "vec.h"
#undef VECTOR_BYTES

const Kernels& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const char* variable = std::getenv("DEPTHCONV_CPU_CAPABILITY");
  const std::string most = variable ? variable : "avx512";
  const bool avx2 = most != "baseline" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2 && most != "avx2" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return avx512_kernels;
  if (avx2) return avx2_kernels;
#endif
  return baseline_kernels;
}

// Blocks of 16 x 64 elements: both sides keep their cache lines when one is the other's transpose.
template <typename Unit>
void copy_units(const Operand& to, const Operand& from, const Extent& extent) {
  struct Axis {
    int64_t size, to, from;
  };
  Axis axes[4] = {{extent.N, to.stride.n, from.stride.n}, {extent.C, to.stride.c, from.stride.c},
                  {extent.H, to.stride.h, from.stride.h}, {extent.W, to.stride.w, from.stride.w}};
  // Innermost: the axis that the destination runs along; next to it the one that the source runs along.
  auto shorter = [](int64_t Axis::*stride) {
    return [stride](const Axis& a, const Axis& b) {
      return (a.size > 1) != (b.size > 1) ? b.size > 1 : a.*stride > b.*stride;
    };
  };
  std::stable_sort(axes, axes + 4, shorter(&Axis::to));
  std::stable_sort(axes, axes + 3, shorter(&Axis::from));
  const Axis a = axes[0], b = axes[1], c = axes[2], d = axes[3];
  constexpr int64_t c_block = 16, d_block = 64;
  const int64_t c_blocks = quotient_up(c.size, c_block);
  parallel(a.size * b.size * c_blocks, task_work / (c_block * std::min(d.size, task_work)),
           [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t i = task / c_blocks / b.size, j = task / c_blocks % b.size;
      const int64_t k_begin = task % c_blocks * c_block, k_end = std::min(c.size, k_begin + c_block);
      Unit* out = static_cast<Unit*>(to.data) + i * a.to + j * b.to;
      const Unit* in = static_cast<const Unit*>(from.data) + i * a.from + j * b.from;
      for (int64_t l_begin = 0; l_begin < d.size; l_begin += d_block) {
        const int64_t l_end = std::min(d.size, l_begin + d_block);
        if (c.from == 1 && d.to == 1 && k_end - k_begin == c_block) {  // a transpose: constants for the compiler
          for (int64_t l = l_begin; l < l_end; ++l)
            for (int64_t k = 0; k < c_block; ++k) out[(k_begin + k) * c.to + l] = in[k_begin + k + l * d.from];
          continue;
        }
        for (int64_t k = k_begin; k < k_end; ++k)
          for (int64_t l = l_begin; l < l_end; ++l) out[k * c.to + l * d.to] = in[k * c.from + l * d.from];
      }
    }
  });
}

template <typename T>
void convert_all(const Geometry& g, const Job& job, const Filters& from, int64_t taps, Sum<T>* to) {
  const int64_t width = job.padded_channels, filters = g.C_out();
  if (job.channels_last || !from.data) std::fill_n(to, (job.channels_last ? width : filters) * taps, Sum<T>(0));
  if (!from.data) return;
  for (int64_t co = 0; co < filters; ++co)
    for (int64_t k = 0; k < taps; ++k) {
      const Sum<T> value = load<false>(static_cast<const T*>(from.data) + co * from.filter + k * from.tap, 1)[0];
      if (job.channels_last)
        for (int64_t pixel = 0; pixel < job.merged_pixels; ++pixel) to[k * width + pixel * filters + co] = value;
      else
        to[co * taps + k] = value;
    }
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

const char* instruction_set() { return kernels().name; }

Columns absorb_width(const Geometry& g) {
  const int64_t begin = std::min(g.W_out, quotient_up(g.padding.w, g.stride.w));
  const int64_t end = std::max(begin, std::min(g.W_out, (g.W - 1 + g.padding.w) / g.stride.w + 1));
  return {begin, end, begin < end ? begin * g.stride.w - g.padding.w : 0, begin + 1 < end ? g.stride.w : 1};
}

bool suits(const Operand& operand, const Extent& extent, bool channels_last) {
  const Strides& stride = operand.stride;
  if (channels_last) return stride.c == 1;
  return extent.W > 1 ? stride.w == 1 : stride.h == 1 || extent.H == 1;
}

void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t least_mapped = 32 << 20;  // glibc's largest M_MMAP_THRESHOLD
  constexpr uintptr_t page = 2 << 20;
  if (bytes < least_mapped) return;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: a refusal changes nothing
#endif
}

std::unique_ptr<char[]> fresh_memory(int64_t bytes) {
  std::unique_ptr<char[]> memory(new char[bytes]);
  prefer_huge_pages(memory.get(), bytes);
  return memory;
}

Operand dense(void* data, const Extent& e, bool channels_last) {
  if (channels_last) return {data, {e.C * e.H * e.W, 1, e.C * e.W, e.C}};
  return {data, {e.C * e.H * e.W, e.H * e.W, e.W, 1}};
}

Operand dense_copy(const Operand& from, const Extent& extent, Dtype dtype, bool channels_last,
                   std::unique_ptr<char[]>* memory) {
  *memory = fresh_memory(extent.N * extent.C * extent.H * extent.W * element_size(dtype));
  const Operand to = dense(memory->get(), extent, channels_last);
  copy(to, from, extent, dtype);
  return to;
}

void copy(const Operand& to, const Operand& from, const Extent& extent, Dtype dtype) {
  switch (element_size(dtype)) {
    case 2: return copy_units<uint16_t>(to, from, extent);
    case 4: return copy_units<uint32_t>(to, from, extent);
    default: return copy_units<uint64_t>(to, from, extent);
  }
}

void convert(const Geometry& g, Dtype dtype, const Job& job, const Filters& from, int64_t taps, void* to) {
  switch (dtype) {
    case Dtype::float32: return convert_all<float>(g, job, from, taps, static_cast<float*>(to));
    case Dtype::float64: return convert_all<double>(g, job, from, taps, static_cast<double*>(to));
    case Dtype::float16: return convert_all<Float16>(g, job, from, taps, static_cast<float*>(to));
    default: return convert_all<BFloat16>(g, job, from, taps, static_cast<float*>(to));
  }
}

bool all_finite(Dtype dtype, const void* sums, int64_t count) {
  const auto finite = [](auto value) { return std::isfinite(value); };
  if (dtype == Dtype::float64)
    return std::all_of(static_cast<const double*>(sums), static_cast<const double*>(sums) + count, finite);
  return std::all_of(static_cast<const float*>(sums), static_cast<const float*>(sums) + count, finite);
}

void store_value(void* to, Dtype dtype, int64_t index, double value) {
  const float rounded = static_cast<float>(value);
  switch (dtype) {
    case Dtype::float32: static_cast<float*>(to)[index] = rounded; return;
    case Dtype::float64: static_cast<double*>(to)[index] = value; return;
    case Dtype::float16: return store<false>(static_cast<Float16*>(to) + index, splat<Float16>(rounded), 1);
    default: return store<false>(static_cast<BFloat16*>(to) + index, splat<BFloat16>(rounded), 1);
  }
}

}  // namespace depthconv::cpu
