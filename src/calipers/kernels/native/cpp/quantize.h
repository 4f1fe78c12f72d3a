// What quantization makes of each value, and how far that is from it. In float32, whatever the
// dtype; the arithmetic is that of compressed-tensors, and quotients can be rounded as it rounds them
// for checkpoints. NaN and Inf stay, and count as no error.
#pragma once

#include "arena.h"
#include "grid.h"
#include "tile.h"

namespace calipers {
namespace {

// Quantize `count` vectors in place, and leave the errors in `errors`. Returns the largest |error|.
template <DType working, class Grid>
V quantize_row(const QuantizeJob& job, const Quantizer& by, std::int64_t count, V* values, V* errors) {
  const V lowest = all(job.lowest), highest = all(job.highest);
  V largest{};
  for (std::int64_t i = 0; i < count; i++) {
    const V x = values[i], finite = finite_or_zero(x);
    const V moved = round_in<working>(round_in<working>(finite / by.scale) + by.zero);
    const V result = (Grid::round(moved, lowest, highest) - by.zero) * by.scale;
    errors[i] = nonfinite_lanes(x) ? V{} : absolute(result - finite);
    values[i] = nonfinite_lanes(x) ? x : result;
    largest = maximum(largest, errors[i]);
  }
  return largest;
}

// Σ w·error² in double, which holds every square.
inline double sum_squares(const V* errors, const V* weights, std::int64_t count) {
  D low{}, high{};
  for (std::int64_t i = 0; i < count; i++) {
    D lower = lower_doubles(errors[i]), upper = upper_doubles(errors[i]);
    lower *= lower, upper *= upper;
    if (weights) lower *= lower_doubles(weights[i]), upper *= upper_doubles(weights[i]);
    low += lower, high += upper;
  }
  low += high;
  double total = 0;
  for (int i = 0; i < W / 2; i++) total += low[i];
  return total;
}

// Σ w·error^norm, measured in a power of two near the largest, from which it is brought back.
// Summed in double: two choices for one piece are told apart by this.
template <class Norm>
double sum_powers(const QuantizeJob& job, const V* errors, const V* weights, std::int64_t count,
                  int exponent) {
  const Norm norm(job.power);
  const V unit = all(__builtin_ldexpf(1, -exponent));
  D low{}, high{};
  for (std::int64_t i = 0; i < count; i += U) {
    V error[U];
    each([&](int k) { error[k] = errors[i + k] * unit; });
    norm.apply(error);
    if (weights) each([&](int k) { error[k] *= weights[i + k]; });
    each([&](int k) { low += lower_doubles(error[k]), high += upper_doubles(error[k]); });
  }
  double total = 0;
  for (int i = 0; i < W / 2; i++) total += low[i] + high[i];
  return total * __builtin_exp2(exponent * (double)job.norm);
}

inline double sum_powers(const QuantizeJob& job, const V* errors, const V* weights,
                         std::int64_t count, V largest) {
  if (job.norm == 2) return sum_squares(errors, weights, count);
  float most = 0;
  for (int i = 0; i < W; i++) most = largest[i] > most ? largest[i] : most;
  if (most == 0) return 0;
  int exponent = __builtin_ilogbf(most) - kUnitExponent;
  exponent = exponent > 126 ? 126 : exponent < -126 ? -126 : exponent;
  if (job.norm == 3) return sum_powers<Cube>(job, errors, weights, count, exponent);
  return sum_powers<AnyPower<true>>(job, errors, weights, count, exponent);
}

// One row of a tile: `count` positions of a piece from `begin` on.
template <class Grid>
double quantize_part(const QuantizeJob& job, std::int64_t piece, std::int64_t begin,
                     std::int64_t count, std::int64_t unit, V* values, V* weights, V* errors) {
  const Quantizer by{all(job.scales[piece]), V{},
                     job.zero_points ? all(job.zero_points[piece]) : V{}};
  const std::int64_t vectors = pad_with_zeros((float*)values, count, unit);
  V largest{};
  with_constant(job.working, [&](auto working) {
    largest = quantize_row<working(), Grid>(job, by, vectors, values, errors);
  });
  if (weights) pad_with_zeros((float*)weights, count, unit);
  if (job.output) {
    for (std::int64_t i = 0; i < vectors; i++)
      values[i] = nonfinite_lanes(values[i]) ? values[i] : round_to(job.values.dtype, values[i]);
    const std::int64_t at = piece * job.values.length() + begin;
    store_values(job.values.dtype, (const float*)values, count,
                 job.output + at * element_size(job.values.dtype));
  }
  return sum_powers(job, errors, weights, vectors, largest);
}

struct QuantizeScratch {
  V *values, *errors, *weights;  // a tile of each
  QuantizeScratch(Arena& arena, const QuantizeJob&)
      : values(arena.take<V>(kTile / W)), errors(arena.take<V>(kTile / W)), weights(arena.take<V>(kTile / W)) {}
};

// As many pieces at a time as a tile holds.
template <class Grid>
void quantize_task(const QuantizeJob& job, const Task& task, const QuantizeScratch& scratch) {
  const std::int64_t tile = kTile, unit = job.norm == 2 ? W : U * W;
  const std::int64_t needed = round_up(task.stop - task.begin, unit);
  const std::int64_t pitch = needed < tile ? needed : tile, together = tile / pitch;
  V *values = scratch.values, *errors = scratch.errors;
  V* weights = job.weights.data ? scratch.weights : nullptr;
  double* totals = job.errors + task.chunk * job.values.count();
  for (std::int64_t first = task.first; first < task.end; first += together) {
    const std::int64_t left = task.end - first, pieces = left < together ? left : together;
    for (std::int64_t i = 0; i < pieces; i++) totals[first + i] = 0;
    for (std::int64_t begin = task.begin; begin < task.stop; begin += tile) {
      const std::int64_t rest = task.stop - begin, count = rest < tile ? rest : tile;
      load_tile(job.values, first, pieces, begin, count, (float*)values, pitch);
      if (weights) load_tile(job.weights, first, pieces, begin, count, (float*)weights, pitch);
      for (std::int64_t i = 0; i < pieces; i++) {
        const std::int64_t row = i * pitch / W;
        totals[first + i] += quantize_part<Grid>(job, first + i, begin, count, unit, values + row,
                                                 weights ? weights + row : nullptr, errors);
      }
    }
  }
}

// Rounding is the same with and without a zero point.
inline void quantize_task(const QuantizeJob& job, std::int64_t index, QuantizeScratch& scratch) {
  const Task task(job.cut, index, job.values.count(), job.values.length());
  with_grid(job.grid, false,
            [&](auto grid) { quantize_task<decltype(grid)>(job, task, scratch); });
}

}  // namespace
}  // namespace calipers
