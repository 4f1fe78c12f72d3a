// Packed codes of a weight, and what is lost by them.
#include "common.h"

namespace calipers {
namespace {

// The scales of blocks of so many rows and columns, and their zero points, or one for all.
struct Blocks {
  Array<const float> scales, zeros;
  std::int64_t height, width;
};

constexpr std::int64_t kMostTasks = 64;  // each has sums of its own for all columns

// Returns whether a NaN came up. Then the codes are worth nothing.
bool encode(const Tensor& values, const Blocks& blocks, const std::string& working, const Numbers& numbers,
            float offset, int bits, Optional<std::uint8_t> packed, Optional<float> output,
            Array<double> errors, int threads) {
  PackJob job{};
  job.values = pieces_of(values);
  const std::int64_t rows = job.values.rows, columns = job.values.columns;
  if (job.values.count() != 1 || job.values.observations != 1)
    throw nb::value_error("The tensor must be one matrix.");
  const std::int64_t height = blocks.height, width = blocks.width;
  const Array<const float>&scales = blocks.scales, &zeros = blocks.zeros;
  if (height < 1 || width < 1) throw nb::value_error("A scale must be that of some values.");
  if (bits < 1 || bits > 8) throw nb::value_error("Codes must have 1 to 8 bits.");
  job.height = height;
  job.width = width;
  job.scale_columns = divide_up(columns, width);
  expect(scales.size(), divide_up(rows, height) * job.scale_columns, "scales");
  job.zero_step = zeros.size() == 1 ? 0 : 1;
  if (job.zero_step) expect(zeros.size(), scales.size(), "zeros");
  job.scales = scales.data();
  job.zeros = zeros.data();
  job.working = dtype_named(working);
  set_numbers(job, numbers);
  job.offset = offset;
  job.bits = bits;
  if (packed) {
    job.row_bytes = static_cast<std::int64_t>(packed->size()) / rows;
    expect(packed->size(), rows * job.row_bytes, "packed");
    if (job.row_bytes * 8 < columns * bits) throw nb::value_error("packed is too small.");
    job.packed = packed->data();
  }
  job.output = data_or_null(output, rows * columns, "output");
  expect(errors.size(), columns, "errors");
  job.rows_together = std::max<std::int64_t>(1, kTaskValues / columns);
  const std::int64_t rows_per_task = std::max(job.rows_together, divide_up(rows, kMostTasks));
  job.cut = {rows_per_task, 1, divide_up(rows, rows_per_task), 1};
  std::vector<std::uint8_t> nans(job.cut.tasks());
  job.nans = nans.data();
  std::vector<double> sums(job.cut.tasks() * columns);
  job.errors = sums.data();
  run(chosen().pack, job, threads, rows * columns);
  std::fill_n(errors.data(), columns, 0.0);
  for (std::size_t i = 0; i < sums.size(); i++) errors.data()[i % columns] += sums[i];
  return std::any_of(nans.begin(), nans.end(), [](std::uint8_t one) { return one != 0; });
}

}  // namespace

void bind_packing(nb::module_& m) {
  nb::class_<Blocks>(m, "Blocks")
      .def(nb::init<Array<const float>, Array<const float>, std::int64_t, std::int64_t>(), nb::kw_only(),
           "scales"_a.noconvert(), "zeros"_a.noconvert(), "height"_a, "width"_a);
  m.def("encode", &encode, nb::kw_only(), "values"_a, "blocks"_a, "working"_a, "numbers"_a, "offset"_a,
        "bits"_a, "packed"_a.noconvert().none(), "output"_a.noconvert().none(), "errors"_a.noconvert(), "threads"_a);
}

}  // namespace calipers
