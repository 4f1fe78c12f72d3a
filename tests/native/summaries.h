// Kernels that look at values as they are: extrema, counts, sums over tokens.
#pragma once

#include "harness.h"

namespace check {

inline void check_extrema() {
  Tensor values = any_tensor({{1, 70, 1, 1, 4},
                              {1, 70, 1, 1, 8},
                              {1, 70, 1, 1, 16},
                              {1, 5, 7, 1, 64},
                              {2, 3, 5, 3, 37},
                              {3, 2, 19, 5, 1}});
  if (below(2)) values.add_nonfinite();
  ExtremaJob job{};
  const Pieces& p = job.values = values.pieces;
  job.interleaved = p.observations * p.rows > 1 && p.grid_columns > 1;
  const std::int64_t chunk = below(2) ? p.length() : divide_up(p.length(), 3 * p.columns) * p.columns;
  job.cut = cut_into(p.count(), job.interleaved ? p.grid_columns : 48, p.length(), chunk);
  const std::int64_t results = job.cut.chunks * p.count(), size = element_size(p.dtype);
  std::vector<std::byte> low(results * size), high(results * size);
  std::vector<std::uint8_t> any_finite(results, 1);
  std::vector<std::int64_t> nonfinite(job.cut.tasks());
  job.low = low.data(), job.high = high.data(), job.any_finite = any_finite.data();
  job.nonfinite = nonfinite.data();
  run(kernels.extrema, job);
  std::int64_t expected_nonfinite = 0, found_nonfinite = 0;
  for (std::int64_t at = 0; at < results; at++) {
    double least = INFINITY, most = -INFINITY;
    const std::int64_t begin = at / p.count() * chunk;
    for (std::int64_t i = begin; i < std::min(begin + chunk, p.length()); i++) {
      const double x = values.at(at % p.count(), i);
      if (!std::isfinite(x))
        expected_nonfinite++;
      else
        least = std::min(least, x), most = std::max(most, x);
    }
    expect_equal("whether any is finite", any_finite[at], least <= most);
    expect_equal("the smallest", read(p.dtype, &low[at * size]), least <= most ? least : 0);
    expect_equal("the largest", read(p.dtype, &high[at * size]), least <= most ? most : 0);
  }
  for (const std::int64_t count : nonfinite) found_nonfinite += count;
  expect_equal("the number of NaN and Inf", found_nonfinite, expected_nonfinite);
}

inline std::size_t bin_of(const Tensor& values, std::int64_t piece, std::int64_t i) {
  std::uint16_t bits;
  if (values.pieces.dtype == DType::f32) return encode(DType::bf16, values.at(piece, i));
  return std::memcpy(&bits, values.memory.data() + values.place(piece, i), 2), bits;
}

inline void check_counts() {
  Tensor values = any_tensor({{2, 2, 3, 3, 37}, {1, 1, 2, 5, 1001}, {1, 1, 1, 1, 9001}});
  values.add_nonfinite();
  const std::int64_t pieces = values.count_pieces(), length = values.length();
  CountsJob job{values.pieces, cut_into(pieces, 2, length, below(2) ? length : divide_up(length, 2)),
                nullptr};
  std::vector<std::int64_t> counts(pieces * 65536), expected(pieces * 65536);
  job.counts = counts.data();
  run(kernels.counts, job);
  for (std::int64_t piece = 0; piece < pieces; piece++)
    for (std::int64_t i = 0; i < length; i++) expected[piece * 65536 + bin_of(values, piece, i)]++;
  for (std::size_t bin = 0; bin < counts.size(); bin++) expect_equal("a count", counts[bin], expected[bin]);
}

// A matrix some of whose tokens do not count, for both kernels that sum over them.
struct Tokens {
  static constexpr std::int64_t per_chunk = 8;
  Tensor values = any_tensor({{1, 1, 1, 29, 53}, {1, 1, 1, 7, 130}});
  const Pieces& p = values.pieces;
  Cut cut = cut_into(p.columns, 32, p.rows, per_chunk);
  std::vector<std::uint8_t> mask;
  std::vector<double> sums = std::vector<double>(cut.chunks * p.columns);

  Tokens() {
    if (!below(4)) values.add_nonfinite();
    for (std::int64_t token = 0; token < p.rows; token++) mask.push_back(below(3) > 0);
  }
  // Call f with the place of each value that counts among the sums, and with its own.
  template <class F> void each(F f) const {
    for (std::int64_t i = 0; i < p.length(); i++)
      if (mask[i / p.columns]) f(i / p.columns / per_chunk * p.columns + i % p.columns, i);
  }
  void compare() const {
    std::vector<double> expected(sums.size());
    each([&](std::int64_t at, std::int64_t i) { expected[at] += values.at(0, i) * values.at(0, i); });
    for (std::size_t at = 0; at < sums.size(); at++) expect_near("a sum of squares", sums[at], expected[at], 1e-13);
  }
};

inline void check_moments() {
  Tokens tokens;
  run(kernels.moments, MomentsJob{tokens.p, tokens.mask.data(), tokens.cut, tokens.sums.data()});
  tokens.compare();
}

inline void check_channels() {
  Tokens tokens;
  const DType dtype = tokens.p.dtype;
  const std::size_t size = element_size(dtype), results = tokens.sums.size();
  std::vector<std::byte> low(results * size), high(results * size);
  std::vector<std::uint8_t> finite(tokens.cut.tasks()), in_use(3);
  std::vector<std::int64_t> counts(3 * 65536), expected_counts(65536);
  std::int64_t* tables[] = {&counts[0], &counts[65536], &counts[2 * 65536]};
  run(kernels.channels,
      ChannelsJob{tokens.p, tokens.mask.data(), tokens.cut, tokens.sums.data(), low.data(), high.data(),
                  finite.data(), tables, in_use.data(), 3});
  tokens.compare();
  std::vector<double> least(results, INFINITY), most(results, -INFINITY);
  bool all_finite = true;
  tokens.each([&](std::int64_t at, std::int64_t i) {
    const double x = tokens.values.at(0, i);
    least[at] = std::min(least[at], x), most[at] = std::max(most[at], x);
    all_finite &= std::isfinite(x);
    expected_counts[bin_of(tokens.values, 0, i)]++;
  });
  for (std::size_t at = 0; all_finite && at < results; at++) {
    expect_equal("the smallest", read(dtype, &low[at * size]), least[at]);
    expect_equal("the largest", read(dtype, &high[at * size]), most[at]);
  }
  // Where no token counts, the range is not finite either.
  for (const double x : least) all_finite &= std::isfinite(x);
  expect_equal("whether all are finite", *std::min_element(finite.begin(), finite.end()), all_finite);
  for (std::int64_t bin = 0; bin < 65536; bin++)
    expect_equal("a count", tables[0][bin] + tables[1][bin] + tables[2][bin], expected_counts[bin]);
}

}  // namespace check
