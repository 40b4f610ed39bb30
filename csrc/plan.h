// Which CUDA kernel runs a problem, with which vector width, tile and grid: pure functions of sizes, strides and
// addresses, so that tests can pin them without a GPU. Nothing here is CUDA; the launchers only follow.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "arguments.h"

namespace depthconv {

// Division of n < 2^31 by a run-time constant: (mulhi(n, magic) + n) >> shift.
struct FastDivisor {
  uint32_t divisor = 1, magic = 0, shift = 0;
  FastDivisor() = default;
  explicit FastDivisor(int64_t value) : divisor(static_cast<uint32_t>(value)) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    magic = static_cast<uint32_t>((((uint64_t{1} << shift) - divisor) << 32) / divisor + 1);
  }
};

// How a kernel's threads cover a set of planes. A *line* is one tile of rows of one plane; a block takes `block_cols`
// columns (a column is one vector wide) of `block_lines` lines. Lines are numbered tile first, then plane.
// Tiles interleave: a tile holds `rows` rows that lie `row_step` apart, so that dilated taps meet within one tile.
struct Tiling {
  int rows = 1;       // rows a thread
  int row_step = 1;   // distance between them
  int cols = 1;       // vectors in a row
  int tiles = 1;      // tiles a plane
  int64_t lines = 0;  // tiles * planes
  int block_cols = 1, block_lines = 1;
  int col_groups = 1;  // blocks along a row
  int64_t blocks = 0;  // col_groups * ceil(lines / block_lines)
};

constexpr int64_t index_limit = int64_t{1} << 30;  // 32-bit arithmetic, with room to add two of them

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline Tiling make_tiling(int64_t planes, int64_t height, int64_t cols, int rows, int row_step, int threads) {
  Tiling t;
  t.rows = rows;
  t.row_step = row_step;
  t.cols = static_cast<int>(cols);
  t.tiles = static_cast<int>(ceil_div(ceil_div(height, row_step), rows) * row_step);
  t.lines = planes * t.tiles;
  // Even groups of at most 32 columns: a warp reads whole runs, the lines stacked in the block share halos in L1.
  t.col_groups = static_cast<int>(ceil_div(cols, 32));
  t.block_cols = static_cast<int>(ceil_div(cols, t.col_groups));
  t.block_lines = threads / t.block_cols;
  t.blocks = t.col_groups * ceil_div(t.lines, t.block_lines);
  return t;
}

// Names of the kernels, as `explain` and the tests see them.
namespace kernel_name {
constexpr const char* rows = "rows";                    // a register tile; vectors along the width, or scalars
constexpr const char* march = "march";                  // down the rows through a queue; vectors along the width
constexpr const char* channels_last = "channels_last";  // a register tile; vectors along the channels, or scalars
constexpr const char* march_channels_last = "march_channels_last";
constexpr const char* flat = "flat";  // planes as runs of memory, through shared memory
constexpr const char* one_pass_flat = "one_pass_flat";
constexpr const char* band = "band";          // tensor cores: vectors along the width
constexpr const char* bank = "bank";          // several filters of a channel a thread, rows streamed past their sums
constexpr const char* plain = "plain";        // one element a thread, 64-bit indices
constexpr const char* one_pass = "one_pass";  // a register tile
constexpr const char* one_pass_march = "one_pass_march";
constexpr const char* one_pass_channels_last = "one_pass_channels_last";
constexpr const char* one_pass_march_channels_last = "one_pass_march_channels_last";
constexpr const char* weight_gradient = "weight_gradient";
constexpr const char* weight_gradient_channels_last = "weight_gradient_channels_last";
constexpr const char* weight_gradient_bank = "weight_gradient_bank";  // filters x taps as a matrix product
constexpr const char* one_pass_bank = "one_pass_bank";                // the same and grad_input
constexpr const char* strided_input_gradient = "strided_input_gradient";
constexpr const char* reduce = "reduce";
}  // namespace kernel_name

// A convolution that the forward kernels run: the forward itself, or grad_input of height stride 1, which is a
// convolution of grad_output with the taps reversed. Padding may be negative then, and there may be no tap at all.
struct Convolution {
  Dtype dtype = Dtype::float32;
  int64_t N = 0, C_out = 0;
  int64_t multiplier = 1;  // output channel co reads input channel co / multiplier
  int64_t fold = 1;        // or, for grad_input, sums over input channels co * fold + [0, fold)
  int64_t K = 0;
  int64_t H = 0, W = 0, H_out = 0, W_out = 0;
  Pair stride{1, 1}, padding{0, 0}, dilation{1, 1};
  int64_t spread_w =
      1;  // grad_input of a width stride: column j reads column (j - padding.w) / spread_w, if it divides
  Operand input, output;
  Filters weight;
  PerFilter bias;
};

constexpr int flat_rows = 7;        // a thread; odd, and a divisor of the planes that networks end in: 56, 28, 14, 7
constexpr int flat_tall_rows = 15;  // where planes have many rows: fewer are read twice

// Flat kernels: how blocks share the planes. See flat.cuh.
struct FlatPlan {
  bool use = false;
  bool joined = false;             // planes follow each other without a gap
  bool staged = false;             // forward: results leave through shared memory too
  int rows = flat_rows;            // a thread
  int vector_width = 1;            // elements of a thread's column
  int64_t images = 1, planes = 1;  // planes an image
  int planes_a_block = 1, rows_a_block = 1;
  int64_t plane_groups = 1, row_groups = 1;
  int tiles = 1;   // of a slab's plane
  int splits = 1;  // backward: blocks that share the images
  int stage_elements = 0;
  unsigned shared_bytes = 0;
  int64_t blocks = 1;
};

// The filter bank: how a block's threads share the outputs of one input channel. See bank.cuh.
struct BankPlan {
  bool use = false;
  bool spread = false;    // one input row, every output row a multiple of it: grad_input where H_out is 1
  int64_t channels = 1;   // of the input
  int64_t outputs = 1;    // of a channel at one place: filters, or rows of the spread
  int64_t taps = 1;       // terms of an output: taps, or filters of the spread
  int filters = 1;        // outputs a thread
  int chunks = 1;         // times that, side by side in a block
  int filter_groups = 1;  // blocks that share the outputs of a place
  int tap_splits = 1;     // threads that share an output's terms
  int items = 128;        // places a block
  unsigned shared_bytes = 0;
};

// The filter bank's gradients for H_out = 1. See bank_backward.cuh.
struct BankGradientPlan {
  bool use = false;
  bool with_input = false;          // grad_input in the same pass
  int64_t first_tap = 0, taps = 0;  // the taps whose row lies in the input
  int filters = 1;                  // a thread
  int filters_a_block = 1, filter_groups = 1;
  int tap_chunk = 1, tap_groups = 1;  // taps a block
  int filter_rows = 1, tap_rows = 1;  // threads along the filters and along the taps
  int lanes = 1;                      // their product, rounded up: to a power of two, or to whole warps
  int tile_cols = 0, col_tiles = 1;   // columns staged at a time
  int64_t tiles = 1;                  // of a channel
  int vector_width = 1, splits = 1;
  unsigned shared_bytes = 0;
};

struct ForwardPlan {
  const char* kernel = kernel_name::plain;
  const char* reason = "";
  bool channels_last = false;
  int vector_width = 1;  // elements a load
  int taps = 0;          // taps compiled in, 0: any number, in chunks
  int step = 1;          // input rows (in units of the dilation) between a thread's output rows
  int threads = 256;
  bool march = false;  // down the rows of a tile through a queue, rather than a tile of registers
  FlatPlan flat;
  int band_steps = 0;  // blocks of 16 input rows that 16 output rows read, where tensor cores do the sums
  int packed = 1;      // images whose columns share a warp there
  BankPlan bank;
  int64_t images = 1;  // of the batch, a launch
  Tiling tiling;
};

