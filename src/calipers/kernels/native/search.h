// The classic search: every candidate scale of a piece is tried while the piece is in the cache.
//
// Values are measured in a power of two near the largest of their piece, so that no error leaves
// float32, whatever the norm. An error is never larger than the value itself, because every grid
// holds zero.
#pragma once

#include "grid.h"
#include "tile.h"

namespace calipers {
namespace {

// Candidates as vectors: each lane its own piece, or all lanes the same one.
struct Candidates {
  V *scale, *inverse, *zero, *total;
};

// Sum the error of every candidate over `count` vectors of values.
template <class Grid, class Norm, bool weighted, bool shifted>
void sum_errors(const SearchJob& job, const Candidates& candidates, const V* values,
                const V* weights, std::int64_t count) {
  const Grid grid(job.lowest, job.highest);
  const Norm norm(job.power);
  for (std::int64_t c = 0; c < job.candidates; c++) {
    const V scale = candidates.scale[c], inverse = candidates.inverse[c];
    const V zero = shifted ? candidates.zero[c] : V{};
    const auto error = [&](std::int64_t i) {
      const V x = values[i];
      const V code = grid.round(shifted ? x * inverse + zero : x * inverse);
      const V power = norm(x - (shifted ? code - zero : code) * scale);
      return weighted ? weights[i] * power : power;
    };
    V even{}, odd{};
    std::int64_t i = 0;
    for (; i + 1 < count; i += 2) {
      even += error(i);
      odd += error(i + 1);
    }
    if (i < count) even += error(i);
    candidates.total[c] = even + odd;
  }
}

using SumErrors = void (*)(const SearchJob&, const Candidates&, const V*, const V*, std::int64_t);

template <class Grid, class Norm> SumErrors pick_sum(const SearchJob& job) {
  const bool weighted = job.weights.data, shifted = job.zero_points;
  if (weighted && shifted) return sum_errors<Grid, Norm, true, true>;
  if (weighted) return sum_errors<Grid, Norm, true, false>;
  return shifted ? sum_errors<Grid, Norm, false, true> : sum_errors<Grid, Norm, false, false>;
}

template <class Grid> SumErrors pick_norm(const SearchJob& job) {
  if (job.norm == 2) return pick_sum<Grid, Square>(job);
  if (job.norm == 3) return pick_sum<Grid, Cube>(job);
  return pick_sum<Grid, AnyPower>(job);
}

inline SumErrors pick_grid(const SearchJob& job) {
  if (job.grid == calipers::Grid::fp8) return pick_norm<Fp8Grid>(job);
  if (job.grid == calipers::Grid::fp4) return pick_norm<Fp4Grid>(job);
  return pick_norm<IntegerGrid>(job);
}

// One power of two per lane, that brings the larger end of the range between 1 and 2 (at the ends
// of float32: between 2⁻²³ and 4).
inline V unit_of(V low, V high) {
  const V largest = maximum(absolute(low), absolute(high));
  const I exponent = 254 - (I)((U)largest >> 23);
  const I held = exponent < 1 ? all_bits(1) : (exponent > 253 ? all_bits(253) : exponent);
  return (V)((U)held << 23);
}

// The scale that compressed-tensors makes of a symmetric range, in the arithmetic of the dtype.
inline V symmetric_scale(const SearchJob& job, V low, V high, float factor) {
  const DType dtype = job.values.dtype;
  const V start = round_to(dtype, low * factor), end = round_to(dtype, high * factor);
  const V largest = maximum(maximum(-start, end), V{});
  const V scale = round_to(dtype, largest / ((job.highest - job.lowest) / 2));
  const float epsilon = dtype == DType::f32 ? 0x1p-23f : dtype == DType::f16 ? 0x1p-10f : 0x1p-7f;
  return scale == 0 ? all(epsilon) : scale;
}

// Lanes from consecutive numbers (at most W of them), or all from the first.
inline V take(const float* from, std::int64_t lanes, bool spread) {
  if (spread) return all(*from);
  V taken{};
  std::memcpy(&taken, from, lanes * sizeof(float));
  return taken;
}

// Fill in the candidates of `lanes` pieces (or of one, spread over all lanes), and return the unit.
inline V fill_candidates(const SearchJob& job, std::int64_t piece, std::int64_t lanes, bool spread,
                         const Candidates& candidates) {
  const V low = take(job.low + piece, lanes, spread), high = take(job.high + piece, lanes, spread);
  const V unit = unit_of(low, high);
  for (std::int64_t c = 0; c < job.candidates; c++) {
    const std::int64_t at = c * job.values.count() + piece;
    const V scale = job.scales ? take(job.scales + at, lanes, spread)
                               : symmetric_scale(job, low, high, job.factors[c]);
    candidates.scale[c] = maximum(scale * unit, all(1e-30f));
    candidates.inverse[c] = 1 / candidates.scale[c];
    if (job.zero_points) candidates.zero[c] = take(job.zero_points + at, lanes, spread);
  }
  return unit;
}

// Turn W rows of floats into one vector per position, measured in `unit`.
inline void lanes_from_rows(const float* rows, std::int64_t count, std::int64_t pitch, V unit, V* to) {
  for (std::int64_t i = 0; i < count; i += W) {
    V block[W];
    for (int row = 0; row < W; row++) block[row] = load_as<V>(rows + row * pitch + i);
    transpose(block);
    const std::int64_t part = count - i < W ? count - i : W;
    for (std::int64_t k = 0; k < part; k++) to[i + k] = finite_or_zero(block[k]) * unit;
  }
}

inline void mark_improved(const SearchJob& job, std::int64_t candidate) {
  __atomic_store_n(job.improved + candidate, 1, __ATOMIC_RELAXED);
}

struct SearchScratch {
  float *rows, *weight_rows;
  V *values, *weights;
  Candidates candidates;
  I* improved;
  double* sums;
  SearchScratch(std::byte* scratch, std::int64_t count) {
    const auto claim = [&](std::size_t bytes) {
      std::byte* claimed = scratch;
      scratch += bytes;
      return claimed;
    };
    rows = (float*)claim(kTileBytes);
    weight_rows = (float*)claim(kTileBytes);
    values = (V*)claim(kTileBytes);
    weights = (V*)claim(kTileBytes);
    candidates.scale = (V*)claim(count * sizeof(V));
    candidates.inverse = (V*)claim(count * sizeof(V));
    candidates.zero = (V*)claim(count * sizeof(V));
    candidates.total = (V*)claim(count * sizeof(V));
    improved = (I*)claim(count * sizeof(I));
    sums = (double*)claim(count * kLanes * sizeof(double));
  }
};

// Short pieces: W of them side by side, one per lane.
inline void search_lanes(const SearchJob& job, const Task& task, const SearchScratch& scratch) {
  const SumErrors sum_errors = pick_grid(job);
  const std::int64_t count = job.values.length(), pitch = round_up(count, W);
  for (std::int64_t c = 0; c < job.candidates; c++) scratch.improved[c] = I{};
  std::memset(scratch.rows, 0, kTileBytes);
  std::memset(scratch.weight_rows, 0, kTileBytes);
  for (std::int64_t first = task.first; first < task.end; first += W) {
    const std::int64_t lanes = task.end - first < W ? task.end - first : W;
    if (lanes < W) std::memset(scratch.rows, 0, kTileBytes);
    const V unit = fill_candidates(job, first, lanes, false, scratch.candidates);
    load_tile(job.values, first, lanes, 0, count, scratch.rows, pitch);
    lanes_from_rows(scratch.rows, count, pitch, unit, scratch.values);
    if (job.weights.data) {
      load_tile(job.weights, first, lanes, 0, count, scratch.weight_rows, pitch);
      lanes_from_rows(scratch.weight_rows, count, pitch, all(1), scratch.weights);
    }
    sum_errors(job, scratch.candidates, scratch.values, scratch.weights, count);
    V least = all(3e38f);
    I best{};
    for (std::int64_t c = 0; c < job.candidates; c++) {
      const V total = scratch.candidates.total[c];
      const I better = total < least;
      least = better ? total : least;
      best = better ? all_bits((std::int32_t)c) : best;
      scratch.improved[c] |= better;
    }
    std::memcpy(job.best + first, &best, lanes * sizeof(std::int32_t));
  }
  for (std::int64_t c = 0; c < job.candidates; c++)
    if (any(scratch.improved[c])) mark_improved(job, c);
}

inline void choose(const SearchJob& job, std::int64_t piece, const double* sums) {
  double least = 1e300;
  for (std::int64_t c = 0; c < job.candidates; c++) {
    if (!(sums[c] < least)) continue;
    least = sums[c];
    job.best[piece] = (std::int32_t)c;
    mark_improved(job, c);
  }
}

// Long pieces: one after another, tile by tile, consecutive positions in the lanes. Pieces whose
// values lie side by side in memory (a transposed matrix) are read together.
inline void search_rows(const SearchJob& job, const Task& task, const SearchScratch& scratch) {
  const SumErrors sum_errors = pick_grid(job);
  const std::int64_t together = job.values.column_stride == 1 ? 1 : kLanes;
  const std::int64_t per_tile = (std::int64_t)kTile / together;
  for (std::int64_t first = task.first; first < task.end; first += together) {
    const std::int64_t pieces = task.end - first < together ? task.end - first : together;
    for (std::int64_t i = 0; i < pieces * job.candidates; i++) scratch.sums[i] = 0;
    for (std::int64_t begin = task.begin; begin < task.stop; begin += per_tile) {
      const std::int64_t left = task.stop - begin, count = left < per_tile ? left : per_tile;
      load_tile(job.values, first, pieces, begin, count, scratch.rows, per_tile);
      if (job.weights.data)
        load_tile(job.weights, first, pieces, begin, count, scratch.weight_rows, per_tile);
      for (std::int64_t piece = 0; piece < pieces; piece++) {
        float* row = scratch.rows + piece * per_tile;
        float* weights = scratch.weight_rows + piece * per_tile;
        const V unit = fill_candidates(job, first + piece, 1, true, scratch.candidates);
        const std::int64_t vectors = pad_with_zeros(row, count);
        pad_with_zeros(weights, count);
        for (std::int64_t i = 0; i < vectors; i++)
          scratch.values[i] = finite_or_zero(load_as<V>(row + i * W)) * unit;
        sum_errors(job, scratch.candidates, scratch.values, (const V*)weights, vectors);
        for (std::int64_t c = 0; c < job.candidates; c++)
          scratch.sums[piece * job.candidates + c] += sum(scratch.candidates.total[c]);
      }
    }
    for (std::int64_t piece = 0; piece < pieces; piece++) {
      const double* sums = scratch.sums + piece * job.candidates;
      const std::int64_t at = task.chunk * job.values.count() + first + piece;
      if (job.errors)
        std::memcpy(job.errors + at * job.candidates, sums, job.candidates * sizeof(double));
      else
        choose(job, first + piece, sums);
    }
  }
}

inline void search_task(const SearchJob& job, std::int64_t index, std::byte* scratch) {
  const Task task(job.cut, index, job.values.count(), job.values.length());
  const SearchScratch parts(scratch, job.candidates);
  const bool is_short = job.values.length() * kLanes <= (std::int64_t)kTile;
  if (is_short)
    search_lanes(job, task, parts);
  else
    search_rows(job, task, parts);
}

}  // namespace
}  // namespace calipers
