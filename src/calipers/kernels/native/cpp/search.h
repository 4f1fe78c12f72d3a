// The classic search: every candidate scale of a piece is tried while the piece is in the cache.
//
// Values are measured in a power of two near the largest of their piece, so that no error leaves
// float32, whatever the norm. An error is never larger than the value itself, because every grid
// holds zero.
#pragma once

#include "arena.h"
#include "transposed.h"

namespace calipers {
namespace {

// A tile of values, and the errors below which candidates have to stay. Each lane is its own piece
// with its own least error so far; or, if `spread`, all lanes are of one.
struct Tile {
  const V *values, *limits, *weights;
  std::int64_t vectors;  // a multiple of U
  bool last;             // of the piece: the sums are whole, and the least becomes less
  bool spread;
  V least;
  double least_of_one;
};

// The candidates [begin, end), and the sums of their errors.
struct Candidates {
  Quantizer* by;
  V* total;
  double* sums;  // of earlier tiles; only if spread
  std::int64_t begin, end;
};

// A sum only grows: once it is not below the least, the candidate is out, and its sum ends there.
inline bool is_hopeless(const Tile& tile, V total, double before) {
  return tile.spread ? before + sum(total) >= tile.least_of_one : !any(total < tile.least);
}
inline void lower_the_least(Tile& tile, V total, double before) {
  if (!tile.spread)
    tile.least = minimum(tile.least, total);
  else if (before + sum(total) < tile.least_of_one)
    tile.least_of_one = before + sum(total);
}

template <class Grid, class Norm, bool weighted>
void sum_errors(const SearchJob& job, const Candidates& candidates, Tile tile) {
  const V lowest = all(job.lowest + Grid::offset), highest = all(job.highest + Grid::offset);
  const Norm norm(job.power);
  for (std::int64_t c = candidates.begin; c < candidates.end; c++) {
    const Quantizer by = candidates.by[c];
    const double before = tile.spread ? candidates.sums[c] : 0;
    V total{};
    for (std::int64_t begin = 0; begin < tile.vectors; begin += kBlock) {
      const std::int64_t left = tile.vectors - begin, end = begin + (left < kBlock ? left : kBlock);
      V part[U] = {};
      for (std::int64_t i = begin; i < end; i += U) {
        V error[U];
        Grid::template errors<U>(
            [&](int k) { return tile.values[i + k]; }, [&](int) -> const Quantizer& { return by; },
            [&](int k) { return Grid::has_limits ? tile.limits[i + k] : highest; }, by.zero, lowest,
            error);
        norm.apply(error);
        each([&](int k) { part[k] += weighted ? tile.weights[i + k] * error[k] : error[k]; });
      }
      for (int k = 0; k < U; k++) total += part[k];
      if (end < tile.vectors && is_hopeless(tile, total, before)) break;
    }
    candidates.total[c] = total;
    if (tile.last) lower_the_least(tile, total, before);
  }
}

template <class Grid> void round_zero_points(const SearchJob& job, const Candidates& candidates) {
  for (std::int64_t c = candidates.begin; c < candidates.end; c++)
    candidates.by[c].zero = Grid::round(candidates.by[c].zero, all(job.lowest), all(job.highest));
}

// What a search asks of its grid.
struct SearchGrid {
  using SumErrors = void (*)(const SearchJob&, const Candidates&, Tile);
  SumErrors sum_errors;
  void (*round_zero_points)(const SearchJob&, const Candidates&);
  bool has_limits;
  float offset;
};

template <class Grid, class Norm> SearchGrid::SumErrors pick_weighted(const SearchJob& job) {
  return job.weights.data ? sum_errors<Grid, Norm, true> : sum_errors<Grid, Norm, false>;
}

template <class Grid> SearchGrid::SumErrors pick_norm(const SearchJob& job) {
  if (job.norm == 2) return pick_weighted<Grid, Square>(job);
  if (job.norm == 3) return pick_weighted<Grid, Cube>(job);
  return job.norm > 4 ? pick_weighted<Grid, AnyPower<true>>(job) : pick_weighted<Grid, AnyPower<false>>(job);
}

inline SearchGrid grid_of(const SearchJob& job) {
  SearchGrid found{};
  with_grid(job.grid, job.shifted, [&](auto grid) {
    using Grid = decltype(grid);
    found = {pick_norm<Grid>(job), round_zero_points<Grid>, Grid::has_limits, Grid::offset};
  });
  return found;
}

// Tiles; of each candidate a quantizer, a vector of sums, and a sum for each of the pieces that are read
// together.
struct SearchScratch {
  float *rows, *weight_rows;
  V *values, *limits, *weights;
  Candidates candidates;
  SearchScratch(Arena& arena, const SearchJob& job)
      : rows(arena.take<float>(kTile)), weight_rows(arena.take<float>(kTile)),
        values(arena.take<V>(kTile / W)), limits(arena.take<V>(kTile / W)), weights(arena.take<V>(kTile / W)),
        candidates{arena.take<Quantizer>(job.candidates), arena.take<V>(job.candidates),
                   arena.take<double>(job.candidates * kLanes), 0, 0} {}
};

// Bring values into the form that the grids take, at `i` of the scratch memory, and note the largest.
inline void prepare(const SearchJob& job, const SearchGrid& grid, V x, V unit,
                    const SearchScratch& scratch, std::int64_t i, V& largest) {
  const V finite = finite_or_zero(x), measured = finite * unit;
  largest = larger_magnitude(largest, finite);
  scratch.values[i] = job.shifted ? measured : absolute(measured);
  if (grid.has_limits)
    scratch.limits[i] = x < 0 ? all(grid.offset - job.lowest) : all(grid.offset + job.highest);
}

// Scale and zero point as compressed-tensors makes them from a range, in the arithmetic of the dtype
// (symmetric scales in float32: to within a unit in the last place).

inline V or_epsilon(DType dtype, V scale) {
  const float epsilon = dtype == DType::f32 ? 0x1p-23f : dtype == DType::f16 ? 0x1p-10f : 0x1p-7f;
  return scale == 0 ? all(epsilon) : scale;
}

inline V plain_scale(const SearchJob& job, V largest) {
  const float half = (job.highest - job.lowest) / 2;
  const bool is_f32 = job.values.dtype == DType::f32;
  const V scale = is_f32 ? largest * (1 / half) : round_to(job.values.dtype, largest / half);
  return or_epsilon(job.values.dtype, scale);
}

// The power of two below (from 1.75 on: above) the largest value, which then is that of the top
// binade of the grid.
inline V power_of_two_scale(const SearchJob& job, V largest) {
  const I top_binade = ((I)all(job.highest) >> 23) - 127;
  const I exponent = (I)(((U32)largest + 0x00200000) >> 23) - top_binade;
  const V scale = (V)(exponent > 0 ? (I)((U32)exponent << 23) : all_bits(0x00400000));
  if (job.values.dtype != DType::f16) return scale;
  return largest == 0 ? all(1) : maximum(scale, all(0x1p-24f));
}

// The zero point is not rounded yet.
inline void shifted_by_zero_point(const SearchJob& job, V start, V end, Quantizer& by) {
  const DType dtype = job.values.dtype;
  start = minimum(start, V{}), end = maximum(end, V{});
  const V scale = round_to(dtype, round_to(dtype, end - start) / (job.highest - job.lowest));
  const V below = round_to(dtype, start / (scale == 0 ? all(1) : scale));
  V zero = round_to(dtype, job.lowest - below);
  zero = scale == 0 ? (start < 0 ? all(job.highest) : all(job.lowest)) : zero;
  by.zero = (scale == 0) & (start >= 0) ? V{} : zero;
  by.scale = or_epsilon(dtype, scale);
}

inline void quantizer_of(const SearchJob& job, V low, V high, float factor, Quantizer& by) {
  const V start = round_to(job.values.dtype, low * factor);
  const V end = round_to(job.values.dtype, high * factor);
  if (job.shifted) return shifted_by_zero_point(job, start, end, by);
  const V largest = absolute(maximum(maximum(-start, end), V{}));  // no −0, its bits are looked at
  by.scale = job.scale == ScaleSource::plain ? plain_scale(job, largest) : power_of_two_scale(job, largest);
}

// The ranges of `lanes` pieces, or of one, spread over all lanes.
struct Ranges {
  std::int64_t piece, lanes;
  bool spread;
  V low, high, unit;
  Ranges(const SearchJob& job, std::int64_t piece, std::int64_t lanes, bool spread)
      : piece(piece), lanes(lanes), spread(spread),
        low(take(job.low + piece, lanes, spread)), high(take(job.high + piece, lanes, spread)),
        unit(unit_of(larger_magnitude(low, high))) {}
  // Values are meant to lie in the range. Where they do not, they count too, in a larger unit.
  bool make_room_for(V largest) {
    const V wider = unit_of(largest);
    const bool needed = any(wider * 2 < unit);
    if (needed) unit = minimum(unit, wider);
    return needed;
  }
};

inline void fill_candidates(const SearchJob& job, const SearchGrid& grid, const Ranges& ranges,
                            const Candidates& candidates) {
  for (std::int64_t c = candidates.begin; c < candidates.end; c++) {
    const std::int64_t at = c * job.values.count() + ranges.piece;
    Quantizer& by = candidates.by[c];
    if (job.scale != ScaleSource::given) {
      quantizer_of(job, ranges.low, ranges.high, job.factors[c], by);
    } else {
      by.scale = take(job.scales + at, ranges.lanes, ranges.spread);
      if (job.shifted) by.zero = take(job.zero_points + at, ranges.lanes, ranges.spread);
    }
    by.scale = maximum(by.scale * ranges.unit, all(1e-30f));
    by.inverse = reciprocal(by.scale);
  }
  if (job.shifted && job.scale != ScaleSource::given) grid.round_zero_points(job, candidates);
}

// The best so far of up to W pieces, one per lane. Lanes without a piece hold zeros: they have no
// error, and after the first candidate nothing is better.
struct BestOfLanes {
  V least;
  I best;
  BestOfLanes(const SearchJob& job, std::int64_t first, std::int64_t lanes)
      : least(all(done_of(job, first) ? 0 : 3e38f)), best{} {
    for (std::int64_t i = 0; done_of(job, first) && i < lanes; i++) {
      least[i] = (float)job.least[first + i];
      best[i] = job.best[first + i];
    }
  }
  void consider(const SearchJob& job, const Candidates& candidates) {
    for (std::int64_t c = candidates.begin; c < candidates.end; c++) {
      const I better = candidates.total[c] < least;
      least = better ? candidates.total[c] : least;
      best = better ? all_bits((std::int32_t)c) : best;
      if (any(better)) mark_improved(job, c);
    }
  }
  void store(const SearchJob& job, std::int64_t first, std::int64_t lanes, std::int64_t done) const {
    std::memcpy(job.best + first, &best, lanes * sizeof(std::int32_t));
    for (std::int64_t i = 0; job.done && i < lanes; i++) remember(job, first + i, done, least[i]);
  }
};

// Weights that are the same in every row of the grid, as importance is, are transposed once for all
// rows of a task, if they fit into a tile.
struct LaneWeights {
  const SearchJob& job;
  const SearchScratch& scratch;
  std::int64_t size, row;  // vectors of W pieces; pieces of a row, or 0: each is loaded when it is needed
  std::uint64_t loaded = 0;

