// The kernels of one instruction set; included, like vec.h before it, inside the namespace of that set.
//
// Two families share two inner loops. In *rows* the lanes of a vector are neighbouring columns, weights are splat over
// the lanes; in *channels_last* the lanes are neighbouring channels. Either way an inner loop walks `count` vectors that
// lie a pitch apart, for a progression of taps that lie a tap step apart:
//   convolve    output = bias + sum over taps of weight * input; up to eight outputs in registers, each weight vector is
//               loaded once for them and each input vector once a tap (from L1 or L2 after its first tap).
//   backpropagate  for up to six taps at once, loads input and grad_output once and makes both of
//               grad_input += weight * grad_output and sum[tap] += input * grad_output, with the sums in registers.
// Taps outside the input are left out of the progression, never multiplied by zero.
//
// Sums of grad_weight and grad_bias: a lane adds at most about 2 * flush_after terms in float, then joins the task's
// double sums; forward.cpp's caller adds those of all tasks in their order.

constexpr int64_t flush_after = 64;
constexpr int most_taps = 6;

DEPTHCONV_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
DEPTHCONV_INLINE int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }
DEPTHCONV_INLINE int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }  // a >= 0

// A progression of taps k = first_tap + t * tap_step, each at row first_row + t * row_step of the other side.
struct Taps {
  int64_t first_tap, tap_step, first_row, row_step, count;
};

// The taps that output row h reads from inside the input.
DEPTHCONV_INLINE Taps taps_of_output(const Job& job, int64_t h) {
  const int64_t top = h * job.stride - job.padding;  // input row of tap 0
  const int64_t first = top < 0 ? ceil_of(-top, job.dilation) : 0;
  const int64_t end = top < job.H ? least(job.K, ceil_of(job.H - top, job.dilation)) : 0;
  if (end <= first) return {0, 1, 0, job.dilation, 0};
  return {first, 1, top + first * job.dilation, job.dilation, end - first};
}

