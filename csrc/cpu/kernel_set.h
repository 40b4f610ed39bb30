// The kernels of one instruction set; included, like vec.h before it, inside the namespace of that set.
//
// Two families share their inner loops. In *rows* the lanes of a vector are neighbouring columns and a tap's weight is
// splat over them; in *channels_last* the lanes are neighbouring channels. What a thread does at a time is a tile:
//   forward    up to four output rows by two vectors in registers. An input row is loaded once (from L1 or L2 after
//              its first use) for all rows of the tile. Rows that share no input (a stride along the height) and flat
//              runs (narrow planes without gaps, seen as one long row) take up to eight vectors of one row instead.
//   backward   up to four rows of input and grad_input in registers, through which the rows of grad_output move: each
//              is loaded once a tile for grad_input += weight * grad_output and sum[tap] += input * grad_output, and
//              a tap's sum is loaded and stored once for all rows of the tile.
//   padded     small planes without gaps, copied (a few at a time, 16 KB of sums) between rows of zeros: every output
//              then has all its taps, whatever its row, and a plane is one run of vectors, whatever its width. Only
//              where all that a zero would meet is finite.
// Elsewhere taps outside the input are left out, never multiplied by zero. Rows of a tile lie `dilation` apart, so that
// their windows overlap.
//
// Sums for grad_weight and grad_bias: a lane adds at most about 2 * flush_after terms in float, then joins a double.

constexpr int64_t flush_after = 64;
constexpr int most_rows = 4;

DEPTHCONV_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
DEPTHCONV_INLINE int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }
DEPTHCONV_INLINE int64_t clamp(int64_t a, int64_t low, int64_t high) { return greatest(low, least(a, high)); }
// Divisions that are mostly by 1: a branch costs less.
DEPTHCONV_INLINE int64_t quotient(int64_t a, int64_t b) { return b == 1 ? a : a / b; }
DEPTHCONV_INLINE int64_t remainder(int64_t a, int64_t b) { return b == 1 ? 0 : a % b; }
DEPTHCONV_INLINE int64_t ceil_of(int64_t a, int64_t b) { return b == 1 ? a : (a + b - 1) / b; }  // a >= 0
DEPTHCONV_INLINE int64_t floor_of(int64_t a, int64_t b) {  // b > 0
  return b == 1 ? a : a >= 0 ? a / b : -((b - 1 - a) / b);
}

// Rows in the next tile of those left: 4, 2 or 1, and no more than two for fewer than three taps.
DEPTHCONV_INLINE int tile_rows(int64_t left, int64_t taps) { return left >= 4 && taps >= 3 ? 4 : left >= 2 ? 2 : 1; }

// A progression of taps k = first_tap + t * tap_step, each at output row first_row - t * row_step.
struct Taps {
  int64_t first_tap, tap_step, first_row, row_step, count;
};

DEPTHCONV_INLINE int64_t common_divisor(int64_t a, int64_t b) {
  while (b) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// The taps through which input row i reaches the output: i + padding - k * dilation is a multiple of stride. `shared`
// is the common divisor of stride and dilation; divisions are few, since this comes before every row.
DEPTHCONV_INLINE Taps taps_of_input(const Job& job, int64_t i, int64_t shared) {
  const int64_t tap_step = quotient(job.stride, shared), row_step = quotient(job.dilation, shared);
  const Taps none = {0, tap_step, 0, row_step, 0};
  int64_t tap = 0, from = i + job.padding, row = 0;
  for (; tap < tap_step && tap < job.K; ++tap, from -= job.dilation) {
    row = quotient(from, job.stride);
    if (row * job.stride == from) break;  // exact, may be negative
  }
  if (tap == tap_step || tap >= job.K) return none;
  if (row >= job.H_out) {
    const int64_t skip = ceil_of(row - job.H_out + 1, row_step);
    if (skip > job.K) return none;
    tap += skip * tap_step;
    row -= skip * row_step;
  }
  if (tap >= job.K || row < 0) return none;
  return {tap, tap_step, row, row_step, least(ceil_of(job.K - tap, tap_step), row / row_step + 1)};
}

// Where a row or a tile of rows finds input: step j of [begin, end) is input row top + j * dilation; row r of the tile
// meets it with tap j - r.
struct Window {
  int64_t top, begin, end;
};
DEPTHCONV_INLINE Window window_of(const Job& job, int64_t h, int rows) {
  const int64_t top = h * job.stride - job.padding;
  const int64_t begin = top < 0 ? ceil_of(-top, job.dilation) : 0;
  const int64_t end = top < job.H ? least(job.K + rows - 1, ceil_of(job.H - top, job.dilation)) : 0;
  return {top, begin, end};
}

// The rows of [row_begin, row_end) that have all their taps inside, where the stride along the height is 1.
struct Inner {
  int64_t begin, end;
};
DEPTHCONV_INLINE Inner inner_rows(int64_t row_begin, int64_t row_end, int64_t first, int64_t last) {
  const int64_t begin = clamp(first, row_begin, row_end);
  return {begin, clamp(last, begin, row_end)};
}

// Columns at a time, so that the rows of all taps stay in a quarter of a megabyte of cache.
template <typename T>
DEPTHCONV_INLINE int64_t column_block(const Job& job) {
  const int64_t fit = (int64_t{1} << 18) / (static_cast<int64_t>(sizeof(T)) * (job.K + most_rows));
  return fit >= job.W ? greatest(job.W, 1) : greatest(fit / 512 * 512, 512);
}
// Whether rows without gaps are better run together: those that leave many lanes of their last vector empty.
template <typename T>
DEPTHCONV_INLINE bool runs_together(const Job& job) {
  const int64_t vectors = ceil_of(job.W, lanes_of<T>);
  return job.flat && column_block<T>(job) >= job.W && vectors * lanes_of<T> * 7 > job.W * 8;
}

template <typename T>
DEPTHCONV_INLINE void splat_weights(const Sum<T>* weight, int64_t count, Sum<T>* to) {
  for (int64_t k = 0; k < count; ++k) store_bits(to + k * lanes_of<T>, splat<T>(weight[k]));
}

// ---------------------------------------------------------------- forward

// A tile's rows are output rows that share input rows, one tap apart, or filters that share all of their input.
template <typename T>
struct Convolution {
  int64_t taps, begin, end;  // steps as in Window
  int64_t input_step;        // between steps
  const Sum<T>* weight;
  int64_t weight_step;       // between taps
  const Sum<T>* bias;        // a vector
  int64_t output_step;       // between the rows of the tile
  int64_t filter_weight, filter_bias;  // between the filters of the tile
  int stored;                // rows of the tile that exist; the others are computed from the same input and dropped
};

enum class Tile { rows, filters };

// Where vector v of a tile begins: vectors are neighbours, but for the last one, which may overlap others.
template <typename T, int vectors>
DEPTHCONV_INLINE int64_t vector_at(int v, int64_t last_at) {
  return v < vectors - 1 ? v * lanes_of<T> : last_at;
}

// One step of the rows in [first, last): tap points at row 0's weight.
template <int rows, int vectors, bool shared, bool full, typename T>
DEPTHCONV_INLINE void convolve_step(Vec<T> (&sum)[rows][vectors], const T* input, const Sum<T>* tap, int64_t tap_row,
                                    int first, int last, int64_t last_at, int lanes) {
  Vec<T> x[vectors];
  DEPTHCONV_UNROLL for (int v = 0; v < vectors; ++v)
    x[v] = load<full>(input + vector_at<T, vectors>(v, last_at), lanes);
  DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r)
    if (r >= first && r < last) {
      DEPTHCONV_UNROLL for (int v = 0; v < vectors; ++v)
        sum[r][v] =
            load_bits<Vec<T>>(tap + r * tap_row + (shared ? 0 : vector_at<T, vectors>(v, last_at))) * x[v] + sum[r][v];
    }
}