  LaneWeights(const SearchJob& job, const SearchScratch& scratch)
      : job(job), scratch(scratch), size(round_up(job.values.length(), U)), row(0) {
    const Pieces& from = job.weights;
    const bool repeat = from.grid_row_stride == 0 && from.grid_columns % W == 0;
    const bool fit = size * from.grid_columns <= (std::int64_t)kTile && from.grid_columns <= 64 * W;
    if (repeat && fit) row = from.grid_columns;
  }
  const V* of(std::int64_t first, std::int64_t lanes) {
    if (!job.weights.data) return nullptr;
    const bool whole = row && first % W == 0 && lanes == W;
    const std::int64_t number = whole ? first % row / W : 0;
    V* to = scratch.weights + number * size;
    if (whole && (loaded >> number & 1)) return to;
    load_lanes(job.weights, first, lanes, scratch.weight_rows, [&](std::int64_t i, V x) { to[i] = x; });
    loaded = whole ? loaded | std::uint64_t{1} << number : 0;
    return to;
  }
};

// Short pieces: W of them side by side, one per lane.
inline void search_lanes(const SearchJob& job, const Task& task, SearchScratch& scratch) {
  const SearchGrid grid = grid_of(job);
  Candidates& candidates = scratch.candidates;
  LaneWeights weights(job, scratch);
  for (std::int64_t first = task.first; first < task.end; first += W) {
    if (done_of(job, first) >= reach(job)) continue;
    const std::int64_t lanes = task.end - first < W ? task.end - first : W;
    Ranges ranges(job, first, lanes, false);
    V largest{};
    const auto load = [&] {
      return load_lanes(job.values, first, lanes, scratch.rows, [&](std::int64_t i, V x) {
        prepare(job, grid, x, ranges.unit, scratch, i, largest);
      });
    };
    const std::int64_t vectors = load();
    if (ranges.make_room_for(largest)) load();
    const V* of_lanes = weights.of(first, lanes);
    BestOfLanes found(job, first, lanes);
    candidates.begin = done_of(job, first);
    while (candidates.begin < (candidates.end = reach(job))) {
      fill_candidates(job, grid, ranges, candidates);
      grid.sum_errors(job, candidates,
                      {scratch.values, scratch.limits, of_lanes, vectors, true, false, found.least, 0});
      found.consider(job, candidates);
      candidates.begin = candidates.end;
    }
    found.store(job, first, lanes, candidates.end);
  }
}

// Add the errors of one tile of a piece, in a row of the scratch memory, to its sums.
inline void add_tile(const SearchJob& job, const SearchGrid& grid, SearchScratch& scratch,
                     const Candidates& candidates, std::int64_t piece, std::int64_t row,
                     std::int64_t pitch, std::int64_t begin, std::int64_t count, bool last) {
  const float* in_place = count % (U * W) ? nullptr : tile_in_place(job.values, piece, begin, count);
  float* values = scratch.rows + row * pitch;
  float* weights = scratch.weight_rows + row * pitch;
  Ranges ranges(job, piece, 1, true);
  const std::int64_t vectors = in_place ? count / W : pad_with_zeros(values, count, U * W);
  if (job.weights.data) pad_with_zeros(weights, count, U * W);
  V most{};
  const auto prepare_all = [&] {
    for (std::int64_t i = 0; i < vectors; i++) {
      const float* from = (in_place ? in_place : values) + i * W;
      prefetch(from, kTileBytes);
      prepare(job, grid, load_as<V>(from), ranges.unit, scratch, i, most);
    }
  };
  prepare_all();
  const float unit = ranges.unit[0];
  float largest = 0;
  for (int i = 0; i < W; i++) largest = most[i] > largest ? most[i] : largest;
  const bool has_room = !ranges.make_room_for(all(largest));
  if (!has_room) prepare_all();
  const double bring_back = has_room ? 1 : __builtin_pow((double)unit / ranges.unit[0], job.norm);
  fill_candidates(job, grid, ranges, candidates);
  // A piece that is cut does not know what its other chunks find, and sums in another unit cannot be
  // compared on the way.
  const bool comparable = has_room && !job.errors;
  grid.sum_errors(job, candidates,
                  {scratch.values, scratch.limits, (const V*)weights, vectors, last && comparable,
                   true, V{}, comparable ? least_of(job, piece) : 1e300});
  for (std::int64_t c = candidates.begin; c < candidates.end; c++)
    candidates.sums[c] += sum(candidates.total[c]) * bring_back;
}

// Long pieces: tile by tile, consecutive positions in the lanes. Pieces whose values lie side by
// side in memory (a transposed matrix) are read together.
inline void sum_rows(const SearchJob& job, const Task& task, std::int64_t first, std::int64_t pieces,
                     const SearchGrid& grid, SearchScratch& scratch) {
  const std::int64_t pitch = (std::int64_t)kTile / (pieces == 1 ? 1 : kLanes);
  for (std::int64_t i = 0; i < pieces * job.candidates; i++) scratch.candidates.sums[i] = 0;
  for (std::int64_t begin = task.begin; begin < task.stop; begin += pitch) {
    const std::int64_t left = task.stop - begin, count = left < pitch ? left : pitch;
    if (count % (U * W) || !tile_in_place(job.values, first, begin, count))
      load_tile(job.values, first, pieces, begin, count, scratch.rows, pitch);
    if (job.weights.data)
      load_tile(job.weights, first, pieces, begin, count, scratch.weight_rows, pitch);
    for (std::int64_t row = 0; row < pieces; row++) {
      Candidates candidates = scratch.candidates;
      candidates.sums += row * job.candidates;
      add_tile(job, grid, scratch, candidates, first + row, row, pitch, begin, count,
               left <= pitch);
    }
  }
}

inline void search_rows(const SearchJob& job, const Task& task, SearchScratch& scratch) {
  const SearchGrid grid = grid_of(job);
  const std::int64_t together = job.values.column_stride == 1 ? 1 : kLanes;
  Candidates& candidates = scratch.candidates;
  for (std::int64_t first = task.first; first < task.end; first += together) {
    const std::int64_t pieces = task.end - first < together ? task.end - first : together;
    if (job.errors) {
      candidates.begin = job.begin, candidates.end = job.end;
      sum_rows(job, task, first, pieces, grid, scratch);
      for (std::int64_t row = 0; row < pieces; row++) {
        const std::int64_t at = task.chunk * job.values.count() + first + row;
        std::memcpy(job.errors + at * (job.end - job.begin),
                    candidates.sums + row * job.candidates + job.begin,
                    (job.end - job.begin) * sizeof(double));
      }
      continue;
    }
    candidates.begin = done_of(job, first);
    while (candidates.begin < (candidates.end = reach(job))) {
      sum_rows(job, task, first, pieces, grid, scratch);
      for (std::int64_t row = 0; row < pieces; row++)
        choose(job, first + row, candidates.sums + row * job.candidates + candidates.begin,
               candidates.begin, candidates.end);
      candidates.begin = candidates.end;
    }
  }
}

// The chosen ranges, as they are stored.
struct RangesScratch {
  float *chosen, *scaled;
  RangesScratch(Arena& arena, const RangesJob& job)
      : chosen(arena.take<float>(job.cut.pieces_per_run)), scaled(arena.take<float>(job.cut.pieces_per_run)) {}
};

inline void ranges_task(const RangesJob& job, std::int64_t index, RangesScratch& scratch) {
  const Task task(job.cut, index, job.pieces, 1);
  const std::int64_t count = task.end - task.first, size = element_size(job.dtype);
  float *chosen = scratch.chosen, *scaled = scratch.scaled;
  for (std::int64_t i = 0; i < count; i++) chosen[i] = job.factors[job.best[task.first + i]];
  for (int side = 0; side < 2; side++) {
    const float* bound = (side ? job.high : job.low) + task.first;
    for (std::int64_t i = 0; i < count; i++) scaled[i] = bound[i] * chosen[i];
    for (std::int64_t i = 0; i < count; i += W) {
      const std::int64_t part = count - i < W ? count - i : W;
      const V rounded = round_to(job.dtype, take(scaled + i, part, false));
      std::memcpy(scaled + i, &rounded, part * sizeof(float));
    }
    store_values(job.dtype, scaled, count, (side ? job.end : job.start) + task.first * size);
  }
}

inline void search_task(const SearchJob& job, std::int64_t index, SearchScratch& scratch) {
  const Task task(job.cut, index, job.values.count(), job.values.length());
  if (job.values.is_short())
    search_lanes(job, task, scratch);
  else
    search_rows(job, task, scratch);
}

}  // namespace
}  // namespace calipers