DEPTHCONV_INLINE int64_t common_divisor(int64_t a, int64_t b) {
  while (b) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// The taps through which input row i reaches the output: i + padding - k * dilation is a multiple of stride.
DEPTHCONV_INLINE Taps taps_of_input(const Job& job, int64_t i) {
  const int64_t shared = job.stride == 1 ? 1 : common_divisor(job.stride, job.dilation);
  const int64_t tap_step = job.stride / shared, row_step = job.dilation / shared;
  const Taps none = {0, tap_step, 0, -row_step, 0};
  int64_t tap = 0;
  while (tap < tap_step && tap < job.K && (i + job.padding - tap * job.dilation) % job.stride != 0) ++tap;
  if (tap == tap_step || tap >= job.K) return none;
  int64_t row = (i + job.padding - tap * job.dilation) / job.stride;  // exact, may be negative
  if (row >= job.H_out) {
    const int64_t skip = ceil_of(row - job.H_out + 1, row_step);
    if (skip > job.K) return none;
    tap += skip * tap_step;
    row -= skip * row_step;
  }
  if (tap >= job.K || row < 0) return none;
  return {tap, tap_step, row, -row_step, least(ceil_of(job.K - tap, tap_step), row / row_step + 1)};
}

// ---------------------------------------------------------------- forward

template <typename T>
struct Convolution {
  const T* input;      // at the first tap
  int64_t input_pitch, tap_step;
  const Sum<T>* weight;  // a vector for each tap
  int64_t weight_step, taps;
  Vec<T> bias;
  T* output;
  int64_t output_pitch;
};

template <int vectors, bool full, typename T>
DEPTHCONV_INLINE void convolve_tile(const Convolution<T>& c, const T* input, int64_t input_pitch, T* output,
                                    int64_t output_pitch, int lanes) {
  Vec<T> sum[vectors];
  for (int v = 0; v < vectors; ++v) sum[v] = c.bias;
  const Sum<T>* weight = c.weight;
  for (int64_t k = 0; k < c.taps; ++k) {
    const Vec<T> tap = load_bits<Vec<T>>(weight);
    for (int v = 0; v < vectors; ++v) sum[v] = tap * load<full>(input + v * input_pitch, lanes) + sum[v];
    input += c.tap_step;
    weight += c.weight_step;
  }
  for (int v = 0; v < vectors; ++v) store<full>(output + v * output_pitch, sum[v], lanes);
}

// `count` vectors; dense: they follow each other, so that the pitches are constants.
template <bool dense, bool full, typename T>
DEPTHCONV_INLINE void convolve(const Convolution<T>& c, int64_t count, int lanes) {
  const int64_t input_pitch = dense ? lanes_of<T> : c.input_pitch, output_pitch = dense ? lanes_of<T> : c.output_pitch;
  const T* input = c.input;
  T* output = c.output;
  int64_t v = 0;
  if (full && dense)
    for (; v + 8 <= count; v += 8, input += 8 * input_pitch, output += 8 * output_pitch)
      convolve_tile<8, full>(c, input, input_pitch, output, output_pitch, lanes);
  if (full || !dense)
    for (; v + 4 <= count; v += 4, input += 4 * input_pitch, output += 4 * output_pitch)
      convolve_tile<4, full>(c, input, input_pitch, output, output_pitch, lanes);
  for (; v < count; ++v, input += input_pitch, output += output_pitch)
    convolve_tile<1, full>(c, input, input_pitch, output, output_pitch, lanes);
}

// A row of n neighbouring elements.
template <typename T>
DEPTHCONV_INLINE void convolve_row(Convolution<T>& c, int64_t n) {
  constexpr int lanes = lanes_of<T>;
  const int64_t whole = n / lanes * lanes;
  if (whole) convolve<true, true>(c, whole / lanes, lanes);
  if (whole == n) return;
  c.input += whole;
  c.output += whole;
  convolve<true, false>(c, 1, static_cast<int>(n - whole));
}

template <typename T>
DEPTHCONV_INLINE void splat_weights(const Sum<T>* weight, int64_t count, Sum<T>* to) {
  for (int64_t k = 0; k < count; ++k) store_bits(to + k * lanes_of<T>, splat<T>(weight[k]));
}

// Columns at a time, so that the rows of all taps stay in a quarter of a megabyte of cache.
template <typename T>
DEPTHCONV_INLINE int64_t column_block(const Job& job) {
  const int64_t fit = (int64_t{1} << 18) / (static_cast<int64_t>(sizeof(T)) * job.K);
  return fit >= job.W ? greatest(job.W, 1) : greatest(fit / 512 * 512, 512);
}

template <typename T>
void forward_rows(const ForwardJob& job, int64_t begin, int64_t end, char* scratch) {
  Sum<T>* taps = reinterpret_cast<Sum<T>*>(scratch);
  const int64_t filters = job.C * job.multiplier, block = column_block<T>(job);
  const bool flat = job.flat && block >= job.W;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t part = task % job.row_chunks, plane = task / job.row_chunks, n = plane / filters, co = plane % filters;
    const int64_t row_begin = part * job.row_chunk, row_end = least(job.H_out, row_begin + job.row_chunk);
    const T* input = static_cast<const T*>(job.input.data) + n * job.input.stride.n +
                     co / job.multiplier * job.input.stride.c;
    T* output = static_cast<T*>(job.output.data) + n * job.output.stride.n + co * job.output.stride.c;
    splat_weights<T>(static_cast<const Sum<T>*>(job.weight) + co * job.K, job.K, taps);
    const Vec<T> bias = splat<T>(static_cast<const Sum<T>*>(job.bias)[co]);
    // Rows below this one have a tap beyond the bottom.
    const int64_t inner_end = job.H + job.padding - (job.K - 1) * job.dilation;
    for (int64_t column = 0; column < job.W; column += block)
      for (int64_t h = row_begin, rows; h < row_end; h += rows) {
        const Taps t = taps_of_output(job, h);
        rows = flat && t.count == job.K ? least(row_end, inner_end) - h : 1;
        Convolution<T> c{input + t.first_row * job.input.stride.h + column, 0, t.row_step * job.input.stride.h,
                         taps + t.first_tap * lanes_of<T>, lanes_of<T>, t.count, bias,
                         output + h * job.output.stride.h + column, 0};
        convolve_row(c, rows == 1 ? least(block, job.W - column) : rows * job.W);
      }
  }
}