// `rows` by `vectors` outputs. With `shared` weights and bias all vectors use the same, else each its own. Where the
// last vector overlaps others it holds the same values.
template <Tile tile, int rows, int vectors, bool shared, bool full, typename T>
DEPTHCONV_INLINE void convolve(const Convolution<T>& c, const T* input, int64_t channel, T* output, int64_t last_at,
                               int lanes) {
  constexpr int others = tile == Tile::rows ? rows - 1 : 0;
  const int64_t tap_step = c.weight_step, tap_row = tile == Tile::rows ? -c.weight_step : c.filter_weight;
  Vec<T> sum[rows][vectors];
  DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r)
    DEPTHCONV_UNROLL for (int v = 0; v < vectors; ++v)
      sum[r][v] = load_bits<Vec<T>>(c.bias + channel + (shared ? 0 : vector_at<T, vectors>(v, last_at)) +
                                    (tile == Tile::rows ? 0 : r * c.filter_bias));
  const Sum<T>* tap = c.weight + channel + c.begin * tap_step;
  input += c.begin * c.input_step;
  int64_t j = c.begin;
  if (c.begin == 0 && c.end == c.taps + others) {  // nothing cut off: the first and last steps are triangles
    DEPTHCONV_UNROLL for (int t = 0; t < others; ++t, ++j, input += c.input_step, tap += tap_step)
      convolve_step<rows, vectors, shared, full>(sum, input, tap, tap_row, 0, t + 1, last_at, lanes);
    for (; j < c.taps; ++j, input += c.input_step, tap += tap_step)
      convolve_step<rows, vectors, shared, full>(sum, input, tap, tap_row, 0, rows, last_at, lanes);
    DEPTHCONV_UNROLL for (int t = 0; t < others; ++t, input += c.input_step, tap += tap_step)
      convolve_step<rows, vectors, shared, full>(sum, input, tap, tap_row, t + 1, rows, last_at, lanes);
  } else {
    const int64_t inner_begin = clamp(others, c.begin, c.end), inner_end = clamp(c.taps, inner_begin, c.end);
    while (j < c.end) {
      if (j == inner_begin)  // steps of all rows
        for (; j < inner_end; ++j, input += c.input_step, tap += tap_step)
          convolve_step<rows, vectors, shared, full>(sum, input, tap, tap_row, 0, rows, last_at, lanes);
      if (j >= c.end) break;
      const int first = static_cast<int>(greatest(0, j - c.taps + 1)), last = static_cast<int>(least(rows, j + 1));
      convolve_step<rows, vectors, shared, full>(sum, input, tap, tap_row, first, last, last_at, lanes);
      ++j, input += c.input_step, tap += tap_step;
    }
  }
  DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r)
    if (rows < 4 || r < c.stored) {
      DEPTHCONV_UNROLL for (int v = 0; v < vectors; ++v)
        store<full>(output + r * c.output_step + vector_at<T, vectors>(v, last_at), sum[r][v], lanes);
    }
}

// What the tile below this one will load and store first: rows of a plane end too soon for the hardware to follow.
template <int rows, int elements, typename T>
DEPTHCONV_INLINE void prefetch_below(const Convolution<T>& c, const T* input, const T* output) {
  input += (c.taps + rows - 1) * c.input_step;
  output += rows * c.output_step;
  DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r)
    DEPTHCONV_UNROLL for (int at = 0; at < elements; at += 64 / static_cast<int>(sizeof(T))) {
      __builtin_prefetch(input + r * c.input_step + at);
      __builtin_prefetch(output + r * c.output_step + at, 1);
    }
}

// A tile over n neighbouring elements. Its last vector overlaps what comes before it rather than be masked.
template <Tile tile, int rows, bool shared, typename T>
void convolve_run(const Convolution<T>& c, const T* input, T* output, int64_t n) {
  constexpr int step = lanes_of<T>, wide = rows == 1 ? (shared ? 8 : 4) : 2;
  if (n < step) return convolve<tile, rows, 1, shared, false>(c, input, 0, output, 0, static_cast<int>(n));
  int64_t at = 0;
  for (; at + wide * step <= n; at += wide * step) {
    if (tile == Tile::rows && rows > 1 && shared) prefetch_below<rows, wide * step>(c, input + at, output + at);
    convolve<tile, rows, wide, shared, true>(c, input + at, shared ? 0 : at, output + at, (wide - 1) * step, step);
  }
  if (wide == 8 && at + 4 * step <= n) {
    convolve<tile, rows, 4, shared, true>(c, input + at, shared ? 0 : at, output + at, 3 * step, step);
    at += 4 * step;
  }
  if (at == n) return;
  const int64_t channel = shared ? 0 : at, last_at = n - at - step;
  input += at;
  output += at;
  if constexpr (wide > 2) {
    if (last_at > 2 * step) return convolve<tile, rows, 4, shared, true>(c, input, channel, output, last_at, step);
    if (last_at > step) return convolve<tile, rows, 3, shared, true>(c, input, channel, output, last_at, step);
  }
  if (last_at > 0) convolve<tile, rows, 2, shared, true>(c, input, channel, output, last_at, step);
  else convolve<tile, rows, 1, shared, true>(c, input, channel, output, last_at, step);
}

template <Tile tile, bool shared, typename T>
DEPTHCONV_INLINE void convolve_rows(int rows, const Convolution<T>& c, const T* input, T* output, int64_t n) {
  if (rows == 4) convolve_run<tile, 4, shared>(c, input, output, n);
  else if (rows == 2) convolve_run<tile, 2, shared>(c, input, output, n);
  else convolve_run<Tile::rows, 1, shared>(c, input, output, n);
}

// Output rows [row_begin, row_end) in tiles. input and output are the plane's (rows) or the image's (channels_last);
// a row is `groups` runs of n elements, `input_group` and `output_group` apart.
template <bool shared, typename T>
void forward_tiles(const ForwardJob& job, Convolution<T> c, const T* input, T* output, int64_t row_begin,
                   int64_t row_end, int64_t n, int64_t groups, int64_t input_group, int64_t output_group) {
  const int64_t apart = job.stride == 1 ? job.dilation : 1, most = job.stride == 1 ? most_rows : 1;
  for (int64_t base = row_begin; base < row_end; base += most * apart)
    for (int64_t first = base; first < least(base + apart, row_end); ++first) {
      int64_t left = least(most, ceil_of(row_end - first, apart));
      for (int64_t h = first; left > 0;) {
        const int rows = left == 3 && job.K >= 3 ? 4 : tile_rows(left, job.K);
        c.stored = static_cast<int>(least(rows, left));
        const Window window = window_of(job, h, c.stored);
        c.begin = window.begin;
        c.end = window.end;
        for (int64_t group = 0; group < groups; ++group)
          convolve_rows<Tile::rows, shared>(rows, c, input + window.top * job.input.stride.h + group * input_group,
                                output + h * job.output.stride.h + group * output_group, n);
        left -= rows;
        h += rows * apart;
      }
    }
}

