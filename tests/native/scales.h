// Kernels that choose scales.
#pragma once

#include "harness.h"
#include "power.h"
#include "sweep.h"

namespace check {

struct Candidate {
  double scale, zero;
};

// As compressed-tensors makes them from a range, step by step in the arithmetic of the dtype.
inline Candidate candidate_of(const SearchJob& job, const Numbers& numbers, std::int64_t piece,
                              std::int64_t c) {
  const std::int64_t at = c * job.values.count() + piece;
  if (job.scale == ScaleSource::given) return {job.scales[at], job.shifted ? job.zero_points[at] : 0};
  const auto in_dtype = [&](double x) { return rounded(job.values.dtype, x); };
  const double low = in_dtype(job.low[piece] * job.factors[c]);
  const double high = in_dtype(job.high[piece] * job.factors[c]);
  if (job.shifted) {
    const double scale = in_dtype(in_dtype(high - low) / (numbers.highest - numbers.lowest));
    return {scale, numbers.nearest(in_dtype(numbers.lowest - in_dtype(low / scale)))};
  }
  const double largest = std::max(-low, high), binade = std::ilogb(largest);
  if (job.scale == ScaleSource::plain)
    return {in_dtype(largest / ((numbers.highest - numbers.lowest) / 2)), 0};
  return {std::exp2(binade + (largest >= 1.75 * std::exp2(binade)) - std::ilogb(numbers.highest)), 0};
}

struct SearchCase {
  SearchJob job{};
  bool weighted = below(2);
  Numbers numbers = any_numbers(job.shifted = !below(3));
  Tensor values = any_tensor({{1, 3, 7, 1, 37}, {2, 2, 9, 3, 11}, {1, 2, 3, 1, 300}, {1, 1, 2, 9, 501}});
  Tensor weights = weights_for(values);
  bool in_chunks = !values.pieces.is_short() && below(2);
  std::int64_t pieces = values.count_pieces(), count = job.candidates = 13;
  std::vector<float> factors, scales, zeros;

  SearchCase() {
    for (int i = 0; i < 3; i++) values.set(0, i, one_of<double>({NAN, INFINITY, -INFINITY}));
    for (std::int64_t c = 0; c < count; c++) factors.push_back(1 - 0.05f * c);
    scales = floats(count * pieces, [&] { return std::exp(0.3 * normal()) * 3 / numbers.highest; });
    zeros = floats(count * pieces, [&] { return numbers.nearest(2 * normal()); });
    job.values = values.pieces, job.factors = factors.data();
    job.scales = scales.data(), job.zero_points = zeros.data();
    if (weighted) job.weights = weights.pieces;
    job.cut = in_chunks ? cut_into(pieces, 1, values.length(), 128) : whole(values);
    job.scale = job.shifted ? one_of({ScaleSource::plain, ScaleSource::given})
                            : one_of({ScaleSource::plain, ScaleSource::power_of_two, ScaleSource::given});
    job.patience = in_chunks ? 0 : one_of({0, 3});
    set_grid(job, numbers);
    job.norm = one_of({2.f, 3.f, 2.4f, 5.5f}), job.power = power_of(job.norm);
  }