template <typename T>
void forward_channels_last(const ForwardJob& job, int64_t begin, int64_t end, char*) {
  constexpr int lanes = lanes_of<T>, pixels = 8;
  const Strides in = job.input.stride, out = job.output.stride;
  const Sum<T>* weight = static_cast<const Sum<T>*>(job.weight);
  const Sum<T>* bias = static_cast<const Sum<T>*>(job.bias);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t part = task % job.row_chunks, n = task / job.row_chunks;
    const int64_t row_begin = part * job.row_chunk, row_end = least(job.H_out, row_begin + job.row_chunk);
    for (int64_t h = row_begin; h < row_end; ++h) {
      const Taps t = taps_of_output(job, h);
      const T* input = static_cast<const T*>(job.input.data) + n * in.n + t.first_row * in.h;
      T* output = static_cast<T*>(job.output.data) + n * out.n + h * out.h;
      for (int64_t w = 0; w < job.W; w += pixels)
        for (int64_t channel = 0; channel < job.C; channel += lanes) {
          const Convolution<T> c{input + w * in.w + channel, in.w, t.row_step * in.h,
                                 weight + t.first_tap * job.padded_channels + channel, job.padded_channels, t.count,
                                 load_bits<Vec<T>>(bias + channel), output + w * out.w + channel, out.w};
          const int64_t count = least(pixels, job.W - w), left = job.C - channel;
          if (left >= lanes) convolve<false, true>(c, count, lanes);
          else convolve<false, false>(c, count, static_cast<int>(left));
        }
    }
  }
}

template <typename T>
void forward_any(const ForwardJob& job, int64_t begin, int64_t end, char* scratch) {
  job.channels_last ? forward_channels_last<T>(job, begin, end, scratch) : forward_rows<T>(job, begin, end, scratch);
}

// ---------------------------------------------------------------- backward

// `count` vectors of input and grad_input against a progression of taps: tap t reads grad_output + t * tap_step, its
// weight vector lies at weight + t * weight_step and its sums at sum + t * sum_step.
template <typename T>
struct Backpropagation {
  const T* input;
  int64_t input_pitch;
  const T* grad_output;
  int64_t output_pitch, tap_step;
  const Sum<T>* weight;
  int64_t weight_step;
  Sum<T>* sum;
  int64_t sum_step;
  T* grad_input;
  int64_t grad_pitch;
  Sum<T>* carry;  // the running grad_input, where one pass does not hold all taps
};

enum class Wanted { both, both_carried, weight };

template <int taps, Wanted wanted, bool dense, bool full, typename T>
__attribute__((noinline)) void backpropagate(const Backpropagation<T>& b, int64_t count, int lanes) {
  constexpr int step = lanes_of<T>;
  const int64_t input_pitch = dense ? step : b.input_pitch, output_pitch = dense ? step : b.output_pitch;
  const int64_t grad_pitch = dense ? step : b.grad_pitch;
  Vec<T> sum[taps], weight[taps];
  const T* grad_output[taps];
  for (int t = 0; t < taps; ++t) {
    sum[t] = load_bits<Vec<T>>(b.sum + t * b.sum_step);
    weight[t] = load_bits<Vec<T>>(b.weight + t * b.weight_step);
    grad_output[t] = b.grad_output + t * b.tap_step;
  }
  for (int64_t v = 0; v < count; ++v) {
    const Vec<T> x = load<full>(b.input + v * input_pitch, lanes);
    Vec<T> dx = {};
    if (wanted == Wanted::both_carried) dx = load_bits<Vec<T>>(b.carry + v * step);
    for (int t = 0; t < taps; ++t) {
      const Vec<T> dy = load<full>(grad_output[t] + v * output_pitch, lanes);
      if (wanted != Wanted::weight) dx = weight[t] * dy + dx;
      sum[t] = x * dy + sum[t];
    }
    if (wanted == Wanted::both) store<full>(b.grad_input + v * grad_pitch, dx, lanes);
    if (wanted == Wanted::both_carried) store_bits(b.carry + v * step, dx);
  }
  for (int t = 0; t < taps; ++t) store_bits(b.sum + t * b.sum_step, sum[t]);
}