inline Convolution as_convolution(const ForwardArguments& a) {
  const Geometry& g = a.geometry;
  Convolution c;
  c.dtype = a.dtype;
  c.N = g.N;
  c.C_out = g.C_out();
  c.multiplier = g.multiplier;
  c.K = g.K;
  c.H = g.H;
  c.W = g.W;
  c.H_out = g.H_out;
  c.W_out = g.W_out;
  c.stride = g.stride;
  c.padding = g.padding;
  c.dilation = g.dilation;
  c.input = a.input;
  c.output = a.output;
  c.weight = a.weight;
  c.bias = a.bias;
  return c;
}

// grad_input[i] = sum_k w[k] * grad_output[i + p - k * d]: taps reversed, padding d * (K - 1) - p. Height stride 1
// only.
inline Convolution grad_input_as_convolution(const BackwardArguments& a) {
  const Geometry& g = a.geometry;
  Convolution c;
  c.dtype = a.dtype;
  c.N = g.N;
  c.C_out = g.C;
  c.fold = g.multiplier;
  c.K = g.K;
  c.H = g.H_out;
  c.W = g.W_out;
  c.H_out = g.H;
  c.W_out = g.W;
  c.padding = {g.dilation.h * (g.K - 1) - g.padding.h, -g.padding.w};
  c.dilation = g.dilation;
  c.spread_w = g.stride.w;
  c.input = a.grad_output;
  c.output = a.grad_input;
  c.weight.data = static_cast<char*>(a.weight.data) + a.weight.tap * (g.K - 1) * element_size(a.dtype);
  c.weight.filter = a.weight.filter;
  c.weight.tap = -a.weight.tap;
  return c;
}

// A height stride s splits the input rows into s phases that share no tap: row s * i + r meets the taps k for which
// r + p - k * d is a multiple of s. Those are every tap_step-th from first_tap on, and the phase is a problem of stride
// 1 over the rows r, r + s, ...: grad_output row o meets its row i through its tap k where i = o + k * dilation -
// padding.
struct Phase {
  int64_t row = 0;  // r
  int64_t first_tap = 0, tap_step = 1;
  int64_t taps = 0;                   // none: no output reads these rows
  int64_t height = 0;                 // none: these taps read padding only
  int64_t padding = 0, dilation = 1;  // the padding may be negative
};

inline Phase make_phase(const Geometry& g, int64_t row) {
  const int64_t s = g.stride.h, d = g.dilation.h;
  Phase phase;
  phase.row = row;
  phase.tap_step = s / std::gcd(s, d);
  phase.height = g.H > row ? (g.H - row + s - 1) / s : 0;
  while (phase.first_tap < phase.tap_step && (row + g.padding.h - phase.first_tap * d) % s != 0) ++phase.first_tap;
  if (phase.first_tap == phase.tap_step || phase.first_tap >= g.K) return phase;
  phase.taps = (g.K - 1 - phase.first_tap) / phase.tap_step + 1;
  phase.padding = (row + g.padding.h - phase.first_tap * d) / s;
  if (phase.taps > 1) phase.dilation = d * phase.tap_step / s;
  return phase;
}

// The phase's problem, of height stride 1: its rows of input and grad_input, its taps of weight and grad_weight.
inline BackwardArguments phase_arguments(const BackwardArguments& a, const Phase& phase) {
  const int64_t s = a.geometry.stride.h, size = element_size(a.dtype);
  BackwardArguments b = a;
  auto moved = [size](void* data, int64_t elements) {
    return data ? static_cast<void*>(static_cast<char*>(data) + elements * size) : nullptr;
  };
  for (Operand* operand : {&b.input, &b.grad_input}) {
    operand->data = moved(operand->data, phase.row * operand->stride.h);
    operand->stride.h *= s;
  }
  for (Filters* filters : {&b.weight, &b.grad_weight}) {
    filters->data = moved(filters->data, phase.first_tap * filters->tap);
    filters->tap *= phase.tap_step;
  }
  b.geometry.K = phase.taps;
  b.geometry.H = phase.height;
  b.geometry.stride.h = 1;
  b.geometry.padding.h = phase.padding;
  b.geometry.dilation.h = phase.dilation;
  return b;
}

// For the sums over a channel: of a width stride only the columns that outputs read, which is a problem of width stride
// 1. grad_input, which has the other columns too, is not part of it.
inline BackwardArguments columns_read(const BackwardArguments& a) {
  const int64_t s = a.geometry.stride.w;
  if (s == 1) return a;
  BackwardArguments b = a;
  Geometry& g = b.geometry;
  const int64_t first = (s - g.padding.w % s) % s;
  b.input.data = static_cast<char*>(a.input.data) + first * a.input.stride.w * element_size(a.dtype);
  b.input.stride.w *= s;
  b.grad_input = {};
  g.W = g.W > first ? (g.W - first + s - 1) / s : 0;
  g.padding.w = (first + g.padding.w) / s;
  g.stride.w = 1;
  return b;
}

inline bool fits_32_bits(const Convolution& c) {
  const int64_t values[] = {c.N,     c.C_out,    c.fold,     c.H, c.W,          c.H_out,
                            c.W_out, c.stride.h, c.stride.w, c.K, c.dilation.h, c.spread_w};
  for (int64_t value : values)
    if (value >= index_limit) return false;
  // Row indices run a tile and a chunk of taps past the last row.
  return std::abs(c.padding.h) < index_limit && std::abs(c.padding.w) < index_limit &&
         c.dilation.h * (c.K + 64) < index_limit && (c.H_out + 64) * c.stride.h < index_limit &&
         c.W_out * c.stride.w < index_limit;
}

// Whether vectors of `width` elements along the width can be read from and written to this operand.
inline bool rows_aligned(const Operand& operand, int width, int size) {
  const Strides& s = operand.stride;
  return s.w == 1 && s.h % width == 0 && s.c % width == 0 && s.n % width == 0 &&
         reinterpret_cast<uintptr_t>(operand.data) % (static_cast<uintptr_t>(width) * size) == 0;
}

inline bool channels_aligned(const Operand& operand, int width, int size) {
  const Strides& s = operand.stride;
  return s.c == 1 && s.h % width == 0 && s.w % width == 0 && s.n % width == 0 &&
         reinterpret_cast<uintptr_t>(operand.data) % (static_cast<uintptr_t>(width) * size) == 0;
}

// Taps that have a register-tile kernel of their own; the rest run in chunks of 8, 4, 2 and 1. Vectors of half types
// and channels_last march instead, and float64 is not worth the code.
#define DEPTHCONV_TILE_TAPS(X) X(3) X(5) X(7) X(11)
#define DEPTHCONV_LONG_TILE_TAPS(X) X(9) X(13) X(17) X(19) X(21) X(23) X(31)  // float32 in vectors alone
constexpr bool has_tile_taps(int size, int vector_width, bool channels_last) {
  return vector_width == 1 ? size < 8 : size == 4 && !channels_last;
}
constexpr bool has_long_tile_taps(int size, int vector_width, bool channels_last) {
  return size == 4 && vector_width == 4 && !channels_last;
}
constexpr int tile_taps(int size, int vector_width, bool channels_last, int64_t K) {
#define DEPTHCONV_CASE(taps) case taps:
  if (has_tile_taps(size, vector_width, channels_last)) switch (K) {
      DEPTHCONV_TILE_TAPS(DEPTHCONV_CASE)
      return static_cast<int>(K);
    }
  if (has_long_tile_taps(size, vector_width, channels_last)) switch (K) {
      DEPTHCONV_LONG_TILE_TAPS(DEPTHCONV_CASE)
      return static_cast<int>(K);
    }
#undef DEPTHCONV_CASE
  return 0;
}

// Rows a thread of a forward kernel owns: as many as its registers hold as sums, and half of that.
constexpr int tall_rows(int size, int vector_width, int taps, bool channels_last) {
  if (taps == 0 && vector_width > 1 && size < 8 && !channels_last) return vector_width == 8 ? 4 : 12;
  if (vector_width == 4 && (taps == 13 || taps == 23)) return 12;  // what 128 registers hold
  return vector_width == 8 || channels_last || size == 8 ? 8 : 16;
}
constexpr int low_rows(int size, int vector_width) { return size == 2 && vector_width == 8 ? 4 : 8; }