  // The errors of all candidates.
  std::vector<double> exact(std::int64_t piece) const {
    std::vector<double> errors;
    for (std::int64_t c = 0; c < count; c++) {
      const Candidate by = candidate_of(job, numbers, piece, c);
      errors.push_back(error_of(values, weighted ? &weights : nullptr, piece, job.norm,
                                [&](double x) { return numbers.quantized(x, by.scale, by.zero); }));
    }
    return errors;
  }
};

// Errors of chunks are in a unit of the piece.
inline void compare_chunks(const SearchCase& search, const std::vector<double>& errors) {
  for (std::int64_t piece = 0; piece < search.pieces; piece++) {
    const std::vector<double> exact = search.exact(piece);
    std::vector<double> sums(search.count);
    for (std::int64_t c = 0; c < search.count; c++) {
      for (std::int64_t chunk = 0; chunk < search.job.cut.chunks; chunk++)
        sums[c] += errors[(chunk * search.pieces + piece) * search.count + c];
      expect_near("an error beside that of the first", sums[c] / sums[0], exact[c] / exact[0], kRough);
    }
  }
}

inline void check_search() {
  SearchCase search;
  SearchJob& job = search.job;
  const Ends ends(search.values);
  std::vector<std::int32_t> best(search.pieces, -1), done(search.pieces);
  std::vector<double> least(search.pieces), errors(job.cut.chunks * search.pieces * search.count);
  std::vector<std::uint8_t> improved(search.count);
  job.low = ends.low.data(), job.high = ends.high.data();
  job.best = best.data(), job.done = done.data(), job.least = least.data(), job.improved = improved.data();
  if (search.in_chunks) {
    job.errors = errors.data(), job.end = search.count;
    run(kernels.search, job);
    return compare_chunks(search, errors);
  }
  // Each round brings every piece further.
  for (std::int64_t round = 0; round < search.count; round++)
    if (*std::min_element(done.begin(), done.end()) < reach(job))
      run(kernels.search, job);
  expect_at_most("the number of candidates to try", reach(job), *std::min_element(done.begin(), done.end()));
  for (std::int64_t piece = 0; piece < search.pieces; piece++) {
    const std::vector<double> exact = search.exact(piece);
    const double lowest = *std::min_element(exact.begin(), exact.begin() + done[piece]);
    expect_at_most("the error of the best", exact[best[piece]], lowest * (1 + kRough));
  }
}

inline void check_ranges() {
  const DType dtype = any_dtype();
  const std::int64_t pieces = 101, size = element_size(dtype);
  const std::vector<float> low = floats(pieces, normal), high = floats(pieces, normal);
  const std::vector<float> factors = floats(5, normal);
  std::vector<std::int32_t> best(pieces);
  for (std::int32_t& one : best) one = static_cast<std::int32_t>(below(5));
  std::vector<std::byte> start(pieces * size), end(pieces * size);
  run(kernels.ranges,
      RangesJob{cut_into(pieces, 40, 1, 1), dtype, pieces, low.data(), high.data(), factors.data(),
                best.data(), start.data(), end.data()});
  for (std::int64_t i = 0; i < pieces; i++) {
    expect_equal("a start", read(dtype, &start[i * size]), rounded(dtype, double{low[i]} * factors[best[i]]));
    expect_equal("an end", read(dtype, &end[i * size]), rounded(dtype, double{high[i]} * factors[best[i]]));
  }
}

// The two searches of all scales

// Of numbers that go far enough for both ends.
inline Window window_of(const Numbers& numbers, double lowest, double highest) {
  const auto halving = [&](double end) {
    const auto& grid = numbers.magnitudes;
    const std::size_t next = std::upper_bound(grid.begin(), grid.end(), std::abs(end) / 2) - grid.begin();
    return end ? static_cast<float>(2 / (grid[next - 1] + grid[next])) : 0;
  };
  return {0, static_cast<float>(lowest), static_cast<float>(highest), halving(highest), halving(lowest)};
}

// Pieces of which one is zero and one has NaN and Inf, and what a search of all scales found for them.
struct AllScales {
  Numbers numbers;
  std::vector<Window> windows;
  Tensor values, weights;
  bool weighted = below(2);
  double norm;
  std::int64_t kept, found_count;
  Ends ends;
  std::vector<float> best;
  std::vector<std::int32_t> window;
  std::vector<double> errors;

