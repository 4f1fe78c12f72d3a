// The joint choice among candidates.
#include "common.h"

namespace calipers {
namespace {

// `own` and `across` are panels of the Hessian, as JointJob describes them.
void choose_candidates(const Tensor& values, Array<const float> scales, const Optional<const float>& zeros,
                     Array<const float> own, Array<const float> across, const Numbers& numbers,
                     std::int64_t rounds, Array<std::int64_t> choice, int threads) {
  JointJob job{};
  job.values = pieces_of(values);
  const Pieces& pieces = job.values;
  if (pieces.observations != 1 || pieces.rows != 1)
    throw nb::value_error("The pieces must be of one row each.");
  if (own.ndim() != 5 || !own.shape(0) || !own.shape(1))
    throw nb::value_error("The Hessian must come in panels.");
  const std::int64_t blocks = static_cast<std::int64_t>(own.shape(0));
  job.places = static_cast<std::int64_t>(own.shape(1));
  job.panels = divide_up(pieces.columns, kPanel);
  expect(blocks * job.places, pieces.grid_columns, "Hessian");
  expect(own.size(), pieces.grid_columns * job.length() * job.length(), "own");
  expect(across.size(), pieces.grid_columns * job.length() * job.places * pieces.columns, "across");
  job.candidates = static_cast<std::int64_t>(scales.size()) / pieces.count();
  if (!job.candidates) throw nb::value_error("There must be a candidate to choose.");
  expect(scales.size(), pieces.count() * job.candidates, "scales");
  expect(choice.size(), pieces.count(), "chosen");
  job.scales = scales.data();
  job.zeros = data_or_null(zeros, pieces.count() * job.candidates, "zeros");
  job.own = own.data();
  job.across = across.data();
  set_numbers(job, numbers);
  job.rounds = rounds;
  job.chosen = choice.data();
  job.cut = {kJointRows, 1, divide_up(pieces.grid_rows, kJointRows), blocks};
  run(chosen().joint, job, threads, 64 * pieces.count() * pieces.columns);
}

}  // namespace

void bind_joint(nb::module_& m) {
  m.def("choose_candidates", &choose_candidates, nb::kw_only(), "values"_a, "scales"_a.noconvert(),
        "zeros"_a.noconvert().none(), "own"_a.noconvert(), "across"_a.noconvert(), "numbers"_a, "rounds"_a,
        "choice"_a.noconvert(), "threads"_a);
}

}  // namespace calipers