// Small blocks where many sums and taps want more than 128 registers a thread; tall ones where many taps make a large
// halo, of which the tiles stacked in a block share most in L1.
constexpr int forward_threads(int vector_width, int taps, int rows, bool channels_last) {
  if (vector_width > 1 && !channels_last && taps > 0 && rows > 1)
    return taps >= 13 && rows > 8 ? 512 : taps >= 9 && rows > 8 ? 128 : 256;
  const bool heavy = vector_width > 1 && rows > 1 && (taps == 0 || vector_width == 8);
  return heavy && (rows * vector_width >= 64 || channels_last || taps == 0) ? 128 : 256;
}

// Kernels that march down a column: taps compiled in, rows of a tile chosen at run time.
#define DEPTHCONV_MARCH_TAPS(X) X(3) X(5) X(7) X(9) X(11) X(13) X(15) X(17) X(19) X(21) X(23) X(31)
constexpr int march_threads = 128;
constexpr int march_depth = 8;  // rows in flight a thread, one of them in use

// Vector width of a march: the ring of sums must fit the registers.
constexpr int march_width(int size, int64_t taps, bool channels_last) {
  const int most = channels_last ? (taps <= 11 ? 4 : 2) : taps <= 11 ? 8 : 4;
  return most < 16 / size ? most : 16 / size;
}

// Blocks of 128 threads a multiprocessor: bounds the registers to 80, 96, 128, 168 or 255.
constexpr int march_blocks(int size, int vector_width, int taps, bool channels_last) {
  const int held = taps * vector_width + taps * (channels_last ? vector_width : 1) + vector_width + 36;
  return held <= 64 ? 8 : held <= 80 ? 6 : held <= 96 ? 5 : held <= 128 ? 4 : held <= 168 ? 3 : 2;
}

inline bool march_taps(int64_t K) {
  switch (K) {
#define DEPTHCONV_CASE(taps) case taps:
    DEPTHCONV_MARCH_TAPS(DEPTHCONV_CASE)
#undef DEPTHCONV_CASE
    return true;
  }
  return false;
}

// The unrolled ring of more taps than this, times a vector, leaves the instruction cache. The phases of a height stride
// have few taps, even numbers too.
constexpr int march_backward_most = 21;
#define DEPTHCONV_MARCH_BACKWARD_TAPS(X) \
  X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(9) X(11) X(13) X(15) X(17) X(19) X(21) X(23) X(31)
inline bool march_backward_taps(int64_t K) {
  switch (K) {
#define DEPTHCONV_CASE(taps) case taps:
    DEPTHCONV_MARCH_BACKWARD_TAPS(DEPTHCONV_CASE)
#undef DEPTHCONV_CASE
    return true;
  }
  return false;
}

constexpr int march_backward_width(int size, int64_t taps, bool channels_last) {
  // channels_last keeps weights and sums of every channel of a pack: 4 or 8 bytes of them, as few as a copy moves.
  if (channels_last) return taps <= 11 && size == 4 ? 2 : size == 4 ? 1 : taps <= 5 ? 4 : 2;
  const int most = taps <= 9 ? 8 : 4;
  return most < 16 / size ? most : 16 / size;
}

// Whether a march of that width is compiled.
constexpr bool has_march_backward(int size, int vector_width, int64_t taps, bool channels_last) {
  if (channels_last) return vector_width == march_backward_width(size, taps, true);
  if (vector_width == 1) return size == 4;
  if (taps > march_backward_most) return false;
  return vector_width == march_backward_width(size, taps, false) || (size == 2 && vector_width <= 4);
}

constexpr int march_backward_blocks(int size, int vector_width, int taps, bool channels_last) {
  const int held = channels_last ? 3 * taps * vector_width + 4 * vector_width + 66
                                 : taps * (vector_width + 2) + 3 * vector_width + (vector_width == 1 ? 62 : 48);
  return held <= 64 ? 8 : held <= 80 ? 6 : held <= 96 ? 5 : held <= 128 ? 4 : held <= 168 ? 3 : 2;
}

// Rows of a marching tile: up to 64, halved while the threads would not fill the machine; then evened out.
inline int march_rows(int64_t height, int64_t columns, int64_t resident) {
  int64_t rows = 64;
  while (rows > 8 && columns * ceil_div(height, rows) < resident) rows /= 2;
  return static_cast<int>(ceil_div(height, ceil_div(height, rows)));
}

#define DEPTHCONV_FLAT_TAPS(X) X(3) X(4) X(5) X(6) X(7) X(9) X(11) X(13) X(15) X(17) X(19) X(21) X(23) X(31)
inline bool flat_taps(int64_t K) {
  switch (K) {
#define DEPTHCONV_CASE(taps) case taps:
    DEPTHCONV_FLAT_TAPS(DEPTHCONV_CASE)
#undef DEPTHCONV_CASE
    return true;
  }
  return false;
}
constexpr int flat_threads = 256;
// Taps of the flat backward: with more, a thread's sums leave it too few registers for four blocks a multiprocessor.
constexpr int flat_backward_most(int size) { return size == 4 ? 6 : 5; }
constexpr int flat_plane = 2048;  // elements of a plane that is worth staging

// Rows without a gap: the plane is one run of memory.
inline bool is_flat(const Operand& operand, int64_t height, int64_t width) {
  return (width == 1 || operand.stride.w == 1) && (height == 1 || operand.stride.h == width);
}

// Slabs of `height` rows of `planes` planes in each of `images`; a block holds `runs` runs: rows with the halo of one
// tensor, whose planes have `other` rows, and for the backward (two runs) as many rows of its slab.
inline FlatPlan flat_slabs(int64_t images, int64_t planes, bool joined, int64_t height, int64_t other, int64_t width,
                           int64_t taps, int64_t dilation, int size, int runs, int rows_a_thread, int64_t most_units,
                           int64_t blocks_wanted) {
  FlatPlan f;
  const int64_t budget = 40 * 1024, most = 96 * 1024;  // shared memory of a block: several blocks, or at least two
  const int64_t unit_rows = rows_a_thread * dilation, halo = (taps - 1) * dilation;
  const int64_t a_plane = (runs == 1 ? other : height + other) * width * size;
  int64_t rows = height, planes_a_block = 1;
  if (a_plane <= budget) {
    const int64_t units = ceil_div(ceil_div(height, dilation), rows_a_thread) * dilation * width;
    if (units > most_units && most_units > 0) {
      rows = std::max<int64_t>(1, most_units / (dilation * width)) * unit_rows;
    } else if (joined) {
      planes_a_block = std::max<int64_t>(1, std::min(planes, budget / a_plane));
      if (most_units > 0) planes_a_block = std::max<int64_t>(1, std::min(planes_a_block, most_units / units));
      planes_a_block = std::max<int64_t>(1, std::min(planes_a_block, ceil_div(images * planes, blocks_wanted)));
    }
  } else {
    rows = (budget / (width * size) - halo) / runs / unit_rows * unit_rows;
    if (rows < unit_rows) rows = unit_rows;
  }
  if (rows < height) {
    rows = ceil_div(ceil_div(height, ceil_div(height, rows)), unit_rows) * unit_rows;
    if (rows > height) rows = height;
  }
  const int64_t staged = planes_a_block > 1 || rows == height ? std::max(other, runs == 1 ? 0 : height) : rows + halo;
  const int word = 16 / size;
  const int64_t run = ceil_div(planes_a_block * std::max(staged, runs == 1 ? 0 : rows) * width + 2 * word, word) * word;
  if (runs * run * size > most || images >= index_limit || planes >= index_limit) return f;
  f.use = true;
  f.joined = joined;
  f.rows = rows_a_thread;
  f.images = images;
  f.planes = planes;
  f.planes_a_block = static_cast<int>(planes_a_block);
  f.rows_a_block = static_cast<int>(rows);
  f.plane_groups = ceil_div(planes, planes_a_block);
  f.row_groups = ceil_div(height, rows);
  f.tiles = static_cast<int>(ceil_div(ceil_div(rows, dilation), rows_a_thread) * dilation);
  f.stage_elements = static_cast<int>(run);
  f.shared_bytes = static_cast<unsigned>(std::max<int64_t>(runs * run * size, runs == 1 ? 0 : flat_threads * 8));
  f.blocks = images * f.plane_groups * f.row_groups;
  if (f.blocks >= index_limit) f.use = false;
  return f;
}

