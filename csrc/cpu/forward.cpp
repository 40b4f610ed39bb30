// Forward on the CPU: fills the columns that read padding alone, then convolves the others.
#include "host.h"

namespace depthconv::cpu {

namespace {

// Output columns outside [begin, end) hold the bias.
template <typename Unit>
void fill_padding(const ForwardArguments& arguments, const Columns& columns, const Unit* bias) {
  const Geometry& g = arguments.geometry;
  const Strides stride = arguments.output.stride;
  parallel(g.N * g.C_out(), task_work / std::max<int64_t>(g.H_out * (g.W_out - columns.count()), 1),
           [&](int64_t first, int64_t last) {
    for (int64_t plane = first; plane < last; ++plane) {
      const int64_t n = plane / g.C_out(), co = plane % g.C_out();
      Unit* out = static_cast<Unit*>(arguments.output.data) + n * stride.n + co * stride.c;
      for (int64_t h = 0; h < g.H_out; ++h)
        for (int64_t w = 0; w < g.W_out; ++w) {
          if (w == columns.begin && columns.count() > 0) w = columns.end;
          if (w < g.W_out) out[h * stride.h + w * stride.w] = bias ? bias[co * arguments.bias.step] : Unit(0);
        }
    }
  });
}

}  // namespace

void forward(const ForwardArguments& arguments) {
  const Geometry& g = arguments.geometry;
  const Dtype dtype = arguments.dtype;
  const Columns columns = absorb_width(g);
  prefer_huge_pages(arguments.output.data, g.N * g.C_out() * g.H_out * g.W_out * element_size(dtype));
  if (columns.count() < g.W_out) {
    switch (element_size(dtype)) {
      case 2: fill_padding(arguments, columns, static_cast<const uint16_t*>(arguments.bias.data)); break;
      case 4: fill_padding(arguments, columns, static_cast<const uint32_t*>(arguments.bias.data)); break;
      default: fill_padding(arguments, columns, static_cast<const uint64_t*>(arguments.bias.data));
    }
    if (columns.count() == 0) return;
  }

  ForwardJob job;
  job.N = g.N, job.C = g.C, job.multiplier = g.multiplier, job.K = g.K, job.H = g.H, job.H_out = g.H_out;
  job.W = columns.count();
  job.stride = g.stride.h, job.padding = g.padding.h, job.dilation = g.dilation.h;
  // Taps that no row reaches are no part of the job.
  const int64_t first_tap = quotient_up(std::max<int64_t>(g.padding.h - (g.H_out - 1) * g.stride.h, 0), g.dilation.h);
  const int64_t last_tap = std::min(g.K, quotient_up(g.H + g.padding.h, g.dilation.h));
  if (first_tap < last_tap) job.K = last_tap - first_tap, job.padding -= first_tap * job.dilation;
  Filters weight = arguments.weight;
  weight.data = advance(weight.data, dtype, (job.K < g.K ? first_tap : 0) * weight.tap);
  job.input = arguments.input;
  job.input.data = advance(job.input.data, dtype, columns.first * job.input.stride.w);
  job.input.stride.w *= columns.step;
  job.output = arguments.output;
  job.output.data = advance(job.output.data, dtype, columns.begin * job.output.stride.w);

  const bool output_last = job.output.stride.c == 1 && g.C_out() > 1 && !(g.W_out > 1 && job.output.stride.w == 1);
  job.channels_last = output_last && g.multiplier == 1;
  const Extent in{g.N, g.C, g.H, job.W}, out{g.N, g.C_out(), g.H_out, job.W};
  std::unique_ptr<char[]> input_copy, output_copy;
  if (!suits(job.input, in, job.channels_last))
    job.input = dense_copy(job.input, in, dtype, job.channels_last, &input_copy);
  const Operand wanted = job.output;
  if (output_last && !job.channels_last) {  // a channel multiplier: rows, then a transpose
    output_copy = fresh_memory(out.N * out.C * out.H * out.W * element_size(dtype));
    job.output = dense(output_copy.get(), out, false);
  }
  job.flat = job.stride == 1 && (job.input.stride.h == job.W || g.H == 1) &&
             (job.output.stride.h == job.W || g.H_out == 1);

  const int64_t filters = g.C_out();
  if (job.channels_last && job.input.stride.w == g.C && job.output.stride.w == g.C)
    job.merged_pixels = pixels_to_merge(g.C, job.W);
  const int64_t width = padded_channels(filters * job.merged_pixels);
  job.padded_channels = width;
  const int64_t taps_size = (job.channels_last ? width : filters) * job.K;
  const std::unique_ptr<char[]> sums(new char[(taps_size + width) * sum_size(dtype)]);
  convert(g, dtype, job, weight, job.K, sums.get());
  char* bias = sums.get() + taps_size * sum_size(dtype);
  convert(g, dtype, job, {arguments.bias.data, arguments.bias.step, 0}, 1, bias);
  job.weight = sums.get();
  job.bias = bias;

  // A task is a run of rows of one plane (of one image for channels_last).
  job.filters_together = !job.channels_last && g.multiplier > 1 && g.H_out < 4;
  const int64_t task_filters = job.filters_together ? g.multiplier : 1;
  const int64_t planes = job.channels_last ? g.N : g.N * filters / task_filters;
  const int64_t row_work = job.W * job.K * (job.channels_last ? g.C : task_filters);
  const Kernels& set = kernels();
  const int64_t size =
      quotient_up((std::max(job.H_out + (job.K - 1) * job.dilation, g.H + job.padding) + 8) * job.W, most_lanes) *
          most_lanes +
      8 * most_lanes;
  if (job.flat && job.padding >= 0 && !job.channels_last && !job.filters_together &&
      size * sum_size(dtype) <= (24 << 10) && all_finite(dtype, sums.get(), taps_size)) {
    job.padded_size = size;
    job.padded_planes = std::clamp<int64_t>((16 << 10) / (size * sum_size(dtype)), 1, most_padded_planes);
  }
  const int64_t parts =
      job.padded_planes ? 1 : std::min(quotient_up(wanted_tasks, planes), g.H_out * row_work / task_work);
  job.row_chunk = quotient_up(g.H_out, std::max<int64_t>(parts, 1));
  job.row_chunks = quotient_up(g.H_out, job.row_chunk);
  const auto run = set.forward[static_cast<int>(dtype)];
  parallel_with_scratch(planes * job.row_chunks, task_work / std::max<int64_t>(job.row_chunk * row_work, 1),
                        job.padded_planes   ? job.padded_planes * size * sum_size(dtype)
                        : job.channels_last ? 0
                                            : task_filters * (job.K + 1) * set.vector_bytes,
                        [&](int64_t begin, int64_t end, char* scratch) { run(job, begin, end, scratch); });
  if (output_copy) copy(wanted, job.output, out, dtype);
}

}  // namespace depthconv::cpu