// A channel's filters of one output row, four at a time: where there are too few output rows to share the input.
template <typename T>
void forward_filters(const ForwardJob& job, Convolution<T> c, const T* input, T* output, int64_t row_begin,
                     int64_t row_end, int64_t n) {
  c.output_step = job.output.stride.c;
  c.stored = most_rows;
  for (int64_t h = row_begin; h < row_end; ++h) {
    const Window window = window_of(job, h, 1);
    c.begin = window.begin;
    c.end = window.end;
    Convolution<T> some = c;
    T* to = output + h * job.output.stride.h;
    for (int64_t left = job.multiplier; left > 0;) {
      const int filters = tile_rows(left, job.K);
      convolve_rows<Tile::filters, true>(filters, some, input + window.top * job.input.stride.h, to, n);
      some.weight += filters * c.filter_weight;
      some.bias += filters * c.filter_bias;
      to += filters * job.output.stride.c;
      left -= filters;
    }
  }
}

template <typename T>
void forward_rows(const ForwardJob& job, int64_t begin, int64_t end, char* scratch) {
  constexpr int lanes = lanes_of<T>;
  // A task makes one plane of the output, or with filters_together all planes of a channel.
  const int64_t together_filters = job.filters_together ? job.multiplier : 1;
  Sum<T>* taps = reinterpret_cast<Sum<T>*>(scratch);
  Sum<T>* bias = taps + together_filters * job.K * lanes;
  const int64_t planes = job.C * job.multiplier / together_filters, block = column_block<T>(job);
  const Strides in = job.input.stride, out = job.output.stride;
  const bool together = runs_together<T>(job) && !job.filters_together;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t part = remainder(task, job.row_chunks), plane = quotient(task, job.row_chunks), n = plane / planes;
    const int64_t co = (plane - n * planes) * together_filters;
    const int64_t row_begin = part * job.row_chunk, row_end = least(job.H_out, row_begin + job.row_chunk);
    const T* input = static_cast<const T*>(job.input.data) + n * in.n + quotient(co, job.multiplier) * in.c;
    T* output = static_cast<T*>(job.output.data) + n * out.n + co * out.c;
    splat_weights<T>(static_cast<const Sum<T>*>(job.weight) + co * job.K, together_filters * job.K, taps);
    splat_weights<T>(static_cast<const Sum<T>*>(job.bias) + co, together_filters, bias);
    const Convolution<T> c{job.K, 0, job.K, job.dilation * in.h, taps, lanes, bias, job.dilation * out.h,
                           job.K * lanes, lanes, most_rows};
    if (together) {
      const Inner inner = inner_rows(row_begin, row_end, job.padding,
                                     job.H + job.padding - (job.K - 1) * job.dilation);
      forward_tiles<true>(job, c, input, output, row_begin, inner.begin, job.W, 1, 0, 0);
      if (inner.begin < inner.end)
        convolve_run<Tile::rows, 1, true>(c, input + (inner.begin - job.padding) * in.h, output + inner.begin * out.h,
                                          (inner.end - inner.begin) * job.W);
      forward_tiles<true>(job, c, input, output, inner.end, row_end, job.W, 1, 0, 0);
      continue;
    }
    for (int64_t column = 0; column < job.W; column += block) {
      const int64_t width = least(block, job.W - column);
      if (job.filters_together) forward_filters(job, c, input + column, output + column, row_begin, row_end, width);
      else forward_tiles<true>(job, c, input + column, output + column, row_begin, row_end, width, 1, 0, 0);
    }
  }
}

template <typename T>
void forward_channels_last(const ForwardJob& job, int64_t begin, int64_t end, char*) {
  const Strides in = job.input.stride, out = job.output.stride;
  const Convolution<T> c{job.K, 0, job.K, job.dilation * in.h, static_cast<const Sum<T>*>(job.weight),
                         job.padded_channels, static_cast<const Sum<T>*>(job.bias), job.dilation * out.h, 0, 0,
                         most_rows};
  const int64_t merged = job.merged_pixels, groups = job.W / merged, rest = job.W % merged, past = groups * merged;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t part = task % job.row_chunks, n = task / job.row_chunks;
    const int64_t row_begin = part * job.row_chunk, row_end = least(job.H_out, row_begin + job.row_chunk);
    const T* input = static_cast<const T*>(job.input.data) + n * in.n;
    T* output = static_cast<T*>(job.output.data) + n * out.n;
    forward_tiles<false>(job, c, input, output, row_begin, row_end, merged * job.C, groups, merged * in.w,
                         merged * out.w);
    if (rest)
      forward_tiles<false>(job, c, input + past * in.w, output + past * out.w, row_begin, row_end, rest * job.C, 1, 0,
                           0);
  }
}

// Widens n elements, zeros after them. What is returned is NaN in some lane if any element is infinite or NaN.
template <typename T>
DEPTHCONV_INLINE Vec<T> widen_run(const T* from, int64_t n, Sum<T>* to) {
  constexpr int step = lanes_of<T>;
  Vec<T> zero = {};
  for (int64_t at = 0; at < n; at += step) {
    const Vec<T> value = at + step <= n ? load<true>(from + at) : load<false>(from + at, static_cast<int>(n - at));
    if (to) store_bits(to + at, value);
    zero += value * 0;
  }
  return zero;
}

// Planes in buffers between rows of zeros: every output is inside, whatever its row, and a plane is one run of vectors,
// whatever its width. Up to eight of them are summed in registers over all taps that reach them; of a few planes at a
// time, so that a run's taps are found once and loads from a buffer come long after the stores to it.
template <int vectors, typename T>
DEPTHCONV_INLINE void convolve_padded(const Sum<T>* input, int64_t tap_step, const Sum<T>* weight, int64_t taps,
                                      Sum<T> bias, T* output, int64_t left) {
  constexpr int step = lanes_of<T>;
  Vec<T> sum[vectors];
  DEPTHCONV_UNROLL for (int v = 0; v < vectors; ++v) sum[v] = splat<T>(bias);
  for (int64_t k = 0; k < taps; ++k, input += tap_step) {
    const Vec<T> tap = splat<T>(weight[k]);
    DEPTHCONV_UNROLL for (int v = 0; v < vectors; ++v) sum[v] = tap * load_bits<Vec<T>>(input + v * step) + sum[v];
  }
  DEPTHCONV_UNROLL for (int v = 0; v < vectors - 1; ++v) store<true>(output + v * step, sum[v]);
  constexpr int last = (vectors - 1) * step;
  if (left >= last + step)
    store<true>(output + last, sum[vectors - 1]);
  else
    store<false>(output + last, sum[vectors - 1], static_cast<int>(left - last));
}

// One vector of each of `rows` runs that lie `apart` rows from one another: what one loads the next uses `apart` taps
// later, and so do the weights, which move through registers. Step j loads row j; only rows of [begin, end) are not
// zero. Runs that begin at or after `left` are not stored.
template <int rows, int apart, typename T>
DEPTHCONV_INLINE void convolve_padded_rows(const Sum<T>* input, int64_t W, int64_t begin, int64_t end,
                                           const Sum<T>* weight, int64_t taps, Sum<T> bias, T* output, int64_t left) {
  constexpr int step = lanes_of<T>, others = (rows - 1) * apart;
  Vec<T> sum[rows], tap[others + 1];
  DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r) sum[r] = splat<T>(bias);
  const int64_t first = clamp(begin, others, taps), last = least(end, taps);
  DEPTHCONV_UNROLL for (int t = 0; t < others; ++t, input += W) {
    tap[others - 1 - t] = splat<T>(weight[first - others + t]);
    if (t < begin) continue;
    const Vec<T> x = load_bits<Vec<T>>(input);
    DEPTHCONV_UNROLL for (int r = 0; r * apart <= t; ++r) sum[r] = tap[others - 1 - t + r * apart] * x + sum[r];
  }
  input += (first - others) * W;
  for (int64_t k = first; k < last; ++k, input += W) {
    DEPTHCONV_UNROLL for (int t = others; t > 0; --t) tap[t] = tap[t - 1];
    tap[0] = splat<T>(weight[k]);
    const Vec<T> x = load_bits<Vec<T>>(input);
    DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r) sum[r] = tap[r * apart] * x + sum[r];
  }
  DEPTHCONV_UNROLL for (int t = 1; t <= others; ++t, input += W) {
    if (taps - 1 + t >= end) break;
    const Vec<T> x = load_bits<Vec<T>>(input);
    DEPTHCONV_UNROLL for (int r = (t + apart - 1) / apart; r < rows; ++r) sum[r] = tap[r * apart - t] * x + sum[r];
  }
  DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r) {
    const int64_t at = r * apart * W;
    if (at + step <= left)
      store<true>(output + at, sum[r]);
    else if (at < left)
      store<false>(output + at, sum[r], static_cast<int>(left - at));
  }
}