// Taps that have kernels for columns of several elements, of half types: planes whose rows are aligned to them.
constexpr bool flat_vector_taps(int64_t taps) { return taps % 2 == 1 && taps <= 11; }

inline FlatPlan plan_flat_forward(const Convolution& c, int multiprocessors) {
  const int size = element_size(c.dtype);
  if (c.stride.h != 1 || c.spread_w != 1 || c.fold != 1 || size == 8 || !flat_taps(c.K) ||
      !is_flat(c.input, c.H, c.W) || !is_flat(c.output, c.H_out, c.W_out))
    return {};
  int vector = 1;
  if (size == 2 && c.stride.w == 1 && c.padding.w == 0 && flat_vector_taps(c.K))
    while (vector < 4 && c.W % (2 * vector) == 0 && rows_aligned(c.input, 2 * vector, size) &&
           rows_aligned(c.output, 2 * vector, size))
      vector *= 2;
  // Small planes with few taps are over before a block has staged anything, but for packs of half types (NOTES.md).
  if (vector == 1 && c.W_out > 1 && c.K <= 11 && c.H_out * c.W_out < flat_plane) return {};
  const bool staged = c.W_out < 16;
  const bool joined =
      c.multiplier == 1 && (c.C_out == 1 || (c.input.stride.c == c.H * c.W && c.output.stride.c == c.H_out * c.W_out));
  const bool one_run =
      joined &&
      (c.N == 1 || (c.input.stride.n == c.C_out * c.H * c.W && c.output.stride.n == c.C_out * c.H_out * c.W_out));
  const int rows = vector == 1 && !staged && c.H_out >= 64 * c.dilation.h ? flat_tall_rows : flat_rows;
  FlatPlan f = flat_slabs(one_run ? 1 : c.N, one_run ? c.N * c.C_out : c.C_out, joined, c.H_out, c.H,
                          std::max(c.W, staged ? c.W_out : 0), c.K, c.dilation.h, size, staged && vector == 1 ? 2 : 1,
                          rows, 0, int64_t{multiprocessors} * 4);
  f.staged = staged && vector == 1;
  f.vector_width = vector;
  return f;
}

inline FlatPlan plan_flat_backward(const BackwardArguments& a, int multiprocessors) {
  const Geometry& g = a.geometry;
  if (g.padding.w != 0 || element_size(a.dtype) == 8 || g.K > flat_backward_most(element_size(a.dtype)) ||
      !flat_taps(g.K) || !is_flat(a.input, g.H, g.W) || !is_flat(a.grad_output, g.H_out, g.W) ||
      (g.W > 1 && g.H * g.W < flat_plane))
    return {};
  // grad_input has no gap within an image, unless it is a phase of a height stride.
  if (a.grad_input.data && (!is_flat(a.grad_input, g.H, g.W) || (g.C > 1 && a.grad_input.stride.c != g.H * g.W)))
    return {};
  const bool joined = g.C == 1 || (a.input.stride.c == g.H * g.W && a.grad_output.stride.c == g.H_out * g.W);
  FlatPlan f = flat_slabs(g.N, g.C, joined, g.H, g.H_out, g.W, g.K, g.dilation.h, element_size(a.dtype), 2, flat_rows,
                          flat_threads, 1);
  if (!f.use) return f;
  const int64_t places = f.plane_groups * f.row_groups;
  const int64_t wanted = ceil_div(int64_t{multiprocessors} * 8, places);
  f.splits = static_cast<int>(ceil_div(g.N, ceil_div(g.N, std::min(wanted, g.N))));
  f.blocks = places * f.splits;
  if (f.blocks >= index_limit) f.use = false;
  return f;
}

// The band kernels: half types on tensor cores, see band.cuh.
constexpr int band_threads = 128;
constexpr int band_depth = 4;        // blocks of 16 rows in flight a warp, one of them in use
constexpr int band_capability = 80;  // sm_80 has the product of 16 x 8 x 16

// Blocks a multiprocessor: bounds the registers of a thread to 80, 96, 128, 168 or 255.
constexpr int band_blocks(int vector_width, int steps, int stride) {
  const int held = 2 * vector_width * (steps + 1) + 2 * steps + stride + 2 * vector_width + 51;
  return held <= 72 ? 6 : held <= 96 ? 5 : held <= 132 ? 4 : held <= 170 ? 3 : 2;
}

// Blocks of 16 input rows that 16 output rows read, of those that are compiled in; 0: none does.
inline int band_steps(int64_t taps, int64_t stride) {
  const int64_t steps = ceil_div(15 * stride + taps, 16);
  if (stride == 2) return steps <= 3 ? 3 : 0;
  if (stride != 1) return 0;
  return steps <= 3 ? std::max<int>(2, static_cast<int>(steps)) : steps <= 5 ? 5 : 0;
}

// Fills the plan and says true where the band kernels take the problem.
inline bool plan_band(const Convolution& c, int multiprocessors, int64_t step, int64_t row_step, ForwardPlan& plan) {
  const int steps = band_steps(c.K, step);
  if (element_size(c.dtype) != 2 || !steps || c.fold != 1 || plan.channels_last || c.stride.w != 1 || c.spread_w != 1 ||
      c.padding.w != 0)
    return false;
  int width = 1;
  while (width < 8 && c.W % (2 * width) == 0 && rows_aligned(c.input, 2 * width, 2) &&
         rows_aligned(c.output, 2 * width, 2))
    width *= 2;
  // Sixteen rows at a time pay where the plane has them; few taps march as fast in all but tall planes (NOTES.md).
  const int64_t height = ceil_div(c.H_out, row_step);
  if (width < 4 || height < (step == 1 && c.K <= 7 ? 192 : march_taps(c.K) || step == 2 ? 16 : 8)) return false;
  const int64_t cols = c.W_out / width, channels = c.C_out;
  if (cols >= index_limit || c.N >= index_limit) return false;
  Tiling t;
  t.row_step = static_cast<int>(row_step);
  t.cols = static_cast<int>(cols);
  t.col_groups = static_cast<int>(ceil_div(cols, 8));
  plan.packed = cols <= 4 ? static_cast<int>(8 / cols) : 1;  // narrow planes: several images a warp
  t.block_cols = static_cast<int>(plan.packed > 1 ? cols * plan.packed : ceil_div(cols, t.col_groups));
  const int64_t resident = int64_t{multiprocessors} * 16;
  const int64_t columns = channels * t.col_groups * ceil_div(c.N, plan.packed) * row_step;
  int64_t rows = 128;
  while (rows > 16 && columns * ceil_div(height, rows) < resident) rows /= 2;
  t.rows = static_cast<int>(ceil_div(ceil_div(height, ceil_div(height, rows)), 16) * 16);
  t.tiles = static_cast<int>(ceil_div(height, t.rows) * row_step);
  const int64_t group = channels * t.col_groups * t.tiles;  // warps of `packed` images
  if (group >= index_limit) return false;
  t.lines = group * ceil_div(c.N, plan.packed);
  t.block_lines = band_threads / 32;
  t.blocks = ceil_div(t.lines, t.block_lines);
  plan.tiling = t;
  plan.kernel = kernel_name::band;
  plan.reason = width == 8 ? "half type, rows start on 16 bytes: tensor cores, 16-byte vectors along the width"
                           : "half type: tensor cores, vectors as wide as the rows are aligned";
  plan.vector_width = width;
  plan.taps = 0;
  plan.band_steps = steps;
  plan.step = static_cast<int>(step);
  plan.threads = band_threads;
  plan.images = std::min(c.N, std::max<int64_t>(1, index_limit / group) * plan.packed);
  return true;
}

