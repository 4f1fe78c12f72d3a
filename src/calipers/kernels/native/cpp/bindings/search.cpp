// The search among factors of ranges, and the ranges that were chosen.
#include "common.h"
#include "../power.h"

namespace calipers {
namespace {

constexpr std::int64_t kStage = 256;  // candidates of pieces that are cut, at a time
constexpr std::int64_t kRangesPerTask = 1 << 13;

// What the factors multiply, and they themselves.
struct RangeFactors {
  Array<const float> low, high, factors;
};

// Where scales come from, and whether codes are shifted by a zero point; tables, (candidates, pieces), if
// they are given.
struct ScaleChoice {
  std::string source;
  bool shifted;
  Optional<const float> scales, zero_points;
};

// What is known of each piece: the best of the candidates that are done, and its error, both of which are
// there only if patience can end; and which candidates improved any piece.
struct Progress {
  std::int64_t patience;
  Array<std::int32_t> best;
  Optional<std::int32_t> done;
  Optional<double> least;
  Array<std::uint8_t> improved;
};

ScaleSource scale_source_of(const std::string& name) {
  if (name == "plain") return ScaleSource::plain;
  if (name == "power_of_two") return ScaleSource::power_of_two;
  if (name == "given") return ScaleSource::given;
  throw nb::value_error("The scale must be plain, power_of_two or given.");
}

// Add up the chunks of each piece in their order, and choose.
void choose_from_chunks(const SearchJob& job) {
  const std::int64_t pieces = job.values.count(), tried = job.end - job.begin;
  for (std::int64_t piece = 0; piece < pieces; piece++) {
    double* sums = job.errors + piece * tried;
    for (std::int64_t chunk = 1; chunk < job.cut.chunks; chunk++)
      for (std::int64_t c = 0; c < tried; c++) sums[c] += sums[chunk * pieces * tried + c];
    choose(job, piece, sums, job.begin, job.end);
  }
}

// Try candidates until every piece has been through all that patience reaches. A piece that came
// early may not know how far that is, and goes on in another round.
void search_until_done(SearchJob& job, int threads) {
  const std::int64_t pieces = job.values.count();
  const auto done = [&] { return job.done ? *std::min_element(job.done, job.done + pieces) : 0; };
  for (job.begin = done(); job.begin < reach(job); job.begin = job.done ? done() : job.end) {
    job.end = job.errors ? std::min(reach(job), job.begin + kStage) : reach(job);
    run(chosen().search, job, threads, pieces * job.values.length() * (job.end - job.begin));
    if (job.errors) choose_from_chunks(job);
  }
}

void set_ranges(SearchJob& job, const RangeFactors& ranges) {
  job.candidates = static_cast<std::int64_t>(ranges.factors.size());
  expect(ranges.low.size(), job.values.count(), "low");
  expect(ranges.high.size(), job.values.count(), "high");
  job.low = ranges.low.data();
  job.high = ranges.high.data();
  job.factors = ranges.factors.data();
}

void set_scales(SearchJob& job, const ScaleChoice& scales) {
  const std::int64_t count = job.candidates * job.values.count();
  job.scale = scale_source_of(scales.source);
  job.shifted = scales.shifted;
  job.scales = data_or_null(scales.scales, count, "scales");
  job.zero_points = data_or_null(scales.zero_points, count, "zero_points");
  if (job.scale == ScaleSource::given && (!job.scales || (job.shifted && !job.zero_points)))
    throw nb::value_error("scales, and zero_points if codes are shifted, must be given.");
  if (job.shifted && !kGrids[job.grid].has_zero_points)
    throw nb::value_error("The grid has no zero points.");
}

void set_progress(SearchJob& job, const Progress& progress) {
  const std::int64_t pieces = job.values.count();
  expect(progress.best.size(), pieces, "best");
  expect(progress.improved.size(), job.candidates, "improved");
  job.patience = progress.patience;
  job.best = progress.best.data();
  job.done = data_or_null(progress.done, pieces, "done");
  job.least = data_or_null(progress.least, pieces, "least");
  job.improved = progress.improved.data();
  if (job.patience && !(job.done && job.least)) throw nb::value_error("patience needs done and least.");
  for (std::int64_t piece = 0; job.done && piece < pieces; piece++)
    if (job.done[piece] < 0 || job.done[piece] > job.candidates || (job.done[piece] && !job.least))
      throw nb::value_error("done must count candidates, whose errors are in least.");
}

void search(const Tensor& values, const std::optional<Tensor>& weights, const RangeFactors& ranges,
            const Numbers& numbers, double norm, const ScaleChoice& scales, const Progress& progress,
            int threads) {
  SearchJob job{};
  job.values = pieces_of(values);
  job.weights = weights_of(weights, values);
  set_ranges(job, ranges);
  set_numbers(job, numbers);
  set_scales(job, scales);
  set_progress(job, progress);
  job.norm = static_cast<float>(norm);
  job.power = power_of(norm);
  // A task takes a few milliseconds, however many candidates there are, so that Ctrl-C is heard.
  const std::int64_t many = std::max<std::int64_t>(64, job.candidates);
  job.cut = cut_of(job.values, std::max<std::int64_t>(kTile, 64 * kTaskValues / many));
  std::vector<double> errors;
  if (job.cut.chunks > 1)
    errors.resize(job.cut.chunks * job.values.count() * std::min(job.candidates, kStage));
  job.errors = errors.empty() ? nullptr : errors.data();
  search_until_done(job, threads);
}

// Multiply each range by the factor chosen for it, and round that to the dtype of `start` and `end`.
void scale_ranges(const RangeFactors& ranges, Array<const std::int32_t> best, const AnyArray& start,
                  const AnyArray& end, int threads) {
  RangesJob job{};
  job.pieces = static_cast<std::int64_t>(best.size());
  expect(ranges.low.size(), job.pieces, "low");
  expect(ranges.high.size(), job.pieces, "high");
  expect(start.size(), job.pieces, "start");
  expect(end.size(), job.pieces, "end");
  if (start.dtype() != end.dtype()) throw nb::type_error("start and end must have the same dtype.");
  for (std::int64_t i = 0; i < job.pieces; i++)
    if (best.data()[i] < 0 || best.data()[i] >= static_cast<std::int64_t>(ranges.factors.size()))
      throw nb::value_error("best must number the factors.");
  job.dtype = dtype_of(start.dtype());
  job.cut = {kRangesPerTask, 1, divide_up(job.pieces, kRangesPerTask), 1};
  job.low = ranges.low.data();
  job.high = ranges.high.data();
  job.factors = ranges.factors.data();
  job.best = best.data();
  job.start = static_cast<std::byte*>(start.data());
  job.end = static_cast<std::byte*>(end.data());
  run(chosen().ranges, job, threads, job.pieces);
}

}  // namespace

void bind_search(nb::module_& m) {
  nb::class_<RangeFactors>(m, "RangeFactors")
      .def(nb::init<Array<const float>, Array<const float>, Array<const float>>(), nb::kw_only(),
           "low"_a.noconvert(), "high"_a.noconvert(), "factors"_a.noconvert());
  nb::class_<ScaleChoice>(m, "ScaleChoice")
      .def(nb::init<std::string, bool, Optional<const float>, Optional<const float>>(), nb::kw_only(),
           "source"_a, "shifted"_a, "scales"_a.noconvert().none() = nb::none(),
           "zero_points"_a.noconvert().none() = nb::none());
  nb::class_<Progress>(m, "Progress")
      .def(nb::init<std::int64_t, Array<std::int32_t>, Optional<std::int32_t>, Optional<double>,
                    Array<std::uint8_t>>(),
           nb::kw_only(), "patience"_a, "best"_a.noconvert(), "done"_a.noconvert().none(),
           "least"_a.noconvert().none(), "improved"_a.noconvert());
  m.def("search", &search, nb::kw_only(), "values"_a, "weights"_a.none(), "ranges"_a, "numbers"_a, "norm"_a,
        "scales"_a, "progress"_a, "threads"_a);
  m.def("scale_ranges", &scale_ranges, nb::kw_only(), "ranges"_a, "best"_a.noconvert(),
        "start"_a.noconvert(), "end"_a.noconvert(), "threads"_a);
}

}  // namespace calipers