// Taps through which the run [begin, end) of a plane meets the `elements` that lie behind `above` zeros; others meet
// zeros alone.
struct TapRange {
  int64_t begin, end;
};
DEPTHCONV_INLINE TapRange taps_of_run(const Job& job, int64_t above, int64_t elements, int64_t begin, int64_t end) {
  const int64_t step = job.dilation * job.W;
  const int64_t first = end > above ? 0 : least(ceil_of(above - end + 1, step), job.K);
  return {first, clamp(ceil_of(greatest(above + elements - begin, 0), step), first, job.K)};
}

template <typename T>
void forward_padded(const ForwardJob& job, int64_t begin, int64_t end, char* scratch) {
  constexpr int step = lanes_of<T>, line = 64 / static_cast<int>(sizeof(T));
  const int64_t planes = job.C * job.multiplier, elements = job.H * job.W, outputs = job.H_out * job.W;
  const int64_t above = job.padding * job.W, tap_step = job.dilation * job.W;
  Sum<T>* buffers = reinterpret_cast<Sum<T>*>(scratch);
  const int64_t apart = job.W * 2 <= step ? 2 : 1;
  const int64_t tile_vectors =
      ceil_of(job.H_out, apart == 1 ? 7 : 8) * (apart == 1 ? 7 : 4) * ceil_of(apart * job.W, step);
  const bool tiles = job.dilation == 1 && job.K >= 7 && tile_vectors * 2 < ceil_of(outputs, step) * 3;
  for (int64_t i = 0; i < job.padded_planes * job.padded_size; ++i) buffers[i] = 0;
  buffers += -above & (step - 1);  // so that the planes themselves are aligned
  const Sum<T>* weight[most_padded_planes];
  Sum<T> bias[most_padded_planes];
  T* output[most_padded_planes];
  int64_t n = begin / planes, co = begin % planes;
  for (int64_t first = begin; first < end; first += job.padded_planes) {
    const int64_t count = least(job.padded_planes, end - first);
    for (int64_t i = 0; i < count; ++i, ++co) {
      if (co == planes) ++n, co = 0;
      const T* from = static_cast<const T*>(job.input.data) + n * job.input.stride.n +
                      quotient(co, job.multiplier) * job.input.stride.c;
      output[i] = static_cast<T*>(job.output.data) + n * job.output.stride.n + co * job.output.stride.c;
      for (int64_t at = 0; at < outputs; at += line) __builtin_prefetch(output[i] + at, 1);
      widen_run(from, elements, buffers + i * job.padded_size + above);
      weight[i] = static_cast<const Sum<T>*>(job.weight) + co * job.K;
      bias[i] = static_cast<const Sum<T>*>(job.bias)[co];
    }
    const int64_t most = apart == 1 ? 7 : 8;  // rows of a tile
    for (int64_t h = 0; tiles && h < job.H_out; h += most)
      for (int64_t column = 0; column < apart * job.W; column += step) {
        const int64_t row = clamp(job.H_out - most, 0, h), at = row * job.W + column;
        const int64_t top = greatest(job.padding - row - (apart - 1) - (column > 0), 0);
        const int64_t bottom = job.padding + job.H - row;
        for (int64_t i = 0; i < count; ++i) {
          const Sum<T>* from = buffers + i * job.padded_size + at;
          if (apart == 1)
            convolve_padded_rows<7, 1>(from, job.W, top, bottom, weight[i], job.K, bias[i], output[i] + at,
                                       outputs - at);
          else
            convolve_padded_rows<4, 2>(from, job.W, top, bottom, weight[i], job.K, bias[i], output[i] + at,
                                       outputs - at);
        }
      }
    for (int64_t at = 0; at < outputs && !tiles;) {
      const int64_t left = outputs - at;
      const int vectors = left > 7 * step ? 8 : left > 3 * step ? 4 : left > step ? 2 : 1;
      const TapRange taps = taps_of_run(job, above, elements, at, at + vectors * step);
      const int64_t tap = taps.begin, count_taps = taps.end - taps.begin;
      for (int64_t i = 0; i < count; ++i) {
        const Sum<T>* from = buffers + i * job.padded_size + at + tap * tap_step;
        if (vectors == 8)
          convolve_padded<8>(from, tap_step, weight[i] + tap, count_taps, bias[i], output[i] + at, left);
        else if (vectors == 4)
          convolve_padded<4>(from, tap_step, weight[i] + tap, count_taps, bias[i], output[i] + at, left);
        else if (vectors == 2)
          convolve_padded<2>(from, tap_step, weight[i] + tap, count_taps, bias[i], output[i] + at, left);
        else
          convolve_padded<1>(from, tap_step, weight[i] + tap, count_taps, bias[i], output[i] + at, left);
      }
      at += vectors * step;
    }
  }
}

template <typename T>
void forward_any(const ForwardJob& job, int64_t begin, int64_t end, char* scratch) {
  if (job.channels_last)
    forward_channels_last<T>(job, begin, end, scratch);
  else if (job.padded_planes)
    forward_padded<T>(job, begin, end, scratch);
  else
    forward_rows<T>(job, begin, end, scratch);
}

// ---------------------------------------------------------------- backward

// Row r of a tile meets tap k at the output row r - k steps from the one that grad_output points at; only steps of
// [least_step, most_step] lie inside. All rows use the taps of [all_begin, all_end), some rows those of the rest of
// [begin, end).
template <typename T>
struct Backpropagation {
  int64_t begin, all_begin, all_end, end, least_step, most_step;
  int64_t input_step, output_step, grad_step;  // between rows
  int64_t weight_step, sum_step;               // between taps
  int64_t filters, filter_output, filter_weight, filter_sum;  // number of filters of the channel, and between them
  bool single;  // there is one output row: row r meets it with tap begin + r
};

template <typename T>
DEPTHCONV_INLINE void set_taps(Backpropagation<T>& b, int64_t taps, int rows, int64_t least_step, int64_t most_step) {
  b.least_step = least_step;
  b.most_step = most_step;
  b.begin = clamp(-most_step, 0, taps);
  b.end = clamp(rows - least_step, b.begin, taps);
  b.all_begin = clamp(rows - 1 - most_step, b.begin, b.end);
  b.all_end = clamp(1 - least_step, b.all_begin, b.end);
}

enum class Wanted { both, input, weight };

