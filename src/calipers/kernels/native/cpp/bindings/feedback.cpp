// Error feedback, and descent from it.
#include <numeric>

#include "common.h"

namespace calipers {
namespace {

constexpr std::int64_t kRowsPerTask = 4 * kLanes;

// What the values of a matrix are rounded to: scales and zeros, (rows or 1, groups), the group of each
// column, and the numbers of the format.
struct Rounder {
  Array<const float> scales;
  Optional<const float> zeros;
  Array<const std::int64_t> groups;
  Numbers numbers;

  Scaling of(std::int64_t rows, std::int64_t columns) const {
    if (scales.ndim() != 2 || (zeros && zeros->ndim() != 2))
      throw nb::value_error("Scales and zeros must be matrices.");
    const std::int64_t count = static_cast<std::int64_t>(scales.shape(1));
    const bool is_shared = scales.shape(0) == 1;
    expect(scales.size(), (is_shared ? 1 : rows) * count, "scales");
    if (zeros) expect(zeros->size(), scales.size(), "zeros");
    expect(groups.size(), columns, "groups");
    for (std::int64_t i = 0; i < columns; i++)
      if (groups.data()[i] < 0 || groups.data()[i] >= count)
        throw nb::value_error("groups must number the columns of scales.");
    return {scales.data(), zeros ? zeros->data() : nullptr, is_shared ? 0 : count, groups.data(),
            numbers.grid, numbers.lowest, numbers.highest};
  }
};

void expect_matrix(const Array<float>& matrix, const char* what) {
  if (matrix.ndim() != 2 || !matrix.size())
    throw nb::value_error((std::string(what) + " must be a matrix.").c_str());
}

void feed_back(Array<float> adjusted, Array<const float> target, Array<const float> factor,
               const Rounder& rounder, std::int64_t begin, Array<float> result, Array<float> errors,
               int threads) {
  expect_matrix(adjusted, "adjusted");
  FeedbackJob job{};
  job.rows = static_cast<std::int64_t>(adjusted.shape(0));
  job.columns = static_cast<std::int64_t>(adjusted.shape(1));
  job.pitch = static_cast<std::int64_t>(rounder.groups.size());
  if (begin < 0 || begin > job.pitch - job.columns) throw nb::value_error("The block is out of reach.");
  expect(target.size(), job.rows * job.pitch, "target");
  expect(result.size(), job.rows * job.pitch, "result");
  expect(errors.size(), job.rows * job.pitch, "errors");
  expect(factor.size(), job.pitch * job.pitch, "factor");
  job.scaling = rounder.of(job.rows, job.pitch);
  job.scaling.groups += begin;
  job.adjusted = adjusted.data();
  job.target = target.data() + begin;
  job.factor = factor.data() + begin * (job.pitch + 1);
  job.result = result.data() + begin;
  job.errors = errors.data() + begin;
  job.cut = {kRowsPerTask, 1, divide_up(job.rows, kRowsPerTask), 1};
  run(chosen().feedback, job, threads, 8 * job.rows * job.columns);
}

std::int64_t descend(Array<float> values, Array<float> pulls, Array<const float> hessian,
                     const Rounder& rounder, std::int64_t sweeps, std::int64_t block, float least_gain,
                     int threads) {
  expect_matrix(values, "values");
  DescentJob job{};
  job.rows = static_cast<std::int64_t>(values.shape(0));
  job.columns = static_cast<std::int64_t>(values.shape(1));
  expect(pulls.size(), job.rows * job.columns, "pulls");
  expect(hessian.size(), job.columns * job.columns, "hessian");
  job.scaling = rounder.of(job.rows, job.columns);
  job.sweeps = sweeps;
  job.block = std::clamp<std::int64_t>(block, 1, job.columns);
  job.least_gain = least_gain;
  job.hessian = hessian.data();
  job.values = values.data();
  job.pulls = pulls.data();
  // The more rows a task has, the less often the Hessian is read.
  const std::int64_t rows = std::clamp<std::int64_t>(job.rows / 16, 1, 256);
  job.cut.pieces_per_run = divide_up(rows, 4 * kLanes) * 4 * kLanes;
  job.cut.positions_per_chunk = job.cut.chunks = 1;
  job.cut.runs = divide_up(job.rows, job.cut.pieces_per_run);
  std::vector<std::int64_t> changed(job.cut.tasks());
  job.changed = changed.data();
  run(chosen().descent, job, threads, 16 * job.rows * job.columns);
  return std::accumulate(changed.begin(), changed.end(), std::int64_t{0});
}

}  // namespace

void bind_feedback(nb::module_& m) {
  nb::class_<Rounder>(m, "Rounder")
      .def(nb::init<Array<const float>, Optional<const float>, Array<const std::int64_t>, Numbers>(),
           nb::kw_only(), "scales"_a.noconvert(), "zeros"_a.noconvert().none(), "groups"_a.noconvert(),
           "numbers"_a);
  m.def("feed_back", &feed_back, nb::kw_only(), "adjusted"_a.noconvert(), "target"_a.noconvert(),
        "factor"_a.noconvert(), "rounder"_a, "begin"_a, "result"_a.noconvert(), "errors"_a.noconvert(),
        "threads"_a);
  m.def("descend", &descend, nb::kw_only(), "values"_a.noconvert(), "pulls"_a.noconvert(),
        "hessian"_a.noconvert(), "rounder"_a, "sweeps"_a, "block"_a, "least_gain"_a, "threads"_a);
}

}  // namespace calipers
