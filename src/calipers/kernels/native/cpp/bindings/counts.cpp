// Counts of values.
#include "common.h"

namespace calipers {
namespace {

constexpr std::int64_t kCountedValues = 1 << 22;  // clearing and adding a table has its price

void count_values(const Tensor& values, Array<std::int64_t> counts, int threads) {
  CountsJob job{};
  job.values = pieces_of(values);
  job.cut = cut_of(job.values, kCountedValues);
  expect(counts.size(), job.values.count() * 65536, "counts");
  job.counts = counts.data();
  run(chosen().counts, job, threads, job.values.count() * job.values.length());
}

}  // namespace

void bind_counts(nb::module_& m) {
  m.def("count_values", &count_values, nb::kw_only(), "values"_a, "counts"_a.noconvert(), "threads"_a);
}

}  // namespace calipers