template <Wanted wanted, bool dense, bool full, typename T>
DEPTHCONV_INLINE void backpropagate_group(const Backpropagation<T>& b, int taps, int64_t count, int lanes) {
  switch (taps) {
    case 1: return backpropagate<1, wanted, dense, full>(b, count, lanes);
    case 2: return backpropagate<2, wanted, dense, full>(b, count, lanes);
    case 3: return backpropagate<3, wanted, dense, full>(b, count, lanes);
    case 4: return backpropagate<4, wanted, dense, full>(b, count, lanes);
    case 5: return backpropagate<5, wanted, dense, full>(b, count, lanes);
    default: return backpropagate<6, wanted, dense, full>(b, count, lanes);
  }
}

// The taps of one input row: `outer` filters (their steps apart) of `inner` taps each.
template <typename T>
struct Progression {
  const T* grad_output;
  const Sum<T>* weight;
  Sum<T>* sum;
  int64_t inner, tap_step, weight_step, sum_step;
  int64_t outer, outer_tap_step, outer_weight_step, outer_sum_step;
};

// At most flush_after vectors: all taps in even groups of up to most_taps.
template <bool dense, bool full, typename T>
void backpropagate_all(Backpropagation<T> b, const Progression<T>& p, int64_t count, int lanes) {
  constexpr int step = lanes_of<T>;
  if (p.inner == 0) {
    if (b.grad_input)
      for (int64_t v = 0; v < count; ++v) store<full>(b.grad_input + v * (dense ? step : b.grad_pitch), Vec<T>{}, lanes);
    return;
  }
  const int64_t groups = ceil_of(p.inner, most_taps), size = p.inner / groups, larger = p.inner % groups;
  const bool carried = b.grad_input && p.outer * groups > 1;
  alignas(64) Sum<T> carry[flush_after * step];
  if (carried)
    for (int64_t v = 0; v < count; ++v) store_bits(carry + v * step, Vec<T>{});
  b.carry = carry;
  b.tap_step = p.tap_step;
  b.weight_step = p.weight_step;
  b.sum_step = p.sum_step;
  for (int64_t o = 0; o < p.outer; ++o) {
    b.grad_output = p.grad_output + o * p.outer_tap_step;
    b.weight = p.weight + o * p.outer_weight_step;
    b.sum = p.sum + o * p.outer_sum_step;
    for (int64_t g = 0; g < groups; ++g) {
      const int taps = static_cast<int>(size + (g < larger));
      if (!b.grad_input) backpropagate_group<Wanted::weight, dense, full>(b, taps, count, lanes);
      else if (carried) backpropagate_group<Wanted::both_carried, dense, full>(b, taps, count, lanes);
      else backpropagate_group<Wanted::both, dense, full>(b, taps, count, lanes);
      b.grad_output += taps * p.tap_step;
      b.weight += taps * p.weight_step;
      b.sum += taps * p.sum_step;
    }
  }
  if (carried)
    for (int64_t v = 0; v < count; ++v)
      store<full>(b.grad_input + v * (dense ? step : b.grad_pitch), load_bits<Vec<T>>(carry + v * step), lanes);
}

template <bool full, typename T>
DEPTHCONV_INLINE Vec<T> add_vectors(Vec<T> sum, const T* from, int64_t pitch, int64_t count, int lanes) {
  for (int64_t v = 0; v < count; ++v) sum += load<full>(from + v * pitch, lanes);
  return sum;
}