  AllScales(const Numbers& numbers, const std::vector<Window>& windows, Shape shape, double norm,
            std::int64_t kept)
      : numbers(numbers),
        windows(windows),
        values(prepared(Tensor(any_dtype(), shape, any_memory()))),
        weights(weights_for(values)),
        norm(norm),
        kept(kept),
        found_count(kept * values.count_pieces()),
        ends(values),
        best(found_count),
        window(found_count),
        errors(found_count) {}
  static Tensor prepared(Tensor values) {
    for (std::int64_t i = 0; i < values.length(); i++) values.set(0, i, 0);
    for (int i = 0; i < 3; i++)
      values.set(values.count_pieces() - 1, i, one_of<double>({NAN, INFINITY, -INFINITY}));
    return values;
  }

  template <class Job> void tell(Job& job) {
    job.values = values.pieces;
    if (weighted) job.weights = weights.pieces;
    job.cut = whole(values), job.cut.chunks = 1;
    job.low = ends.low.data(), job.high = ends.high.data();
    job.windows = windows.data(), job.window_count = static_cast<std::int64_t>(windows.size());
    job.kept = kept, job.best = best.data(), job.window = window.data(), job.errors = errors.data();
  }

  double error(std::int64_t piece, const Window& in, double scale) const {
    return error_of(values, weighted ? &weights : nullptr, piece, norm, [&](double x) {
      return (numbers.nearest(x / scale + in.zero, in.lowest, in.highest) - in.zero) * scale;
    });
  }
  // Errors must be what they are said to be, the least first. `least(piece, n)` is the n-th least there is.
  template <class F> void compare(double tolerance, F least) const {
    for (std::int64_t i = 0; i < found_count; i++) {
      const std::int64_t piece = i / kept;
      if (!piece) {
        expect_equal("the scale of zeros", best[i], 0);
        continue;
      }
      expect_near("an error", errors[i], error(piece, windows[window[i]], best[i]), tolerance);
      if (i % kept) expect_at_most("the error before", errors[i - 1], errors[i]);
      expect_at_most("a least error", errors[i], least(piece, i % kept) * (1 + tolerance));
    }
  }
};

inline Numbers wide_integers(int most) { return {0, -static_cast<double>(most), static_cast<double>(most)}; }

// A format and its windows: one; with a mirror image for negative scales; one for each zero point.
inline std::pair<Numbers, std::vector<Window>> any_windows(std::int64_t most) {
  switch (below(most)) {
    case 0: return {wide_integers(8), {window_of(wide_integers(8), -8, 7), window_of(wide_integers(8), -7, 8)}};
    case 1: return {wide_integers(8), {window_of(wide_integers(8), -8, 7)}};
    case 2: return {{1, -448, 448}, {window_of({1, -448, 448}, -448, 448)}};
    case 3: return {{4, -6, 6}, {window_of({4, -6, 6}, -6, 6)}};
    case 4: return {{1, -448, 448}, {{-2, -448, 448, 1e3, 1e3}, {0, -448, 448, 1e3, 1e3}, {3.5, -448, 448, 1e3, 1e3}}};
    default: break;
  }
  std::vector<Window> windows;
  for (int zero = -4; zero < 4; zero++) windows.push_back(window_of(wide_integers(7), -4 - zero, 3 - zero));
  return {wide_integers(7), windows};
}

inline void check_optimum() {
  const bool is_long = !below(8);
  const auto [numbers, windows] = any_windows(is_long ? 4 : 6);
  const Shape shape = is_long ? Shape{1, 1, 2, 3, 1501}
                              : one_of<Shape>({{1, 2, 3, 1, 37}, {2, 1, 5, 3, 7}, {1, 3, 1, 1, 260}});
  AllScales search(numbers, windows, shape, one_of({2., 2.4, 1.5}), one_of({1, 3, 9}));
  const int per_octave = is_long ? 8 : one_of({1, 8, 64});
  std::vector<float> storable;
  for (int i = 0; i < 11 * per_octave; i++)
    storable.push_back(std::ldexp(1 + (i % per_octave) / (float)per_octave, i / per_octave - 9));
  const std::int64_t scales = static_cast<std::int64_t>(storable.size());
  storable.resize(scales + kLanes);
  OptimumJob job{};
  search.tell(job);
  job.storable = storable.data(), job.scales = scales, job.halvable = 2 * storable[0], job.most = 3e38f;
  job.grid = numbers.row, job.shifted = windows.back().zero != 0;
  job.windows_have_floor = windows.size() > 1 && !job.shifted;
  job.in_lanes = per_octave < 16 && !job.shifted && windows.size() <= 2 && job.kept <= kMostKeptLanes &&
                 job.values.is_short();
  job.norm = static_cast<float>(search.norm), job.power = power_of(search.norm);
  run(kernels.optimum, job);
  std::vector<double> all;
  search.compare(kRough, [&](std::int64_t piece, std::int64_t n) {
    if (n) return n < static_cast<std::int64_t>(all.size()) ? all[n] : 1e300;
    all.clear();
    for (const Window& in : search.windows) {
      const float low = search.ends.low[piece], high = search.ends.high[piece];
      // From there on, half of a scale is no worse.
      const float most = std::max({high * in.above, -low * in.below, job.halvable});
      for (std::int64_t i = 0; i < scales && storable[i] < most; i++)
        all.push_back(search.error(piece, in, storable[i]));
    }
    std::sort(all.begin(), all.end());
    return all[0];
  });
}

// Between two scales at which a code changes the error is a parabola: all of them, one after the other.
inline double least_of_parabolas(const AllScales& search, std::int64_t piece, const Window& in) {
  const auto& grid = search.numbers.magnitudes;
  std::vector<double> changes{1e3};
  for (std::int64_t i = 0; i < search.values.length(); i++)
    for (std::size_t code = 0; code + 1 < grid.size(); code++)
      changes.push_back(std::abs(search.values.finite_at(piece, i)) * 2 / (grid[code] + grid[code + 1]));
  std::sort(changes.begin(), changes.end());
  double least = 1e300;
  for (std::size_t k = 1; k < changes.size(); k++) {
    const double middle = (changes[k - 1] + changes[k]) / 2;
    if (changes[k] == changes[k - 1]) continue;
    double linear = 0, quadratic = 0, squares = 0;
    for (std::int64_t i = 0; i < search.values.length(); i++) {
      const double x = search.values.finite_at(piece, i);
      const double weight = search.weighted ? search.weights.at(piece, i) : 1;
      const double g = search.numbers.nearest(x / middle, in.lowest, in.highest);
      linear += weight * x * g, quadratic += weight * g * g, squares += weight * x * x;
    }
    const double scale =
        quadratic ? std::min(std::max(linear / quadratic, changes[k - 1]), changes[k]) : middle;
    least = std::min(least, squares - scale * (2 * linear - scale * quadratic));
  }
  return least;
}

inline void check_sweep() {
  const auto [numbers, windows] = any_windows(4);
  AllScales search(numbers, windows, one_of<Shape>({{1, 1, 4, 1, 23}, {2, 3, 1, 1, 9}}), 2, one_of({1, 4}));
  const std::vector<float> magnitudes(numbers.magnitudes.begin(), numbers.magnitudes.end());
  SweepJob job{};
  job.kernels = &kernels.sweep;
  search.tell(job);
  job.magnitudes = magnitudes.data(), job.magnitude_count = static_cast<std::int64_t>(magnitudes.size());
  run_tasks(
      job.cut.tasks(), 3, 0, [&](std::int64_t task, std::byte*) { sweep_task(job, task); }, [] { return false; });
  search.compare(1e-6, [&](std::int64_t piece, std::int64_t n) {
    if (n) return 1e300;  // how many parabolas are alike is not told
    double least = 1e300;
    for (const Window& in : search.windows) least = std::min(least, least_of_parabolas(search, piece, in));
    return least;
  });
}

}  // namespace check