// flat: the rows of the tile are neighbouring vectors of one run, `input_step` apart, and taps lie output_step apart.
template <int rows, Wanted wanted, bool flat, bool full, typename T>
DEPTHCONV_INLINE void backpropagate(const Backpropagation<T>& shared, const T* input, const T* grad_output,
                                    const Sum<T>* weight, Sum<T>* sum, T* grad_input, int lanes) {
  const Backpropagation<T> b = shared;  // a copy that no store can alias
  constexpr bool weight_wanted = wanted != Wanted::input, input_wanted = wanted != Wanted::weight;
  Vec<T> x[rows], dx[rows];
  DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r) {
    x[r] = weight_wanted ? load<full>(input + r * b.input_step, lanes) : Vec<T>{};
    dx[r] = Vec<T>{};
  }
  for (int64_t filter = 0; filter < b.filters; ++filter) {
    for (int64_t k = b.begin; k < b.end; ++k) {
      if (k == b.all_begin && k < b.all_end) {
        const T* from = grad_output - k * b.output_step;
        Vec<T> dy[rows];
        if (!flat)
          DEPTHCONV_UNROLL for (int r = 1; r < rows; ++r) dy[r - 1] = load<full>(from + r * b.output_step, lanes);
        for (; k < b.all_end; ++k, from -= b.output_step) {
          if (flat) {
            DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r) dy[r] = load<full>(from + r * lanes_of<T>, lanes);
          } else {
            DEPTHCONV_UNROLL for (int r = rows - 1; r > 0; --r) dy[r] = dy[r - 1];
            dy[0] = load<full>(from, lanes);
          }
          if (weight_wanted) {
            Vec<T> total = load_bits<Vec<T>>(sum + k * b.sum_step);
            DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r) total = x[r] * dy[r] + total;
            store_bits(sum + k * b.sum_step, total);
          }
          if (input_wanted) {
            const Vec<T> tap = load_bits<Vec<T>>(weight + k * b.weight_step);
            DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r) dx[r] = tap * dy[r] + dx[r];
          }
        }
        if (k >= b.end) break;
      }
      Vec<T> total = load_bits<Vec<T>>(sum + k * b.sum_step);
      const Vec<T> tap = load_bits<Vec<T>>(weight + k * b.weight_step);
      DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r) {
        if (r - k < b.least_step || r - k > b.most_step) continue;
        const Vec<T> dy = load<full>(grad_output + (r - k) * b.output_step, lanes);
        if (weight_wanted) total = x[r] * dy + total;
        if (input_wanted) dx[r] = tap * dy + dx[r];
      }
      if (weight_wanted) store_bits(sum + k * b.sum_step, total);
    }
    grad_output += b.filter_output;
    weight += b.filter_weight;
    sum += b.filter_sum;
  }
  if (input_wanted)
    DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r) store<full>(grad_input + r * b.grad_step, dx[r], lanes);
}

// What the tiles of a row of the plane or image share.
template <typename T>
struct Place {
  const T* input;
  const T* grad_output;
  const Sum<T>* weight;
  Sum<T>* sum;
  T* grad_input;
};

// One vector of a tile whose rows meet one output row, each through a tap of its own: of every filter of the channel.
template <int rows, Wanted wanted, bool shared, bool full, typename T>
DEPTHCONV_INLINE void backpropagate_single(const Backpropagation<T>& tile, Place<T> p, int lanes) {
  constexpr bool weight_wanted = wanted != Wanted::input, input_wanted = wanted != Wanted::weight;
  const Backpropagation<T> b = tile;  // a copy that no store can alias
  const int64_t weight_step = shared ? lanes_of<T> : b.weight_step, sum_step = shared ? lanes_of<T> : b.sum_step;
  Vec<T> x[rows], dx[rows] = {};
  DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r)
    x[r] = weight_wanted ? load<full>(p.input + r * b.input_step, lanes) : Vec<T>{};
  for (int64_t filter = 0; filter < b.filters; ++filter) {
    const Vec<T> dy = load<full>(p.grad_output, lanes);
    DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r) {
      if (weight_wanted) store_bits(p.sum + r * sum_step, x[r] * dy + load_bits<Vec<T>>(p.sum + r * sum_step));
      if (input_wanted) dx[r] = load_bits<Vec<T>>(p.weight + r * weight_step) * dy + dx[r];
    }
    p.grad_output += b.filter_output;
    p.weight += b.filter_weight;
    p.sum += b.filter_sum;
  }
  if (input_wanted)
    DEPTHCONV_UNROLL for (int r = 0; r < rows; ++r) store<full>(p.grad_input + r * b.grad_step, dx[r], lanes);
}

// Up to flush_after vectors of a tile of rows. shared: the vectors have the same taps and sums (rows).
template <int rows, Wanted wanted, bool flat, bool shared, typename T>
void backpropagate_run(const Backpropagation<T>& b, const Place<T>& p, int64_t n) {
  constexpr int step = lanes_of<T>, across = flat ? rows * step : step;
  int64_t at = 0;
  if (!flat && b.single) {
    const auto place = [&](int64_t begin) -> Place<T> {
      const int64_t sums = shared ? 0 : begin;
      return {p.input + begin, p.grad_output + begin, p.weight + b.begin * b.weight_step + sums,
              p.sum + b.begin * b.sum_step + sums, p.grad_input + begin};
    };
    for (; at + step <= n; at += step) backpropagate_single<rows, wanted, shared, true>(b, place(at), step);
    if (at < n) backpropagate_single<rows, wanted, shared, false>(b, place(at), static_cast<int>(n - at));
    return;
  }
  for (; at + across <= n; at += across)
    backpropagate<rows, wanted, flat, true>(b, p.input + at, p.grad_output + at, p.weight + (shared ? 0 : at),
                                            p.sum + (shared ? 0 : at), p.grad_input + at, step);
  if (flat)
    for (; at + step <= n; at += step)
      backpropagate<1, wanted, false, true>(b, p.input + at, p.grad_output + at, p.weight, p.sum, p.grad_input + at,
                                            step);
  if (at < n)
    backpropagate<flat ? 1 : rows, wanted, false, false>(b, p.input + at, p.grad_output + at,
                                                         p.weight + (shared ? 0 : at), p.sum + (shared ? 0 : at),
                                                         p.grad_input + at, static_cast<int>(n - at));
}

template <int rows, bool flat, bool shared, typename T>
DEPTHCONV_INLINE void backpropagate_wanted(Wanted wanted, const Backpropagation<T>& b, const Place<T>& p, int64_t n) {
  if (wanted == Wanted::both) backpropagate_run<rows, Wanted::both, flat, shared>(b, p, n);
  else if (wanted == Wanted::input) backpropagate_run<rows, Wanted::input, flat, shared>(b, p, n);
  else backpropagate_run<rows, Wanted::weight, flat, shared>(b, p, n);
}

template <bool shared, typename T>
DEPTHCONV_INLINE void backpropagate_rows(int rows, Wanted wanted, const Backpropagation<T>& b, const Place<T>& p,
                                         int64_t n) {
  if (rows == 4) backpropagate_wanted<4, false, shared>(wanted, b, p, n);
  else if (rows == 2) backpropagate_wanted<2, false, shared>(wanted, b, p, n);
  else backpropagate_wanted<1, false, shared>(wanted, b, p, n);
}

// Sums of a task in float, flushed to double: `taps` runs of `width` elements, total_width apart in the totals.
template <typename T>
struct Sums {
  Sum<T>* sum;
  double* total;  // null where they are not wanted
  int64_t taps, elements, width, total_width;
  int64_t terms;  // that a lane has added since the last flush
  DEPTHCONV_INLINE void add(int64_t more) {
    terms += more;
    if (terms >= flush_after) flush();
  }
  void flush() {
    for (int64_t k = 0; k < taps; ++k) {
      Sum<T>* __restrict from = sum + k * width;
      if (total) {
        double* __restrict to = total + k * total_width;
        for (int64_t i = 0; i < elements; ++i) to[i] += from[i];
      }
      for (int64_t i = 0; i < elements; ++i) from[i] = 0;
    }
    terms = 0;
  }
};