// Sums of rows: one input channel's, (K + 1) vectors for each of its filters, the last one for grad_bias.
template <typename T>
struct RowSums {
  Sum<T>* sum;
  double* total;  // null where they are not wanted
  int64_t count;  // vectors
  int64_t terms;  // added by a lane since the last flush
  DEPTHCONV_INLINE void add(int64_t more) {
    terms += more;
    if (terms >= flush_after) flush();
  }
  void flush() {
    for (int64_t k = 0; k < count; ++k) {
      double all = 0;
      for (int lane = 0; lane < lanes_of<T>; ++lane) all += sum[k * lanes_of<T> + lane];
      if (total) total[k] += all;
      store_bits(sum + k * lanes_of<T>, Vec<T>{});
    }
    terms = 0;
  }
};

// Sums of channels_last: `taps` rows of `channels`, a lane each, `width` apart (`total_width` in the totals).
template <typename T>
struct ChannelSums {
  Sum<T>* sum;
  double* total;
  int64_t taps, channels, width, total_width, terms;
  DEPTHCONV_INLINE void add(int64_t more) {
    terms += more;
    if (terms >= flush_after) flush();
  }
  void flush() {
    for (int64_t k = 0; k < taps; ++k)
      for (int64_t c = 0; c < channels; ++c) {
        if (total) total[k * total_width + c] += sum[k * width + c];
        sum[k * width + c] = 0;
      }
    terms = 0;
  }
};

// grad_input alone, one filter a channel: the forward loop over the reversed taps.
template <typename T>
DEPTHCONV_INLINE void backward_input_row(const BackwardJob& job, const Taps& t, const T* grad_output, const Sum<T>* taps,
                                         T* grad_input, int64_t n) {
  constexpr int lanes = lanes_of<T>;
  Convolution<T> c{grad_output, 0, t.row_step * job.grad_output.stride.h, taps + t.first_tap * lanes,
                   t.tap_step * lanes, t.count, Vec<T>{}, grad_input, 0};
  convolve_row(c, n);
}

// Rows [row_begin, row_end) of one input plane, and the share of grad_output rows that grad_bias sums here.
template <typename T>
void backward_plane(const BackwardJob& job, int64_t n, int64_t channel, int64_t row_begin, int64_t row_end,
                    const Sum<T>* taps, RowSums<T>& sums) {
  constexpr int lanes = lanes_of<T>;
  const Strides in = job.input.stride, out = job.grad_output.stride, grad = job.grad_input.stride;
  const int64_t m = job.multiplier, K = job.K, block = column_block<T>(job);
  const bool flat = job.flat && block >= job.W;
  const T* input = static_cast<const T*>(job.input.data) + n * in.n + channel * in.c;
  const T* grad_output = static_cast<const T*>(job.grad_output.data) + n * out.n + channel * m * out.c;
  const T* all_grad_output = static_cast<const T*>(job.all_grad_output) + n * out.n + channel * m * out.c;
  T* grad_input = job.grad_input.data
                      ? static_cast<T*>(job.grad_input.data) + n * grad.n + channel * grad.c : nullptr;
  const bool sums_wanted = job.want_weight || (grad_input && m > 1);
  const int64_t merge = greatest(4096 / greatest(job.W, 1), 1);
  for (int64_t column = 0; column < greatest(job.W, 1); column += block)
    for (int64_t i = row_begin, rows; i < row_end; i += rows) {
      const Taps t = taps_of_input(job, i);
      // Row i has all its taps: so have the next ones down to H_out - padding.
      rows = flat && t.count == K ? least(merge, least(row_end, job.H_out - job.padding) - i) : 1;
      const int64_t elements = rows == 1 ? least(block, job.W - column) : rows * job.W;
      const T* from = grad_output + t.first_row * out.h + column;
      T* to = grad_input ? grad_input + i * grad.h + column : nullptr;
      if (sums_wanted) {
        Progression<T> p{from, taps + t.first_tap * lanes, sums.sum + t.first_tap * lanes,
                         t.count, t.row_step * out.h, t.tap_step * lanes, t.tap_step * lanes,
                         m, out.c, K * lanes, (K + 1) * lanes};
        if (t.count == 1 && m > 1) {
          p.inner = m, p.tap_step = out.c, p.weight_step = K * lanes, p.sum_step = (K + 1) * lanes;
          p.outer = 1;
        }
        const T* x = input + i * in.h + column;
        for (int64_t at = 0; at < elements;) {
          const int64_t vectors = least((elements - at) / lanes, flush_after);
          const int rest = vectors ? 0 : static_cast<int>(elements - at);
          Backpropagation<T> b{};
          b.input = x + at;
          b.grad_input = to ? to + at : nullptr;
          if (vectors) backpropagate_all<true, true>(b, p, vectors, lanes);
          else backpropagate_all<true, false>(b, p, 1, rest);
          const int64_t step = vectors ? vectors * lanes : rest;
          p.grad_output += step;
          at += step;
          sums.add(vectors ? vectors : 1);
        }
      } else if (to) {
        backward_input_row(job, t, from, taps, to, elements);
      }
      if (!job.want_bias || column > 0) continue;
      const int64_t bias_begin = i * job.H_out / job.H, bias_end = (i + rows) * job.H_out / job.H;
      for (int64_t o = bias_begin; o < bias_end; ++o)
        for (int64_t at = 0; at < job.W_out;) {
          const int64_t vectors = least((job.W_out - at) / lanes, flush_after);
          const int rest = vectors ? 0 : static_cast<int>(job.W_out - at);
          for (int64_t j = 0; j < m; ++j) {
            Sum<T>* sum = sums.sum + (j * (K + 1) + K) * lanes;
            const T* dy = all_grad_output + j * out.c + o * out.h + at;
            const Vec<T> before = load_bits<Vec<T>>(sum);
            store_bits(sum, vectors ? add_vectors<true>(before, dy, lanes, vectors, lanes)
                                    : add_vectors<false>(before, dy, lanes, 1, rest));
          }
          at += vectors ? vectors * lanes : rest;
          sums.add(vectors ? vectors : 1);
        }
    }
}

