// Quantized values and their errors.
#include "common.h"
#include "../power.h"

namespace calipers {
namespace {

std::int64_t quantize_chunks(const Tensor& values) { return cut_of(pieces_of(values)).chunks; }

void quantize(const Tensor& values, const std::optional<Tensor>& weights, Array<const float> scales,
              const Optional<const float>& zero_points, const std::string& working, const Numbers& numbers,
              double norm, const std::optional<AnyArray>& output, Array<double> errors, int threads) {
  QuantizeJob job{};
  job.values = pieces_of(values);
  job.weights = weights_of(weights, values);
  const std::int64_t pieces = job.values.count();
  job.cut = cut_of(job.values);
  expect(scales.size(), pieces, "scales");
  expect(errors.size(), job.cut.chunks * pieces, "errors");
  job.scales = scales.data();
  job.zero_points = data_or_null(zero_points, pieces, "zero_points");
  job.working = dtype_named(working);
  set_numbers(job, numbers);
  job.norm = static_cast<float>(norm);
  job.power = power_of(norm);
  if (output) {
    expect(output->size(), pieces * job.values.length(), "output");
    if (output->dtype() != values.dtype())
      throw nb::type_error("output must have the values' dtype.");
    job.output = static_cast<std::byte*>(output->data());
  }
  job.errors = errors.data();
  run(chosen().quantize, job, threads, pieces * job.values.length());
}

}  // namespace

void bind_quantize(nb::module_& m) {
  m.def("quantize_chunks", &quantize_chunks, "values"_a);
  m.def("quantize", &quantize, nb::kw_only(), "values"_a, "weights"_a.none(), "scales"_a.noconvert(),
        "zero_points"_a.noconvert().none(), "working"_a = "float32", "numbers"_a, "norm"_a,
        "output"_a.noconvert() = nb::none(), "errors"_a.noconvert(), "threads"_a);
}

}  // namespace calipers