constexpr int bank_columns = 16;           // of the output at least: threads of a warp lie along the width
constexpr int bank_shared = 48 * 1024;     // weights and what splits of an output exchange
constexpr int bank_gradient_columns = 64;  // of a row at least: a tile of fewer is mostly barriers
constexpr int bank_gradient_threads = 128;
constexpr int bank_taps = 6;    // a thread of the gradients
constexpr int bank_tile = 112;  // columns staged at a time, at most
// Distance of staged rows: an odd number of 16-byte words, so that rows 6 apart fall on different banks.
constexpr int bank_tile_pitch(int size) { return bank_tile + 16 / size; }
// Rows of taps that fit beside that many rows of filters, and the distance of their weights: whole vectors.
constexpr int bank_tap_rows(int filters) { return filters > 16 ? 4 * bank_taps : 6 * bank_taps; }
constexpr int bank_weights = 8;

// Distance between the weights of two taps in shared memory: four more than the filters keep a warp that stages one
// filter's taps on different banks.
constexpr int bank_pitch(int filters, int chunks) { return filters * chunks + (filters == 8 ? 4 : 0); }

// Widest pack of `most` elements or fewer that all operands allow.
inline int width_of(std::initializer_list<const Operand*> operands, int64_t columns, int most, int size) {
  for (int width = most; width > 1; width /= 2) {
    bool aligned = columns % width == 0;
    for (const Operand* operand : operands) aligned = aligned && rows_aligned(*operand, width, size);
    if (aligned) return width;
  }
  return 1;
}

// Blocks that the registers leave a multiprocessor: 128 of them a thread, or 80.
constexpr int bank_gradient_blocks(int filters) { return filters == 4 ? 4 : 6; }

// Fills the plan if the filter bank suits the problem: few output rows, or more filters than taps. A tile of rows
// would keep sums that no row needs, and would read the input once a filter.
inline bool plan_bank(ForwardPlan& plan, const Convolution& c, int multiprocessors) {
  const int size = element_size(c.dtype);
  if (size == 8 || c.K == 0 || c.W_out < bank_columns || c.spread_w != 1) return false;
  BankPlan b;
  const bool gather = c.fold == 1 && (c.H_out <= 4 || (c.multiplier > 1 && c.K <= std::min<int64_t>(c.multiplier, 8)));
  b.spread = !gather && c.H == 1 && c.multiplier == 1 && c.stride.h == 1 && c.dilation.h == 1 &&
             c.padding.h <= c.K - 1 && c.padding.h >= c.H_out - 1;
  if (!gather && !b.spread) return false;
  b.channels = c.C_out / c.multiplier;
  b.outputs = b.spread ? c.H_out : c.multiplier;
  b.taps = b.spread ? c.fold : c.K;
  const int64_t rows = b.spread ? 1 : c.H_out;
  // As many outputs a thread as leave few of them empty.
  const int64_t left = b.outputs % 8;
  b.filters = b.outputs <= 2                            ? static_cast<int>(b.outputs)
              : b.outputs <= 4                          ? 4
              : left == 0 || left > 4 || b.outputs > 16 ? 8
                                                        : 4;
  const int64_t chunks = ceil_div(b.outputs, b.filters), filter_groups = ceil_div(chunks, 4);
  b.chunks = static_cast<int>(ceil_div(chunks, filter_groups));
  b.filter_groups = static_cast<int>(ceil_div(chunks, b.chunks));
  const int width = c.stride.w == 1 && c.padding.w == 0
                        ? width_of({&c.input, &c.output}, c.W_out, b.filters >= 4 ? 4 : 16 / size, size)
                        : 1;
  const int64_t cols = c.W_out / width, an_image = rows * cols;
  const int64_t weights = b.taps * bank_pitch(b.filters, b.chunks) * 4;
  if (weights > bank_shared / 2 || an_image >= index_limit) return false;
  // Too few threads to keep the memory busy: several share an output's terms.
  const int64_t threads = c.N * b.channels * an_image * chunks;
  while (2 * b.chunks * b.tap_splits <= 8 && b.taps >= 8 * b.tap_splits &&
         threads * b.tap_splits < int64_t{multiprocessors} * 512)
    b.tap_splits *= 2;
  const int parts = b.chunks * b.tap_splits;
  b.items = 32 * std::max(1, (parts <= 2 ? 4 : 8) / parts);
  while (b.items > 32 && c.N * an_image <= b.items / 2) b.items /= 2;
  b.items = b.items / 32 * 32;
  plan.threads = b.items * parts;
  // Splits hand over their sums: filters * width floats a thread, at most 24 KB in all.
  b.shared_bytes = static_cast<unsigned>(weights + (plan.threads - b.items * b.chunks) * b.filters * width * 4);
  const int64_t blocks = b.channels * b.filter_groups;
  const int64_t counted = std::max(an_image, (ceil_div(an_image, b.items) + 1) * blocks);
  if (counted >= index_limit || b.shared_bytes > bank_shared) return false;
  b.use = true;
  plan.kernel = kernel_name::bank;
  plan.reason = b.spread ? "one row in, many out: several rows a thread, each a product for every filter"
                         : "few output rows or many filters: several filters a thread, input rows streamed past them";
  plan.vector_width = width;
  plan.taps = 0;
  plan.images = std::min(c.N, std::max<int64_t>(1, index_limit / counted));
  plan.bank = b;
  plan.tiling.cols = static_cast<int>(cols);
  plan.tiling.lines = c.N * rows;
  plan.tiling.blocks = ceil_div(std::min(plan.images, c.N) * an_image, b.items) * blocks;
  return true;
}

// The gradients where H_out = 1: grad_weight is a product of matrices, filters x columns times columns x taps.
inline BankGradientPlan plan_bank_gradient(const BackwardArguments& a, int multiprocessors) {
  BankGradientPlan b;
  const Geometry& g = a.geometry;
  const int size = element_size(a.dtype);
  if (size == 8 || !a.grad_weight.data || g.H_out != 1 || g.stride.w != 1 || g.padding.w != 0 ||
      g.W < bank_gradient_columns || a.input.stride.w != 1 || a.grad_output.stride.w > 1)
    return b;
  b.first_tap = ceil_div(g.padding.h, g.dilation.h);
  b.taps = std::min(g.K - 1, (g.H - 1 + g.padding.h) / g.dilation.h) - b.first_tap + 1;
  if (b.taps < 1) return b;
  const bool whole = g.dilation.h == 1 && b.taps == g.H;  // every input row has its tap
  b.with_input = a.grad_input.data && whole && g.multiplier <= 32 && a.grad_input.stride.w == 1;
  b.filters = g.multiplier <= 2 ? static_cast<int>(g.multiplier) : 4;
  const int64_t filter_groups = ceil_div(g.multiplier, 32);
  b.filters_a_block = static_cast<int>(ceil_div(g.multiplier, filter_groups));
  const int ones = a.grad_bias.data ? 1 : 0;  // a row of ones makes grad_bias one more tap
  b.filter_rows = static_cast<int>(ceil_div(b.filters_a_block, b.filters));
  const int64_t tap_groups = ceil_div(b.taps, bank_tap_rows(b.filter_rows * b.filters) - ones);
  b.tap_chunk = static_cast<int>(ceil_div(b.taps, tap_groups));
  b.tap_rows = static_cast<int>(ceil_div(b.tap_chunk + ones, bank_taps));
  const int pairs = b.filter_rows * b.tap_rows;
  while (b.lanes < pairs) b.lanes *= 2;
  b.vector_width = a.grad_output.stride.w != 1 ? 1
                   : b.with_input              ? width_of({&a.input, &a.grad_output, &a.grad_input}, g.W, 4, size)
                                               : width_of({&a.input, &a.grad_output}, g.W, 4, size);
  // Sums in float64, weights in float32, and two tiles in turn.
  const int filters = b.filter_rows * b.filters, rows = b.tap_rows * bank_taps + filters, sector = 32 / size;
  const int sums = filters * b.tap_rows * (bank_taps * 8 + bank_weights * 4);
  b.shared_bytes = static_cast<unsigned>(sums + 2 * rows * bank_tile_pitch(size) * size);
  b.tile_cols = static_cast<int>(ceil_div(ceil_div(g.W, ceil_div(g.W, bank_tile)), sector) * sector);
  const int64_t col_tiles = ceil_div(g.W, b.tile_cols);
  b.tiles = g.N * col_tiles;
  const int64_t groups = g.C * filter_groups * tap_groups;
  if (groups >= index_limit || b.tiles >= index_limit) return b;
  b.filter_groups = static_cast<int>(filter_groups);
  b.tap_groups = static_cast<int>(tap_groups);
  b.col_tiles = static_cast<int>(col_tiles);
  // Whole waves of blocks: the fewest turns of the longest-running multiprocessor, and one for starting a block.
  const int64_t resident = int64_t{multiprocessors} *
                           std::min<int64_t>(bank_gradient_blocks(b.filters), 227 * 1024 / (b.shared_bytes + 1024));
  int64_t least = 0;
  for (int waves = 1; waves <= 8; ++waves) {
    const int64_t wanted = std::min(b.tiles, std::max<int64_t>(1, resident * waves / groups));
    const int64_t turns = ceil_div(b.tiles, wanted), splits = ceil_div(b.tiles, turns);
    const int64_t cost = ceil_div(groups * splits, resident) * (turns + 1);
    if (waves > 1 && cost >= least) continue;
    least = cost;
    b.splits = static_cast<int>(splits);
  }
  b.use = groups * b.splits < index_limit;
  return b;
}