template <typename T>
void backward_rows(const BackwardJob& job, int64_t begin, int64_t end, char* scratch) {
  constexpr int lanes = lanes_of<T>;
  const int64_t m = job.multiplier, K = job.K, per_channel = m * (K + 1);
  Sum<T>* taps = reinterpret_cast<Sum<T>*>(scratch);
  Sum<T>* all_sums = taps + m * K * lanes;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t part = task % job.row_chunks, group = task / job.row_chunks % job.channel_chunks;
    const int64_t batch = task / job.row_chunks / job.channel_chunks;
    const int64_t row_begin = part * job.row_chunk, row_end = least(job.H, row_begin + job.row_chunk);
    const int64_t c_begin = group * job.channel_chunk, c_end = least(job.C, c_begin + job.channel_chunk);
    const int64_t n_begin = batch * job.batch_chunk, n_end = least(job.N, n_begin + job.batch_chunk);
    const int64_t vectors = (c_end - c_begin) * per_channel;
    for (int64_t v = 0; v < vectors; ++v) store_bits(all_sums + v * lanes, Vec<T>{});
    double* total = nullptr;
    if (job.partial) {
      total = job.partial + (batch * job.row_chunks + part) * job.partial_size + c_begin * per_channel;
      for (int64_t v = 0; v < vectors; ++v) total[v] = 0;
    }
    int64_t terms = 0;  // the same for every channel: their planes are alike
    for (int64_t n = n_begin; n < n_end; ++n) {
      int64_t terms_after = terms;
      for (int64_t c = c_begin; c < c_end; ++c) {
        splat_weights<T>(static_cast<const Sum<T>*>(job.weight) + c * m * K, m * K, taps);
        const int64_t at = (c - c_begin) * per_channel;
        RowSums<T> sums{all_sums + at * lanes, total ? total + at : nullptr, per_channel, terms};
        backward_plane<T>(job, n, c, row_begin, row_end, taps, sums);
        terms_after = sums.terms;
      }
      terms = terms_after;
    }
    RowSums<T>{all_sums, total, vectors, 0}.flush();
  }
}

