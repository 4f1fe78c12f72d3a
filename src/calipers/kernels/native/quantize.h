// What quantization makes of each value, and how far that is from it. In float32, whatever the
// dtype; the arithmetic is that of compressed-tensors. NaN and Inf stay, and count as no error.
#pragma once

#include "grid.h"
#include "tile.h"

namespace calipers {
namespace {

// Quantize `count` vectors in place, and leave the errors in `errors`. Returns the largest |error|.
template <class Grid>
V quantize_row(const QuantizeJob& job, const Quantizer& by, std::int64_t count, V* values, V* errors) {
  const V lowest = all(job.lowest), highest = all(job.highest);
  V largest{};
  for (std::int64_t i = 0; i < count; i++) {
    const V x = values[i], finite = finite_or_zero(x);
    const V result = (Grid::round(finite / by.scale + by.zero, lowest, highest) - by.zero) * by.scale;
    errors[i] = nonfinite_lanes(x) ? V{} : absolute(result - finite);
    values[i] = nonfinite_lanes(x) ? x : result;
    largest = maximum(largest, errors[i]);
  }
  return largest;
}

// Rounding is the same with and without a zero point.
inline auto quantize_row_of(const QuantizeJob& job) {
  decltype(&quantize_row<Grid<Integers, false>>) found = nullptr;
  with_grid(job.grid, false, [&](auto grid) { found = quantize_row<decltype(grid)>; });
  return found;
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
  float most = 0;
  for (int i = 0; i < W; i++) most = largest[i] > most ? largest[i] : most;
  if (most == 0) return 0;
  int exponent = __builtin_ilogbf(most);
  exponent = exponent > 126 ? 126 : exponent < -126 ? -126 : exponent;
  if (job.norm == 2) return sum_powers<Square>(job, errors, weights, count, exponent);
  if (job.norm == 3) return sum_powers<Cube>(job, errors, weights, count, exponent);
  return sum_powers<AnyPower>(job, errors, weights, count, exponent);
}

inline void quantize_task(const QuantizeJob& job, std::int64_t index, std::byte* scratch) {
  const auto quantize_row = quantize_row_of(job);
  const Task task(job.cut, index, job.values.count(), job.values.length());
  const std::int64_t size = element_size(job.values.dtype);
  V* values = (V*)scratch;
  V* errors = (V*)(scratch + kTileBytes);
  V* weights = job.weights.data ? (V*)(scratch + 2 * kTileBytes) : nullptr;
  for (std::int64_t piece = task.first; piece < task.end; piece++) {
    const Quantizer by{all(job.scales[piece]), V{},
                       job.zero_points ? all(job.zero_points[piece]) : V{}};
    double total = 0;
    for (std::int64_t begin = task.begin; begin < task.stop; begin += kTile) {
      const std::int64_t left = task.stop - begin;
      const std::int64_t count = left < (std::int64_t)kTile ? left : (std::int64_t)kTile;
      load_tile(job.values, piece, 1, begin, count, (float*)values, count);
      const std::int64_t vectors = pad_with_zeros((float*)values, count, U * W);
      const V largest = quantize_row(job, by, vectors, values, errors);
      if (weights) {
        load_tile(job.weights, piece, 1, begin, count, (float*)weights, count);
        pad_with_zeros((float*)weights, count, U * W);
      }
      total += sum_powers(job, errors, weights, vectors, largest);
      if (!job.output) continue;
      for (std::int64_t i = 0; i < vectors; i++)
        values[i] = nonfinite_lanes(values[i]) ? values[i] : round_to(job.values.dtype, values[i]);
      const std::int64_t at = (piece * job.values.length() + begin) * size;
      store_values(job.values.dtype, (const float*)values, count, job.output + at);
    }
    job.errors[task.chunk * job.values.count() + piece] = total;
  }
}

}  // namespace
}  // namespace calipers