inline ForwardPlan plan_forward(const Convolution& c, int multiprocessors, int capability) {
  auto plain = [](const char* reason) {
    ForwardPlan plan;
    plan.reason = reason;
    return plan;
  };
  if (!fits_32_bits(c)) return plain("an extent needs 64-bit indices");
  ForwardPlan plan;
  const int size = element_size(c.dtype);
  const bool channels_inner = c.output.stride.c == 1 && c.C_out > 1 && !(c.output.stride.w == 1 && c.W_out > 1);
  const int64_t divisor = std::gcd(c.stride.h, c.dilation.h);
  const int64_t step = c.stride.h / divisor;        // see Tiling: rows of a tile lie dilation / gcd apart, so that
  const int64_t row_step = c.dilation.h / divisor;  // output row i of a tile reads input rows (i * step + k) * dilation
  int64_t cols = c.W_out, planes = c.N * c.C_out;
  if (channels_inner) {
    plan.kernel = kernel_name::channels_last;
    plan.channels_last = true;
    const int width = size == 8 ? 2 : 4;
    const bool one_to_one = c.multiplier == 1 && c.fold == 1;
    if (one_to_one && c.C_out % width == 0 && channels_aligned(c.input, width, size) &&
        channels_aligned(c.output, width, size)) {
      plan.vector_width = width;
      plan.reason = "channels_last: vectors along the channels";
    } else {
      plan.reason = one_to_one ? "channels_last, but not aligned or not a multiple of the vector: one channel a thread"
                               : "channels_last with a channel multiplier: one channel a thread";
    }
    cols = c.W_out * (c.C_out / plan.vector_width);
    planes = c.N;
  } else {
    if (plan_bank(plan, c, multiprocessors)) return plan;
    plan.kernel = kernel_name::rows;
    const int width = 16 / size;
    if (c.stride.w != 1 || c.spread_w != 1 || c.padding.w != 0) {
      plan.reason = "width stride or padding: one element a load";
    } else if (c.input.stride.w != 1 || c.output.stride.w != 1) {
      plan.reason = "the last axis is strided: one element a load";
    } else if (c.W % width == 0 && rows_aligned(c.input, width, size) && rows_aligned(c.output, width, size)) {
      plan.vector_width = width;
      plan.reason = "rows start on 16 bytes: 16-byte vectors along the width";
    } else {
      plan.reason = "rows start off 16-byte boundaries: one element a load";
    }
    cols = c.W_out / plan.vector_width;
    if (plan.vector_width == 1) plan.flat = plan_flat_forward(c, multiprocessors);
    if (plan.flat.use) {
      plan.kernel = kernel_name::flat;
      plan.vector_width = width;
      plan.taps = static_cast<int>(c.K);
      plan.threads = flat_threads;
      plan.images = c.N;
      plan.reason =
          "planes without gaps, rows off 16-byte boundaries: whole runs in 16-byte words through shared memory";
      return plan;
    }
  }
  if (cols >= index_limit) return plain("a row has more columns than 32 bits count");
  if (capability >= band_capability && plan_band(c, multiprocessors, step, row_step, plan)) return plan;
  int rows = 1;
  // A tile of registers is faster where it holds the taps (NOTES.md: float32 to 11 taps); marching everywhere else.
  const int tile = tile_taps(size, plan.vector_width, plan.channels_last, c.K);
  plan.march =
      step == 1 && c.fold == 1 && c.spread_w == 1 && size < 8 && plan.vector_width > 1 && march_taps(c.K) && !tile;
  if (plan.march) {
    const int width = march_width(size, c.K, plan.channels_last);
    cols = cols * plan.vector_width / width;
    plan.vector_width = width;
    plan.kernel = plan.channels_last ? kernel_name::march_channels_last : kernel_name::march;
    plan.taps = static_cast<int>(c.K);
    plan.threads = march_threads;
    const int64_t resident =
        int64_t{multiprocessors} * march_threads * march_blocks(size, plan.vector_width, plan.taps, plan.channels_last);
    rows = march_rows(ceil_div(c.H_out, row_step), planes * cols * row_step, resident);
  } else {
    // Tall tiles re-read fewer rows, short ones give small problems enough threads.
    if (step == 1 && c.fold == 1 && c.spread_w == 1) plan.taps = tile;
    const int tall = tall_rows(size, plan.vector_width, plan.taps, plan.channels_last);
    const int low = low_rows(size, plan.vector_width);
    if (step == 1) {
      const int64_t tall_threads = planes * cols * ceil_div(c.H_out, tall);
      const bool small = ceil_div(c.H_out, row_step) <= low || tall_threads < int64_t{multiprocessors} * 1024;
      rows = small || c.fold > 1 || c.spread_w > 1 ? low : tall;
    } else if (step == 2 && !plan.channels_last && size != 8) {
      rows = low;
    }
    plan.threads = forward_threads(plan.vector_width, plan.taps, rows, plan.channels_last);
  }
  plan.step = rows == 1 ? 1 : static_cast<int>(step);
  plan.tiling = make_tiling(planes, c.H_out, cols, rows, rows == 1 ? 1 : static_cast<int>(row_step), plan.threads);
  // Lines and blocks are counted in 32 bits: a batch that has more goes in several launches.
  const int64_t an_image = std::max(plan.tiling.lines, plan.tiling.blocks) / c.N + 1;
  if (an_image >= index_limit) return plain("a single image has more rows than 32 bits count");
  plan.images = std::min(c.N, index_limit / an_image);
  return plan;
}

// Kernels that sum over a channel: a block keeps one channel (32 of them in channels_last), walks its share of the
// channel's lines and leaves one partial sum a tap; `splits` blocks share a channel, `reduce` adds them in order.
struct ReductionPlan {
  const char* kernel = nullptr;
  const char* reason = "";
  bool channels_last = false;
  int vector_width = 1;
  bool march = false;
  FlatPlan flat;
  BankGradientPlan bank;
  int taps = 0;
  int step = 1;
  int threads = 128;
  int tap_chunk = 0;   // taps a block sums
  int tap_chunks = 1;  // blocks along the taps
  int channel_groups = 1;
  int splits = 1;
  Tiling tiling;  // of one channel; channels_last: lines are (w, tile, n)
};