template <typename T>
void backward_channels_last(const BackwardJob& job, int64_t begin, int64_t end, char* scratch) {
  constexpr int lanes = lanes_of<T>, pixels = 16;
  const Strides in = job.input.stride, out = job.grad_output.stride, grad = job.grad_input.stride;
  const int64_t K = job.K, width = (job.channel_chunk + lanes - 1) / lanes * lanes;  // of one tap's sums
  Sum<T>* sum = reinterpret_cast<Sum<T>*>(scratch);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t part = task % job.row_chunks, group = task / job.row_chunks % job.channel_chunks;
    const int64_t batch = task / job.row_chunks / job.channel_chunks;
    const int64_t row_begin = part * job.row_chunk, row_end = least(job.H, row_begin + job.row_chunk);
    const int64_t c_begin = group * job.channel_chunk, channels = least(job.C - c_begin, job.channel_chunk);
    const int64_t n_begin = batch * job.batch_chunk, n_end = least(job.N, n_begin + job.batch_chunk);
    const Sum<T>* weight = static_cast<const Sum<T>*>(job.weight) + c_begin;
    double* total = job.partial ? job.partial + (batch * job.row_chunks + part) * job.partial_size + c_begin : nullptr;
    for (int64_t k = 0; k <= K; ++k) {
      for (int64_t c = 0; c < width; ++c) sum[k * width + c] = 0;
      for (int64_t c = 0; total && c < channels; ++c) total[k * job.padded_channels + c] = 0;
    }
    ChannelSums<T> sums{sum, total, K + 1, channels, width, job.padded_channels, 0};
    for (int64_t n = n_begin; n < n_end; ++n)
      for (int64_t i = row_begin; i < row_end; ++i) {
        const Taps t = taps_of_input(job, i);
        const T* input = static_cast<const T*>(job.input.data) + n * in.n + i * in.h + c_begin;
        const T* grad_output = static_cast<const T*>(job.grad_output.data) + n * out.n + t.first_row * out.h + c_begin;
        T* grad_input = job.grad_input.data
                            ? static_cast<T*>(job.grad_input.data) + n * grad.n + i * grad.h + c_begin : nullptr;
        for (int64_t w = 0; w < (job.want_weight || grad_input ? job.W : 0); w += pixels) {
          const int64_t count = least(pixels, job.W - w);
          for (int64_t c = 0; c < channels; c += lanes) {
            Backpropagation<T> b{};
            b.input = input + w * in.w + c;
            b.input_pitch = in.w;
            b.output_pitch = out.w;
            b.grad_input = grad_input ? grad_input + w * grad.w + c : nullptr;
            b.grad_pitch = grad.w;
            const Progression<T> p{grad_output + w * out.w + c, weight + t.first_tap * job.padded_channels + c,
                                   sum + t.first_tap * width + c, t.count, t.row_step * out.h,
                                   t.tap_step * job.padded_channels, t.tap_step * width, 1, 0, 0, 0};
            if (c + lanes <= channels) backpropagate_all<false, true>(b, p, count, lanes);
            else backpropagate_all<false, false>(b, p, count, static_cast<int>(channels - c));
          }
          sums.add(count);
        }
        if (!job.want_bias) continue;
        const T* all_grad_output = static_cast<const T*>(job.all_grad_output) + n * out.n + c_begin;
        for (int64_t o = i * job.H_out / job.H; o < (i + 1) * job.H_out / job.H; ++o)
          for (int64_t w = 0; w < job.W_out; w += pixels) {
            const int64_t count = least(pixels, job.W_out - w);
            for (int64_t c = 0; c < channels; c += lanes) {
              Sum<T>* to = sum + K * width + c;
              const T* dy = all_grad_output + o * out.h + w * out.w + c;
              const Vec<T> before = load_bits<Vec<T>>(to);
              store_bits(to, c + lanes <= channels
                                 ? add_vectors<true>(before, dy, out.w, count, lanes)
                                 : add_vectors<false>(before, dy, out.w, count, static_cast<int>(channels - c)));
            }
            sums.add(count);
          }
      }
    sums.flush();
  }
}

template <typename T>
void backward_any(const BackwardJob& job, int64_t begin, int64_t end, char* scratch) {
  job.channels_last ? backward_channels_last<T>(job, begin, end, scratch) : backward_rows<T>(job, begin, end, scratch);
}
