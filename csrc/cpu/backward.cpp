// Backward on the CPU: one pass over grad_output and input makes every gradient asked for. Tasks add their sums for
// grad_weight and grad_bias in double into slices of their own, which are then added in the order of the tasks.
#include "host.h"

namespace depthconv::cpu {

namespace {

void zero_all(const Operand& operand, const Geometry& g, Dtype dtype) {  // of a dense tensor
  const int64_t bytes = g.N * g.C * g.H * g.W * element_size(dtype), piece = 1 << 20;
  parallel(quotient_up(bytes, piece), 1, [&](int64_t begin, int64_t end) {
    std::memset(static_cast<char*>(operand.data) + begin * piece, 0, std::min(bytes, end * piece) - begin * piece);
  });
}

// Sizes alone decide the split, so that every machine adds in the same order whatever its threads.
void split(BackwardJob& job, int64_t sums) {
  const int64_t plane_work = job.H * job.W * job.K * job.multiplier, images = job.N;
  // Channels together: as many as a task's work asks for, while their sums fit a part of the L2 cache.
  if (job.channels_last) {
    const int64_t fit = (int64_t{1} << 16) / (sums * 4 * most_lanes);
    job.channel_chunk = job.merged_pixels > 1 ? job.padded_channels
                                              : std::min(job.padded_channels, std::max<int64_t>(fit, 1) * most_lanes);
  } else {
    const int64_t fit = std::max<int64_t>((int64_t{1} << 17) / (sums * 12 * 8), 1);
    job.channel_chunk = std::min({job.C, fit, quotient_up(task_work, std::max<int64_t>(plane_work, 1))});
  }
  job.channel_chunks = quotient_up(job.C, job.channel_chunk);
  const int64_t group_work = std::max<int64_t>(plane_work * std::min(job.channel_chunk, job.C), 1);
  int64_t batches = std::min(images, quotient_up(wanted_tasks, job.channel_chunks));
  batches = std::max<int64_t>(std::min(batches, images * group_work / (4 * task_work)), 1);
  job.batch_chunk = quotient_up(images, batches);
  job.batch_chunks = quotient_up(images, job.batch_chunk);
  // Rows apart only where there are few planes: a run of rows reads (K - 1) * dilation rows of its neighbours.
  int64_t parts = quotient_up(wanted_tasks, job.channel_chunks * job.batch_chunks);
  if (job.padded_planes) parts = 1;
  parts = std::min({parts, job.batch_chunk * group_work / (4 * task_work), job.H / ((job.K - 1) * job.dilation + 1)});
  job.row_chunk = quotient_up(job.H, std::max<int64_t>(parts, 1));
  job.row_chunks = quotient_up(job.H, job.row_chunk);
}

}  // namespace

void backward(const BackwardArguments& arguments) {
  const Geometry& g = arguments.geometry;
  const Dtype dtype = arguments.dtype;
  const Columns columns = absorb_width(g);
  const int64_t filters = g.C_out();

  BackwardJob job;
  job.N = g.N, job.C = g.C, job.multiplier = g.multiplier, job.K = g.K, job.H = g.H, job.H_out = g.H_out;
  job.W = columns.count(), job.W_out = g.W_out;
  job.stride = g.stride.h, job.padding = g.padding.h, job.dilation = g.dilation.h;
  job.want_weight = arguments.grad_weight.data;
  job.want_bias = arguments.grad_bias.data;

  // Every layout follows grad_input's, or the input's where grad_input is not wanted.
  const Strides leading = arguments.grad_input.data ? arguments.grad_input.stride : arguments.input.stride;
  job.channels_last = g.multiplier == 1 && g.C > 1 && leading.c == 1 && !(g.W > 1 && leading.w == 1);
  std::unique_ptr<char[]> output_copy, input_copy, grad_copy;
  const Extent in{g.N, g.C, g.H, job.W}, out{g.N, filters, g.H_out, g.W_out};
  job.grad_output = arguments.grad_output;
  if (!suits(job.grad_output, out, job.channels_last))
    job.grad_output = dense_copy(job.grad_output, out, dtype, job.channels_last, &output_copy);
  job.all_grad_output = job.grad_output.data;
  job.grad_output.data = advance(job.grad_output.data, dtype, columns.begin * job.grad_output.stride.w);
  job.input = arguments.input;
  job.input.data = advance(job.input.data, dtype, columns.first * job.input.stride.w);
  job.input.stride.w *= columns.step;
  if (job.want_weight && !suits(job.input, in, job.channels_last))
    job.input = dense_copy(job.input, in, dtype, job.channels_last, &input_copy);
  Operand wanted = arguments.grad_input;
  if (wanted.data) {
    prefer_huge_pages(wanted.data, g.N * g.C * g.H * g.W * element_size(dtype));
    if (columns.count() < g.W) zero_all(wanted, g, dtype);  // some columns reach no output
    wanted.data = advance(wanted.data, dtype, columns.first * wanted.stride.w);
    wanted.stride.w *= columns.step;
    job.grad_input = wanted;
    if (!suits(wanted, in, job.channels_last)) {
      grad_copy = fresh_memory(in.N * in.C * in.H * in.W * element_size(dtype));
      job.grad_input = dense(grad_copy.get(), in, job.channels_last);
    }
  }
  const auto follows = [&](const Operand& operand, int64_t rows) {
    return !operand.data || operand.stride.h == job.W || rows == 1;
  };
  job.flat = job.stride == 1 && job.W > 0 && follows(job.grad_output, g.H_out) && follows(job.input, g.H) &&
             follows(job.grad_input, g.H);

  const auto without_gaps = [&](const Operand& operand) { return !operand.data || operand.stride.w == g.C; };
  if (job.channels_last && without_gaps(job.grad_output) && (!job.want_weight || without_gaps(job.input)) &&
      without_gaps(job.grad_input))
    job.merged_pixels = pixels_to_merge(g.C, job.W);
  job.padded_channels = padded_channels(g.C * job.merged_pixels);
  const int64_t taps_size = (job.channels_last ? job.padded_channels : filters) * g.K;
  const std::unique_ptr<char[]> weight(new char[taps_size * sum_size(dtype)]);
  convert(g, dtype, job, arguments.weight, g.K, weight.get());
  job.weight = weight.get();

  const int64_t zero_rows = (g.K - 1) * job.dilation - job.padding;
  const Kernels& set = kernels();
  const int64_t lanes = set.vector_bytes / sum_size(dtype);
  const int64_t per_channel = (g.K + 1) * g.multiplier;  // sums
  const int64_t size =
      quotient_up((std::max(g.H_out + zero_rows, g.H + (g.K - 1) * job.dilation)) * job.W, most_lanes) * most_lanes +
      4 * most_lanes;
  if (job.flat && !job.channels_last && g.multiplier == 1 && job.W == g.W_out && zero_rows >= 0 &&
      size * sum_size(dtype) <= (8 << 10) && all_finite(dtype, weight.get(), taps_size)) {
    job.padded_size = size;
    job.padded_planes = std::clamp<int64_t>((16 << 10) / (size * sum_size(dtype)), 1, most_padded_planes);
  }
  split(job, per_channel);
  job.partial_size = (job.channels_last ? job.padded_channels : filters) * (g.K + 1);
  std::unique_ptr<double[]> partial;
  if (job.want_weight || job.want_bias) {
    partial.reset(new double[job.batch_chunks * job.row_chunks * job.partial_size]);
    job.partial = partial.get();
  }
  const size_t scratch_bytes = job.channels_last ? job.channel_chunk * per_channel * sum_size(dtype)
                                                 : (job.channel_chunk + 1) * per_channel * set.vector_bytes +
                                                       job.channel_chunk * per_channel * lanes * sizeof(double) +
                                                       job.padded_planes * job.padded_size * sum_size(dtype);
  const int64_t work = g.N * g.C * g.H * job.W * g.K * g.multiplier / job.tasks();
  const auto run = set.backward[static_cast<int>(dtype)];
  parallel_with_scratch(job.tasks(), task_work / std::max<int64_t>(work, 1), scratch_bytes,
                        [&](int64_t begin, int64_t end, char* scratch) { run(job, begin, end, scratch); });
  if (grad_copy) copy(wanted, job.grad_input, in, dtype);

  if (!job.partial) return;
  const int64_t slices = job.batch_chunks * job.row_chunks;
  const int64_t filter_step = job.channels_last ? 1 : g.K + 1, tap_step = job.channels_last ? job.padded_channels : 1;
  parallel(filters, task_work / (slices * (g.K + 1)), [&](int64_t begin, int64_t end) {
    for (int64_t co = begin; co < end; ++co)
      for (int64_t k = job.want_weight ? 0 : g.K; k < g.K + job.want_bias; ++k) {
        double sum = 0;
        for (int64_t s = 0; s < slices; ++s)
          for (int64_t pixel = 0; pixel < job.merged_pixels; ++pixel)
            sum += job.partial[s * job.partial_size + (pixel * g.C + co) * filter_step + k * tap_step];
        const Filters& weight = arguments.grad_weight;
        if (k < g.K) store_value(weight.data, dtype, co * weight.filter + k * weight.tap, sum);
        else store_value(arguments.grad_bias.data, dtype, co * arguments.grad_bias.step, sum);
      }
  });
}

}  // namespace depthconv::cpu