// What runs on one phase of the input rows.
struct PhasePlan {
  Phase phase;
  bool input = false;     // grad_input by a forward kernel; zeros where the phase has no taps
  bool one_pass = false;  // grad_input (unless by a forward kernel), grad_weight (and grad_bias) by one kernel
  bool weight = false;    // grad_weight (and grad_bias) by weight_gradient
  bool bias = false;      // grad_bias comes from this phase's kernel
  ForwardPlan input_plan;
  ReductionPlan reduction;
  bool reduces() const { return one_pass || weight; }
};

struct BackwardPlan {
  bool plain = false;  // everything by the plain kernels
  int plain_splits = 1;
  const char* reason = "";
  std::vector<PhasePlan> phases;  // row 0 first; of stride 1 one
  // What the phases leave.
  bool input_strided = false;  // grad_input by the strided gather
  int strided_vector_width = 1;
  bool weight = false;  // grad_weight (of a stride that has no phases) or grad_bias by weight_gradient
  ReductionPlan weight_plan;
  int64_t workspace = 0;  // doubles
};

// More phases than this would be more launches than they are worth.
constexpr int most_phases = 8;

// Rows of x that a thread of one_pass holds beside their gradients.
constexpr int one_pass_rows(int vector_width) { return vector_width == 8 ? 4 : 8; }

constexpr int gather_rows = 8;  // rows of grad_input a thread of strided_input_gradient
constexpr int reduction_threads = 128;
constexpr int shared_bytes = 48 * 1024;

inline int taps_in_shared(Dtype dtype) {
  // A sum and its compensation a tap and thread, and one for the bias.
  const int accumulator = dtype == Dtype::float64 ? 8 : 4;
  return shared_bytes / (reduction_threads * 2 * accumulator) - 1;
}

inline void split_channels(ReductionPlan& plan, int64_t channels, int multiprocessors) {
  plan.channel_groups = static_cast<int>(plan.channels_last ? ceil_div(channels, 32) : channels);
  const int64_t groups = int64_t{plan.channel_groups} * plan.tap_chunks;
  const int64_t wanted = ceil_div(int64_t{multiprocessors} * 32, groups);
  const int64_t turns = ceil_div(plan.tiling.blocks, std::min(wanted, plan.tiling.blocks));
  plan.splits = static_cast<int>(ceil_div(plan.tiling.blocks, turns));
}

inline Tiling reduction_tiling(bool channels_last, int64_t N, int64_t height, int64_t width, int vector_width, int rows,
                               int row_step) {
  if (!channels_last) return make_tiling(N, height, width / vector_width, rows, row_step, reduction_threads);
  Tiling t = make_tiling(N, height, 1, rows, row_step, reduction_threads);
  t.lines *= width;
  t.block_cols = 32;
  t.block_lines = reduction_threads / 32;
  t.blocks = ceil_div(t.lines, t.block_lines);
  return t;
}

inline bool reads_channels_last(const Operand& operand, int64_t channels, int64_t width) {
  return operand.stride.c == 1 && channels > 1 && !(operand.stride.w == 1 && width > 1);
}

// Whether a one-pass kernel over these rows meets every grad_output element in the window of exactly one tile, so
// that grad_bias can be summed on the way: no column is left out, no chain of `dilation` rows is empty, and the
// windows reach from the first grad_output row to the last.
inline bool meets_all_grad_output(const Geometry& g) {
  return g.padding.w == 0 && g.W >= g.W_out && g.H >= g.dilation.h && g.padding.h <= g.dilation.h * (g.K - 1) &&
         g.H + g.padding.h >= g.H_out;
}

// grad_weight, grad_bias, and grad_input where a.grad_input is given, of stride 1 by one kernel.
inline ReductionPlan plan_one_pass(const BackwardArguments& a, int multiprocessors) {
  const Geometry& g = a.geometry;
  const int size = element_size(a.dtype), width = 16 / size;
  const int row_step = static_cast<int>(g.dilation.h);
  auto aligned = [&](const Operand& operand) { return rows_aligned(operand, width, size); };
  ReductionPlan p;
  p.channels_last = reads_channels_last(a.input, g.C, g.W) && reads_channels_last(a.grad_output, g.C, g.W_out);
  p.kernel = p.channels_last ? kernel_name::one_pass_channels_last : kernel_name::one_pass;
  const bool vectors = !p.channels_last && g.padding.w == 0 && g.W == g.W_out && g.W % width == 0 && aligned(a.input) &&
                       aligned(a.grad_output) && (!a.grad_input.data || aligned(a.grad_input));
  p.vector_width = vectors ? width : 1;
  p.reason = p.channels_last ? "channels_last: one pass, one channel a thread"
             : vectors       ? "rows on 16 bytes: one pass, 16-byte vectors along the width"
                             : "rows off 16-byte boundaries, strided or padded: one pass, one element a load";
  p.tap_chunk = static_cast<int>(g.K);
  if (!p.channels_last && !vectors) p.flat = plan_flat_backward(a, multiprocessors);
  if (p.flat.use) {
    p.kernel = kernel_name::one_pass_flat;
    p.vector_width = width;
    p.taps = static_cast<int>(g.K);
    p.threads = flat_threads;
    p.splits = static_cast<int>(p.flat.splits * p.flat.row_groups);
    p.reason = "planes without gaps, rows off 16-byte boundaries: one pass over whole runs in shared memory";
    return p;
  }
  int rows = one_pass_rows(p.vector_width);
  const int packed = march_backward_width(size, g.K, true);
  if (p.channels_last && size < 8 && march_backward_taps(g.K) && g.C % packed == 0 &&
      channels_aligned(a.input, packed, size) && channels_aligned(a.grad_output, packed, size) &&
      (!a.grad_input.data || channels_aligned(a.grad_input, packed, size))) {
    p.march = true;
    p.kernel = kernel_name::one_pass_march_channels_last;
    p.reason = "channels_last: one pass, vectors along the channels";
    p.taps = static_cast<int>(g.K);
    p.vector_width = packed;
    const int64_t packs = g.C / packed;
    const int64_t resident =
        int64_t{multiprocessors} * march_threads * march_backward_blocks(size, packed, p.taps, true);
    Tiling& t = p.tiling;
    t = make_tiling(g.N, g.H, packs, march_rows(ceil_div(g.H, row_step), g.N * g.W * packs * row_step, resident),
                    row_step, march_threads);
    p.channel_groups = t.col_groups;
    t.col_groups = 1;
    t.lines *= g.W;
    t.blocks = ceil_div(t.lines, t.block_lines);
    const int64_t wanted = std::min(t.blocks, ceil_div(int64_t{multiprocessors} * 32, p.channel_groups));
    p.splits = static_cast<int>(ceil_div(t.blocks, ceil_div(t.blocks, wanted)));
    return p;
  }
  // Half types move at least 4 bytes at a time: narrower packs than 16 bytes where rows allow no more.
  int packs = 1;
  if (vectors)
    packs = march_backward_width(size, g.K, false);
  else if (size == 2 && !p.channels_last && g.padding.w == 0 && g.W == g.W_out)
    packs = a.grad_input.data ? width_of({&a.input, &a.grad_output, &a.grad_input}, g.W, 4, size)
                              : width_of({&a.input, &a.grad_output}, g.W, 4, size);
  p.march = !p.channels_last && size < 8 && packs * size >= 4 && march_backward_taps(g.K) &&
            (g.K <= march_backward_most || packs == 1);
  if (p.march) {
    p.kernel = kernel_name::one_pass_march;
    p.taps = static_cast<int>(g.K);
    if (packs > 1 && !vectors) p.reason = "half type: one pass, packs as wide as the rows are aligned";
    p.vector_width = packs;
    const int64_t resident =
        int64_t{multiprocessors} * march_threads * march_backward_blocks(size, p.vector_width, p.taps, false);
    rows = march_rows(ceil_div(g.H, row_step), g.N * g.C * g.W / p.vector_width * row_step, resident);
  } else if (p.vector_width == 1) {
    p.taps = tile_taps(size, 1, p.channels_last, g.K);
  }
  p.tiling = reduction_tiling(p.channels_last, g.N, g.H, g.W, p.vector_width, rows, row_step);
  split_channels(p, g.C, multiprocessors);
  return p;
}