// Adds a run of n neighbouring elements to one vector of sums (shared) or to the vector of each.
template <bool shared, typename T>
DEPTHCONV_INLINE void add_run(const T* from, int64_t n, Sum<T>* sum) {
  constexpr int step = lanes_of<T>;
  Vec<T> total = shared ? load_bits<Vec<T>>(sum) : Vec<T>{};
  int64_t at = 0;
  for (; at < n; at += step) {
    const Vec<T> value = at + step <= n ? load<true>(from + at) : load<false>(from + at, static_cast<int>(n - at));
    if (shared) total += value;
    else store_bits(sum + at, load_bits<Vec<T>>(sum + at) + value);
  }
  if (shared) store_bits(sum, total);
}

// Input rows [row_begin, row_end) in tiles. A row is `groups` runs of n elements (input_group, output_group, grad_group
// apart). all_grad_output: its rows in the same way, all columns, for grad_bias, whose sums lie at bias_sum.
template <typename T>
struct Rows {
  Backpropagation<T> b;
  Place<T> place;
  Wanted wanted;
  bool nothing;  // but grad_bias is wanted
  bool bias;
  int64_t n, groups, input_group, output_group, grad_group;
  const T* all_grad_output;
  int64_t all_n, all_groups;
  Sum<T>* bias_sum;
};

template <bool shared, typename T>
void sum_bias(const BackwardJob& job, const Rows<T>& rows, int64_t row_begin, int64_t row_end, Sums<T>& sums) {
  if (!rows.bias) return;
  const int64_t piece = shared ? flush_after * lanes_of<T> : rows.all_n;
  for (int64_t o = row_begin * job.H_out / job.H; o < row_end * job.H_out / job.H; ++o)
    for (int64_t group = 0; group < rows.all_groups; ++group)
      for (int64_t at = 0; at < rows.all_n; at += piece) {
        const int64_t n = least(piece, rows.all_n - at);
        for (int64_t filter = 0; filter < rows.b.filters; ++filter)
          add_run<shared>(rows.all_grad_output + filter * rows.b.filter_output + o * job.grad_output.stride.h +
                              group * rows.output_group + at,
                          n, rows.bias_sum + filter * rows.b.filter_sum);
        sums.add(shared ? ceil_of(n, lanes_of<T>) : 1);
      }
}

template <bool shared, typename T>
void backward_tiles(const BackwardJob& job, Rows<T>& rows, int64_t row_begin, int64_t row_end, Sums<T>& sums) {
  constexpr int step = lanes_of<T>;
  const bool single = job.H_out == 1, windows = job.stride == 1 && !single;
  const int64_t shared_step = job.stride == 1 ? 1 : common_divisor(job.stride, job.dilation);
  const int64_t apart = windows || single ? job.dilation : 1, most = windows || single ? most_rows : 1;
  const int64_t tap_width = rows.b.weight_step, sum_width = rows.b.sum_step;
  for (int64_t base = row_begin; base < row_end; base += most * apart) {
    const int64_t base_end = least(base + most * apart, row_end);
    for (int64_t first = base; first < least(base + apart, row_end) && !rows.nothing; ++first) {
      int64_t left = least(most, ceil_of(row_end - first, apart));
      for (int64_t i = first; left > 0;) {
        int count = tile_rows(left, job.K);
        Backpropagation<T> b = rows.b;
        Place<T> place = rows.place;
        if (windows) {
          const int64_t row = i + job.padding;
          set_taps(b, job.K, count, -(row / job.dilation), floor_of(job.H_out - 1 - row, job.dilation));
          place.grad_output += row * job.grad_output.stride.h;
          b.output_step = job.dilation * job.grad_output.stride.h;
        } else if (single && remainder(i + job.padding, job.dilation) == 0 &&
                   quotient(i + job.padding, job.dilation) + count <= job.K) {
          b.begin = quotient(i + job.padding, job.dilation);
          b.end = 0;
          b.single = true;
        } else {
          count = 1;
          const Taps t = taps_of_input(job, i, shared_step);
          set_taps(b, t.count, 1, 1 - t.count, 0);
          place.grad_output += t.first_row * job.grad_output.stride.h;
          place.weight += t.first_tap * tap_width;
          place.sum += t.first_tap * sum_width;
          b.output_step = t.row_step * job.grad_output.stride.h;
          b.weight_step = t.tap_step * tap_width;
          b.sum_step = t.tap_step * sum_width;
        }
        // A row that shares no taps with others: neighbouring vectors of it instead.
        const bool alone = shared && !windows && !b.single && rows.n >= most_rows * step;
        if (alone) b.input_step = b.grad_step = step;
        place.input += i * job.input.stride.h;
        place.grad_input += i * job.grad_input.stride.h;
        // With one output row no two rows add to the same sum: the first stands for all of them.
        const int terms = !single ? count : i == row_begin ? 1 : 0;
        const int64_t piece = shared ? flush_after / (single ? 1 : most_rows) * step : rows.n;
        for (int64_t group = 0; group < rows.groups; ++group) {
          for (int64_t at = 0; at < rows.n; at += piece) {
            const int64_t n = least(piece, rows.n - at);
            const Place<T> run{place.input + at, place.grad_output + at, place.weight, place.sum,
                               place.grad_input + at};
            if (alone)
              backpropagate_wanted<most_rows, shared, shared>(rows.wanted, b, run, n);
            else
              backpropagate_rows<shared>(count, rows.wanted, b, run, n);
            sums.add(shared ? terms * ceil_of(n, step) : terms);
          }
          place.input += rows.input_group;
          place.grad_output += rows.output_group;
          place.grad_input += rows.grad_group;
        }
        left -= count;
        i += count * apart;
      }
    }
    sum_bias<shared>(job, rows, base, base_end, sums);
  }
}

// Rows that have all their taps, run together as one.
template <typename T>
void backward_together(const BackwardJob& job, Rows<T>& rows, int64_t row_begin, int64_t row_end, Sums<T>& sums) {
  constexpr int step = lanes_of<T>;
  const int64_t merge = greatest(flush_after * step / job.W, 1);
  for (int64_t i = row_begin, end; i < row_end; i = end) {
    end = least(i + merge, row_end);
    Backpropagation<T> b = rows.b;
    set_taps(b, job.K, 1, 1 - job.K, 0);
    b.input_step = b.grad_step = step;
    b.output_step = job.dilation * job.grad_output.stride.h;
    const Place<T> place{rows.place.input + i * job.input.stride.h,
                         rows.place.grad_output + (i + job.padding) * job.grad_output.stride.h, rows.place.weight,
                         rows.place.sum, rows.place.grad_input + i * job.grad_input.stride.h};
    const int64_t n = (end - i) * job.W;
    if (!rows.nothing) {
      backpropagate_wanted<most_rows, true, true>(rows.wanted, b, place, n);
      sums.add(ceil_of(n, step));
    }
    sum_bias<true>(job, rows, i, end, sums);
  }
}

template <typename T>
DEPTHCONV_INLINE Wanted wanted_of(const BackwardJob& job) {
  return !job.grad_input.data ? Wanted::weight : job.want_weight ? Wanted::both : Wanted::input;
}

