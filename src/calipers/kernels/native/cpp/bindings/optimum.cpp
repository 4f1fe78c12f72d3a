// The best of the scales that can be stored, and of all scales.
#include "common.h"
#include "../power.h"
#include "../sweep.h"

namespace calipers {
namespace {

// What both searches of scales are told: pieces and their extrema, the windows of codes, five numbers
// each, and places for the scales, the windows and the errors of the best.
struct ScaleSearch {
  Tensor values;
  std::optional<Tensor> weights;
  Array<const float> low, high, windows;
  Array<float> best;
  Array<std::int32_t> window;
  Array<double> errors;
};

std::vector<Window> windows_of(const Array<const float>& windows) {
  if (windows.ndim() != 2 || windows.shape(1) != 5 || !windows.size())
    throw nb::value_error("Windows must be rows of five numbers.");
  std::vector<Window> made;
  for (std::size_t i = 0; i < windows.size(); i += 5) {
    const float* w = windows.data() + i;
    made.push_back({w[0], w[1], w[2], w[3], w[4]});
  }
  return made;
}

template <class Job> void set_search(Job& job, const ScaleSearch& search, const std::vector<Window>& windows) {
  job.values = pieces_of(search.values);
  job.weights = weights_of(search.weights, search.values);
  const std::int64_t pieces = job.values.count();
  expect(search.low.size(), pieces, "low");
  expect(search.high.size(), pieces, "high");
  job.kept = static_cast<std::int64_t>(search.best.size()) / pieces;
  if (!job.kept) throw nb::value_error("best must have a place for each piece.");
  expect(search.best.size(), pieces * job.kept, "best");
  expect(search.window.size(), pieces * job.kept, "window");
  expect(search.errors.size(), pieces * job.kept, "errors");
  job.cut = cut_of_whole(job.values, kTaskValues / 4);
  job.low = search.low.data();
  job.high = search.high.data();
  job.windows = windows.data();
  job.window_count = static_cast<std::int64_t>(windows.size());
  job.best = search.best.data();
  job.window = search.window.data();
  job.errors = search.errors.data();
}

// Whether no octave has more scales than are tried one by one.
bool are_few(const std::vector<float>& ascending) {
  constexpr std::size_t most = 16;
  for (std::size_t i = 0; i + most < ascending.size(); i++)
    if (ascending[i + most] < 2 * ascending[i]) return false;
  return true;
}

void optimum(const ScaleSearch& search, Array<const float> storable, float halvable, float most,
             const std::string& grid, bool shifted, double norm, int threads) {
  OptimumJob job{};
  job.most = most;
  const std::vector<Window> made = windows_of(search.windows);
  set_search(job, search, made);
  // Vectors are loaded from any scale on.
  std::vector<float> padded(storable.data(), storable.data() + storable.size());
  const bool few = are_few(padded);
  padded.insert(padded.end(), kLanes, 0.f);
  job.storable = padded.data();
  job.scales = static_cast<std::int64_t>(storable.size());
  if (!job.scales) throw nb::value_error("There must be a scale to choose.");
  job.halvable = halvable;
  job.shifted = shifted;
  job.grid = grid_of(grid, shifted);
  if (shifted && kGrids[job.grid].rounding == Rounding::to_integers)
    throw nb::value_error("The zero points of integers move their windows.");
  job.windows_have_floor = made.size() > 1 && !shifted;
  job.in_lanes = few && !shifted && made.size() <= 2 && job.kept <= kMostKeptLanes && job.values.is_short();
  job.norm = static_cast<float>(norm);
  job.power = power_of(norm);
  run(chosen().optimum, job, threads, 256 * job.values.count() * job.values.length());
}

void sweep(const ScaleSearch& search, Array<const float> magnitudes, int threads) {
  SweepJob job{};
  job.kernels = &chosen().sweep;
  const std::vector<Window> made = windows_of(search.windows);
  set_search(job, search, made);
  job.magnitudes = magnitudes.data();
  job.magnitude_count = static_cast<std::int64_t>(magnitudes.size());
  if (job.magnitude_count < 2) throw nb::value_error("magnitudes must be zero and others.");
  run_released(job.cut.tasks(), threads, 256 * job.values.count() * job.values.length(), 0,
               [&](std::int64_t task, std::byte*) { sweep_task(job, task); });
}

}  // namespace

void bind_optimum(nb::module_& m) {
  nb::class_<ScaleSearch>(m, "ScaleSearch")
      .def(nb::init<Tensor, std::optional<Tensor>, Array<const float>, Array<const float>,
                    Array<const float>, Array<float>, Array<std::int32_t>, Array<double>>(),
           nb::kw_only(), "values"_a, "weights"_a.none(), "low"_a.noconvert(), "high"_a.noconvert(),
           "windows"_a.noconvert(), "best"_a.noconvert(), "window"_a.noconvert(), "errors"_a.noconvert());
  m.def("optimum", &optimum, "search"_a, nb::kw_only(), "storable"_a.noconvert(), "halvable"_a, "most"_a,
        "grid"_a, "shifted"_a, "norm"_a, "threads"_a);
  m.def("sweep", &sweep, "search"_a, nb::kw_only(), "magnitudes"_a.noconvert(), "threads"_a);
}

}  // namespace calipers