// grad_weight (its first `taps` taps: all, or none for grad_bias alone) and grad_bias of any stride.
inline ReductionPlan plan_weight_gradient(const BackwardArguments& a, int64_t taps, int multiprocessors) {
  const Geometry& g = a.geometry;
  const int size = element_size(a.dtype), width = 16 / size;
  ReductionPlan p;
  p.channels_last = reads_channels_last(a.grad_output, g.C_out(), g.W_out) && reads_channels_last(a.input, g.C, g.W);
  p.kernel = p.channels_last ? kernel_name::weight_gradient_channels_last : kernel_name::weight_gradient;
  const bool vectors = !p.channels_last && g.stride.w == 1 && g.padding.w == 0 && g.W == g.W_out && g.W % width == 0 &&
                       rows_aligned(a.input, width, size) && rows_aligned(a.grad_output, width, size);
  p.vector_width = vectors ? width : 1;
  p.reason = p.channels_last ? "channels_last: one channel a thread"
             : vectors       ? "rows on 16 bytes: 16-byte vectors along the width"
                             : "rows off 16-byte boundaries, strided or padded: one element a load";
  const int64_t divisor = std::gcd(g.stride.h, g.dilation.h);
  const int rows = g.stride.h == divisor ? 8 : 1;
  p.tap_chunk = static_cast<int>(std::min<int64_t>(taps, taps_in_shared(a.dtype)));
  p.tap_chunks = taps ? static_cast<int>(ceil_div(taps, p.tap_chunk)) : 1;
  p.tiling = reduction_tiling(p.channels_last, g.N, g.H_out, g.W_out, p.vector_width, rows,
                              rows == 1 ? 1 : static_cast<int>(g.dilation.h / divisor));
  split_channels(p, g.C_out(), multiprocessors);
  return p;
}

// Doubles that a reduction of `taps` taps leaves.
inline int64_t partial_sums(int64_t filters, int64_t taps, const ReductionPlan& plan) {
  return filters * (taps + 1) * plan.splits;
}

inline PhasePlan plan_phase(const BackwardArguments& a, const Phase& phase, int multiprocessors, int capability) {
  PhasePlan plan;
  plan.phase = phase;
  const BackwardArguments rows = phase_arguments(a, phase);
  const bool want_input = a.grad_input.data && phase.height > 0, want_weight = a.grad_weight.data && phase.taps > 0;
  const BackwardArguments sums = columns_read(rows);
  if (want_weight && phase.height > 0 && sums.geometry.W > 0) {
    plan.one_pass = a.geometry.multiplier == 1 && phase.taps <= taps_in_shared(a.dtype);
    plan.weight = !plan.one_pass;
    plan.reduction =
        plan.one_pass ? plan_one_pass(sums, multiprocessors) : plan_weight_gradient(sums, phase.taps, multiprocessors);
    // weight_gradient walks grad_output itself.
    plan.bias = a.grad_bias.data && (plan.weight || meets_all_grad_output(sums.geometry));
  }
  plan.input = want_input && !(plan.one_pass && a.geometry.stride.w == 1);
  if (plan.input) plan.input_plan = plan_forward(grad_input_as_convolution(rows), multiprocessors, capability);
  return plan;
}

inline BackwardPlan plan_backward(const BackwardArguments& a, int multiprocessors, int capability) {
  const Geometry& g = a.geometry;
  BackwardPlan plan;
  const bool want_input = a.grad_input.data, want_weight = a.grad_weight.data, want_bias = a.grad_bias.data;
  ForwardArguments as_forward{g, a.dtype, a.input, a.weight, {}, a.grad_output};
  const double a_channel = static_cast<double>(g.N) * std::max(g.H, g.H_out) * std::max(g.W, g.W_out);
  const double filters = static_cast<double>(g.C_out()) * (g.K + 1);
  const double an_image = static_cast<double>(g.C) * g.H * g.W;
  // The filter bank, where it takes the sums, leaves at most grad_input to the phases.
  BankGradientPlan bank = plan_bank_gradient(a, multiprocessors);
  if (want_input && !bank.with_input && g.multiplier == 1 && g.stride.h == 1) bank.use = false;
  BackwardArguments rest = a;
  if (bank.use) {
    rest.grad_weight = {};
    rest.grad_bias = {};
    if (bank.with_input) rest.grad_input = {};
  }
  const bool input_left = rest.grad_input.data, weight_left = rest.grad_weight.data;
  plan.input_strided = input_left && g.stride.h > most_phases;
  plan.plain = !fits_32_bits(as_convolution(as_forward)) || !fits_32_bits(grad_input_as_convolution(a)) ||
               a_channel >= index_limit || filters >= index_limit || (plan.input_strided && an_image >= index_limit);
  bool bias_left = rest.grad_bias.data;
  if (!plan.plain && g.stride.h <= most_phases && (input_left || weight_left)) {
    plan.phases.reserve(g.stride.h);
    for (int64_t row = 0; row < g.stride.h; ++row) {
      plan.phases.push_back(plan_phase(rest, make_phase(g, row), multiprocessors, capability));
      PhasePlan& phase = plan.phases.back();
      if (phase.input && phase.input_plan.kernel == kernel_name::plain) plan.plain = true;
      phase.bias = phase.bias && bias_left;
      bias_left = bias_left && !phase.bias;
      if (phase.reduces()) plan.workspace += partial_sums(g.C_out(), phase.phase.taps, phase.reduction);
    }
  }
  if (plan.plain) {
    plan = BackwardPlan{};
    plan.plain = true;
    plan.reason = "an extent, or the elements of a channel or an image, need 64-bit indices";
    plan.plain_splits =
        static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(256, index_limit / (g.C_out() * (g.K + 1)))));
    if (want_weight || want_bias) plan.workspace = g.C_out() * (g.K + 1) * plan.plain_splits;
    return plan;
  }
  if (plan.input_strided) {
    const int size = element_size(a.dtype), width = 16 / size;
    const bool vectors = g.stride.w == 1 && g.padding.w == 0 && g.W % width == 0 &&
                         rows_aligned(a.grad_output, width, size) && rows_aligned(a.grad_input, width, size);
    plan.strided_vector_width = vectors ? width : 1;
  }
  if (bank.use) {
    plan.weight = true;
    ReductionPlan& p = plan.weight_plan;
    p.kernel = bank.with_input ? kernel_name::one_pass_bank : kernel_name::weight_gradient_bank;
    p.reason = bank.with_input ? "one output row: one pass, filters by taps as a matrix product over the columns"
                               : "one output row: filters by taps as a matrix product over the columns";
    p.bank = bank;
    p.vector_width = bank.vector_width;
    p.threads = bank_gradient_threads;
    p.tap_chunk = bank.tap_chunk;
    p.tap_chunks = bank.tap_groups;
    p.channel_groups = static_cast<int>(g.C * bank.filter_groups);
    p.splits = bank.splits;
    p.tiling.cols = bank.tile_cols;
    p.tiling.tiles = bank.col_tiles;
    p.tiling.lines = bank.tiles;
    plan.workspace += partial_sums(g.C_out(), g.K, p);
    return plan;
  }
  const int64_t taps_left = weight_left && plan.phases.empty() ? g.K : 0;
  plan.weight = taps_left > 0 || bias_left;
  if (plan.weight) {
    plan.weight_plan = plan_weight_gradient(a, taps_left, multiprocessors);
    plan.workspace += partial_sums(g.C_out(), g.K, plan.weight_plan);
  }
  return plan;
}

namespace cuda {
int multiprocessors(int device);
int capability(int device);  // 10 * major + minor
// Launch on `stream` (a cudaStream_t) of `device` and return without waiting: null, or what went wrong.
const char* forward(const ForwardArguments& arguments, int device, void* stream);
const char* backward(const BackwardArguments& arguments, const BackwardPlan& plan, double* workspace, int device,
                     void* stream);
}  // namespace cuda

}  // namespace depthconv