// Up to four vectors of a plane, whose grad_output lies in a buffer between rows of zeros; taps go downwards.
template <int vectors, Wanted wanted, typename T>
DEPTHCONV_INLINE void backpropagate_padded(Place<T> p, const Sum<T>* grad_output, int64_t tap_step, int64_t taps,
                                           int64_t left) {
  constexpr int step = lanes_of<T>, last = (vectors - 1) * step;
  constexpr bool weight_wanted = wanted != Wanted::input, input_wanted = wanted != Wanted::weight;
  const bool whole = left >= last + step;
  const int lanes = static_cast<int>(left - last);
  Vec<T> x[vectors] = {}, dx[vectors] = {};
  if (weight_wanted) {
    DEPTHCONV_UNROLL for (int v = 0; v < vectors - 1; ++v) x[v] = load<true>(p.input + v * step);
    x[vectors - 1] = whole ? load<true>(p.input + last) : load<false>(p.input + last, lanes);
  }
  for (int64_t k = 0; k < taps; ++k, grad_output += tap_step, --p.weight, p.sum -= step) {
    Vec<T> dy[vectors];
    DEPTHCONV_UNROLL for (int v = 0; v < vectors; ++v) dy[v] = load_bits<Vec<T>>(grad_output + v * step);
    if (weight_wanted) {
      Vec<T> total = load_bits<Vec<T>>(p.sum);
      DEPTHCONV_UNROLL for (int v = 0; v < vectors; ++v) total = x[v] * dy[v] + total;
      store_bits(p.sum, total);
    }
    if (input_wanted) {
      const Vec<T> tap = splat<T>(*p.weight);
      DEPTHCONV_UNROLL for (int v = 0; v < vectors; ++v) dx[v] = tap * dy[v] + dx[v];
    }
  }
  if (input_wanted) {
    DEPTHCONV_UNROLL for (int v = 0; v < vectors - 1; ++v) store<true>(p.grad_input + v * step, dx[v]);
    if (whole)
      store<true>(p.grad_input + last, dx[vectors - 1]);
    else
      store<false>(p.grad_input + last, dx[vectors - 1], lanes);
  }
}

template <int vectors, typename T>
DEPTHCONV_INLINE void backpropagate_padded(Wanted wanted, const Place<T>& p, const Sum<T>* grad_output,
                                           int64_t tap_step, int64_t taps, int64_t left) {
  if (wanted == Wanted::both)
    backpropagate_padded<vectors, Wanted::both>(p, grad_output, tap_step, taps, left);
  else if (wanted == Wanted::input)
    backpropagate_padded<vectors, Wanted::input>(p, grad_output, tap_step, taps, left);
  else
    backpropagate_padded<vectors, Wanted::weight>(p, grad_output, tap_step, taps, left);
}

// The planes of `count` channels of an image from c on, unless they hold what no zero may meet: inf or NaN. next_input
// and next_output lead to the planes after these, which the loads of these would not bring into the cache.
template <typename T>
bool backward_padded(const BackwardJob& job, const Place<T>& plane, int64_t c, int64_t count, int64_t next_input,
                     int64_t next_output, Sum<T>* buffers, Sums<T>& sums) {
  constexpr int step = lanes_of<T>, line = 64 / static_cast<int>(sizeof(T));
  const int64_t elements = job.H * job.W, outputs = job.H_out * job.W, tap_step = job.dilation * job.W;
  const int64_t above = (job.K - 1) * tap_step - job.padding * job.W, per_channel = (job.K + 1) * step;
  const Wanted wanted = wanted_of<T>(job);
  Vec<T> zero = {};
  for (int64_t i = 0; i < count; ++i) {
    const T* x = plane.input + i * job.input.stride.c;
    const T* dy = plane.grad_output + i * job.grad_output.stride.c;
    for (int64_t at = 0; job.want_weight && at < elements; at += line) __builtin_prefetch(x + next_input + at, 0, 2);
    for (int64_t at = 0; at < outputs; at += line) __builtin_prefetch(dy + next_output + at, 0, 2);
    zero += widen_run(dy, outputs, buffers + i * job.padded_size + above);
    if (job.want_weight) zero += widen_run(x, elements, static_cast<Sum<T>*>(nullptr));
  }
  if (any(zero != zero)) return false;
  for (int64_t at = 0; job.want_bias && at < outputs; at += flush_after * step) {
    const int64_t n = least(outputs - at, flush_after * step);
    for (int64_t i = 0; i < count; ++i)
      add_run<true>(plane.grad_output + i * job.grad_output.stride.c + at, n,
                    plane.sum + i * per_channel + job.K * step);
    sums.add(ceil_of(n, step));
  }
  for (int64_t at = 0; at < elements && (job.grad_input.data || job.want_weight);) {
    const int64_t left = elements - at;
    const int vectors = left > 3 * step ? 4 : left > step ? 2 : 1;
    const TapRange taps = taps_of_run(job, above, outputs, at, at + vectors * step);
    const int64_t k = job.K - 1 - taps.begin, count_taps = taps.end - taps.begin;
    for (int64_t i = 0; i < count; ++i) {
      const Sum<T>* dy = buffers + i * job.padded_size + at + taps.begin * tap_step;
      const Place<T> run{plane.input + i * job.input.stride.c + at, nullptr,
                         static_cast<const Sum<T>*>(job.weight) + (c + i) * job.K + k,
                         plane.sum + i * per_channel + k * step, plane.grad_input + i * job.grad_input.stride.c + at};
      if (vectors == 4)
        backpropagate_padded<4>(wanted, run, dy, tap_step, count_taps, left);
      else if (vectors == 2)
        backpropagate_padded<2>(wanted, run, dy, tap_step, count_taps, left);
      else
        backpropagate_padded<1>(wanted, run, dy, tap_step, count_taps, left);
    }
    sums.add(vectors);
    at += vectors * step;
  }
  return true;
}

template <typename T>
void backward_rows(const BackwardJob& job, int64_t begin, int64_t end, char* scratch) {
  constexpr int lanes = lanes_of<T>;
  const Strides in = job.input.stride, out = job.grad_output.stride, grad = job.grad_input.stride;
  const int64_t m = job.multiplier, K = job.K, per_channel = m * (K + 1);
  // Scratch: the taps of a channel's filters, then for every channel and filter K + 1 vectors of sums, in float and
  // again in double; the last of the K + 1 is for grad_bias.
  Sum<T>* taps = reinterpret_cast<Sum<T>*>(scratch);
  Sum<T>* sum = taps + m * K * lanes;
  double* total = reinterpret_cast<double*>(scratch + (m * K + job.channel_chunk * per_channel) * VECTOR_BYTES);
  // With one output row all input rows read it, of every filter: so many columns at a time that it stays in L1.
  const int64_t block = job.H_out > 1 ? column_block<T>(job)
                                      : greatest((1 << 14) / (static_cast<int64_t>(sizeof(T)) * m) / 64 * 64, 64);
  const bool together = runs_together<T>(job) && block >= job.W;
  Sum<T>* buffers = reinterpret_cast<Sum<T>*>(total + job.channel_chunk * per_channel * lanes);
  for (int64_t i = 0; i < job.padded_planes * job.padded_size; ++i) buffers[i] = 0;
  buffers += -(((job.K - 1) * job.dilation - job.padding) * job.W) & (lanes - 1);
  const Inner whole{(K - 1) * job.dilation - job.padding, job.H_out - job.padding};
  for (int64_t task = begin; task < end; ++task) {
    const int64_t part = remainder(task, job.row_chunks), groups = quotient(task, job.row_chunks);
    const int64_t group = remainder(groups, job.channel_chunks), batch = quotient(groups, job.channel_chunks);
    const int64_t row_begin = part * job.row_chunk, row_end = least(job.H, row_begin + job.row_chunk);
    const int64_t c_begin = group * job.channel_chunk, c_end = least(job.C, c_begin + job.channel_chunk);
    const int64_t n_begin = batch * job.batch_chunk, n_end = least(job.N, n_begin + job.batch_chunk);
    const int64_t vectors = (c_end - c_begin) * per_channel;
    for (int64_t i = 0; i < vectors * lanes; ++i) {
      sum[i] = 0;
      total[i] = 0;
    }
    int64_t terms = 0;  // the same for every channel: their planes are alike
    for (int64_t n = n_begin; n < n_end; ++n) {
      int64_t terms_after = 0, tried_end = c_begin, done_end = c_begin;
      for (int64_t c = c_begin; c < c_end; ++c) {
        const int64_t at = (c - c_begin) * per_channel * lanes;
        const Place<T> plane{static_cast<const T*>(job.input.data) + n * in.n + c * in.c,
                             static_cast<const T*>(job.grad_output.data) + n * out.n + c * m * out.c, taps, sum + at,
                             static_cast<T*>(job.grad_input.data) + n * grad.n + c * grad.c};
        if (job.padded_planes && c == tried_end) {
          const int64_t count = least(job.padded_planes, c_end - c), back = c - c_begin;
          tried_end = c + count;
          const bool same = tried_end < c_end || n + 1 == n_end;  // the next planes are this image's, or there are none
          Sums<T> sums{sum + at, total + at, 1, count * per_channel * lanes, 0, 0, terms};
          if (backward_padded(job, plane, c, count, same ? count * in.c : in.n - back * in.c,
                              same ? count * out.c : out.n - back * out.c, buffers, sums))
            done_end = tried_end;
          terms_after = greatest(terms_after, sums.terms);
        }
        if (c < done_end) continue;
        splat_weights<T>(static_cast<const Sum<T>*>(job.weight) + c * m * K, m * K, taps);
        Sums<T> sums{sum + at, total + at, 1, per_channel * lanes, 0, 0, terms};
        Rows<T> rows{};
        rows.b.input_step = job.dilation * in.h;
        rows.b.grad_step = job.dilation * grad.h;
        rows.b.weight_step = rows.b.sum_step = lanes;
        rows.b.filters = m;
        rows.b.filter_output = out.c;
        rows.b.filter_weight = K * lanes;
        rows.b.filter_sum = (K + 1) * lanes;
        rows.wanted = wanted_of<T>(job);
        rows.nothing = !job.grad_input.data && !job.want_weight;
        rows.groups = rows.all_groups = 1;
        rows.all_n = job.W_out;
        rows.bias_sum = sum + at + K * lanes;
        for (int64_t column = 0; column < greatest(job.W, 1); column += block) {
          rows.place = {plane.input + column, plane.grad_output + column, taps, sum + at, plane.grad_input + column};
          rows.n = least(block, job.W - column);
          rows.bias = job.want_bias && column == 0;
          rows.all_grad_output = static_cast<const T*>(job.all_grad_output) + n * out.n + c * m * out.c;
          const Inner inner =
              together ? inner_rows(row_begin, row_end, whole.begin, whole.end) : Inner{row_end, row_end};
          backward_tiles<true>(job, rows, row_begin, inner.begin, sums);
          if (together) backward_together(job, rows, inner.begin, inner.end, sums);
          backward_tiles<true>(job, rows, inner.end, row_end, sums);
        }
        terms_after = greatest(terms_after, sums.terms);
      }
      terms = terms_after;
    }
    Sums<T>{sum, total, 1, vectors * lanes, 0, 0, 0}.flush();
    if (!job.partial) continue;
    double* to = job.partial + (batch * job.row_chunks + part) * job.partial_size + c_begin * per_channel;
    for (int64_t v = 0; v < vectors; ++v) {
      to[v] = 0;
      for (int lane = 0; lane < lanes; ++lane) to[v] += total[v * lanes + lane];
    }
  }
}

template <typename T>
void backward_channels_last(const BackwardJob& job, int64_t begin, int64_t end, char* scratch) {
  const Strides in = job.input.stride, out = job.grad_output.stride, grad = job.grad_input.stride;
  const int64_t merged = job.merged_pixels, past = job.W / merged * merged, all_past = job.W_out / merged * merged;
  const int64_t K = job.K, width = job.channel_chunk;  // of one tap's sums: the channels of a task, padded
  Sum<T>* sum = reinterpret_cast<Sum<T>*>(scratch);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t part = remainder(task, job.row_chunks), groups = quotient(task, job.row_chunks);
    const int64_t group = remainder(groups, job.channel_chunks), batch = quotient(groups, job.channel_chunks);
    const int64_t row_begin = part * job.row_chunk, row_end = least(job.H, row_begin + job.row_chunk);
    const int64_t c_begin = group * job.channel_chunk, channels = least(job.C * merged - c_begin, width);
    const int64_t n_begin = batch * job.batch_chunk, n_end = least(job.N, n_begin + job.batch_chunk);
    double* total = job.partial ? job.partial + (batch * job.row_chunks + part) * job.partial_size + c_begin : nullptr;
    for (int64_t k = 0; k <= K; ++k) {
      for (int64_t c = 0; c < width; ++c) sum[k * width + c] = 0;
      for (int64_t c = 0; total && c < channels; ++c) total[k * job.padded_channels + c] = 0;
    }
    Sums<T> sums{sum, total, K + 1, channels, width, job.padded_channels, 0};
    Rows<T> rows{};
    rows.b.input_step = job.dilation * in.h;
    rows.b.grad_step = job.dilation * grad.h;
    rows.b.weight_step = job.padded_channels;
    rows.b.sum_step = width;
    rows.b.filters = 1;
    rows.wanted = wanted_of<T>(job);
    rows.nothing = !job.grad_input.data && !job.want_weight;
    rows.input_group = merged * in.w;
    rows.output_group = merged * out.w;
    rows.grad_group = merged * grad.w;
    rows.bias_sum = sum + K * width;
    for (int64_t n = n_begin; n < n_end; ++n) {
      rows.place = {static_cast<const T*>(job.input.data) + n * in.n + c_begin,
                    static_cast<const T*>(job.grad_output.data) + n * out.n + c_begin,
                    static_cast<const Sum<T>*>(job.weight) + c_begin, sum,
                    static_cast<T*>(job.grad_input.data) + n * grad.n + c_begin};
      rows.bias = job.want_bias;
      rows.all_grad_output = static_cast<const T*>(job.all_grad_output) + n * out.n + c_begin;
      rows.n = rows.all_n = channels;
      rows.groups = past / merged;
      rows.all_groups = all_past / merged;
      backward_tiles<false>(job, rows, row_begin, row_end, sums);
      if (past == job.W && all_past == job.W_out) continue;
      rows.place.input += past * in.w;  // pixels that are left over: one shorter run
      rows.place.grad_output += past * out.w;
      rows.place.grad_input += past * grad.w;
      rows.all_grad_output += all_past * out.w;
      rows.n = (job.W - past) * job.C;
      rows.all_n = (job.W_out - all_past) * job.C;
      rows.groups = rows.all_groups = 1;
      backward_tiles<false>(job, rows, row_begin, row_end, sums);
    }
    sums.flush();
  }
}

template <typename T>
void backward_any(const BackwardJob& job, int64_t begin, int64_t end, char* scratch) {
  job.channels_last ? backward_channels_last<T>(job, begin, end, scratch) : backward_rows<T>(job, begin, end, scratch);
}
