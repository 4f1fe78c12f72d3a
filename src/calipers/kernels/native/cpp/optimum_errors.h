// What the search of all storable scales asks of its grid and its norm: sums of errors, of one piece
// with candidates in the lanes, or of a piece in each lane.
#pragma once

#include "grid.h"

namespace calipers {
namespace {

constexpr int kMost = 4;                  // vectors of candidates that are tried together
constexpr std::int64_t kFlush = 512;      // values after which sums go from float to double

// A tile of a piece: values and limits as the grid takes them, and the ends that they are of.
struct PieceTile {
  const float *values, *magnitudes, *limits, *weights;
  std::int64_t count;
};

// Errors of one value under several candidates.
template <class Grid, int M>
[[gnu::always_inline]] inline void errors_of(const Window& in, V x, V limit, const Quantizer* by,
                                             V (&error)[M]) {
  const V end = Grid::has_limits ? limit : all(in.highest + Grid::offset);
  Grid::template errors<M>(
      [&](int) { return x; }, [&](int i) -> const Quantizer& { return by[i]; },
      [&](int) { return end; }, all(in.zero), all(in.lowest + Grid::offset), error);
}

template <int M> bool are_hopeless(const V (&total)[M], double limit) {
  const V most = all(limit < 1e38 ? (float)limit : 1e38f);
  I below = total[0] < most;
  for (int k = 1; k < M; k++) below |= total[k] < most;
  return !any(below);
}
inline bool are_hopeless(const D* low, const D* high, int vectors, double limit) {
  for (int k = 0; k < vectors; k++)
    for (int i = 0; i < W / 2; i++)
      if (low[k][i] < limit || high[k][i] < limit) return false;
  return true;
}

// Add the errors in a tile under M vectors of candidates to their sums, until all are hopeless.
template <class Grid, class Norm, bool weighted, int M>
void add_errors(const OptimumJob& job, const Window& in, const PieceTile& tile, const Quantizer* by,
                double limit, D* low, D* high) {
  const Norm norm(job.power);
  const float* values = Grid::shifted ? tile.values : tile.magnitudes;
  for (std::int64_t flush = 0; flush < tile.count; flush += kFlush) {
    V total[M] = {};
    const std::int64_t stop = tile.count - flush < kFlush ? tile.count : flush + kFlush;
    for (std::int64_t begin = flush; begin < stop; begin += kBlock) {
      const std::int64_t end = stop - begin < kBlock ? stop : begin + kBlock;
      V part[M] = {};
      for (std::int64_t i = begin; i < end; i++) {
        V error[M];
        errors_of<Grid, M>(in, all(values[i]), all(tile.limits[i]), by, error);
        norm.apply(error);
        each<M>([&](int k) { part[k] += weighted ? all(tile.weights[i]) * error[k] : error[k]; });
      }
      each<M>([&](int k) { total[k] += part[k]; });
      if (end < tile.count && are_hopeless(total, limit)) break;
    }
    each<M>([&](int k) { low[k] += lower_doubles(total[k]), high[k] += upper_doubles(total[k]); });
    if (are_hopeless(low, high, M, limit)) return;
  }
}

// What values beyond the ends of a window err by at least. Limits come with `offset`.
template <class Norm, bool weighted>
double clipped_errors(const OptimumJob& job, const PieceTile& tile, V ends, float offset) {
  const Norm norm(job.power);
  double total = 0;
  for (std::int64_t begin = 0; begin < tile.count; begin += kBlock * W) {
    V part{};
    for (std::int64_t i = begin; i < tile.count && i < begin + kBlock * W; i += W) {
      const V limit = load_as<V>(tile.limits + i) - offset;
      V beyond[1] = {maximum(load_as<V>(tile.magnitudes + i) - limit * ends, V{})};
      norm.apply(beyond);
      part += weighted ? load_as<V>(tile.weights + i) * beyond[0] : beyond[0];
    }
    total += sum(part);
  }
  return total;
}

template <class Grid> V single_errors(const Window& in, V x, V limit, const Quantizer& by) {
  V error[1];
  errors_of<Grid, 1>(in, x, limit, &by, error);
  return error[0];
}

// Pieces side by side, one per lane. Values come without their sign.
struct LaneTile {
  const V *magnitudes, *limits, *weights;
  std::int64_t vectors;  // a multiple of U
};

template <class Grid, class Norm, bool weighted>
V lane_errors(const OptimumJob& job, const Window& in, const LaneTile& tile, const Quantizer& by) {
  const Norm norm(job.power);
  const V highest = all(in.highest + Grid::offset), lowest = all(in.lowest + Grid::offset);
  V part[U] = {};
  for (std::int64_t i = 0; i < tile.vectors; i += U) {
    V error[U];
    Grid::template errors<U>(
        [&](int k) { return tile.magnitudes[i + k]; }, [&](int) -> const Quantizer& { return by; },
        [&](int k) { return Grid::has_limits ? tile.limits[i + k] : highest; }, V{}, lowest, error);
    norm.apply(error);
    each([&](int k) { part[k] += weighted ? tile.weights[i + k] * error[k] : error[k]; });
  }
  for (int k = 1; k < U; k++) part[0] += part[k];
  return part[0];
}

template <class Norm, bool weighted>
V lane_clipped_errors(const OptimumJob& job, const LaneTile& tile, V ends, float offset) {
  const Norm norm(job.power);
  V part[U] = {};
  for (std::int64_t i = 0; i < tile.vectors; i += U) {
    V beyond[U];
    each([&](int k) {
      beyond[k] = maximum(tile.magnitudes[i + k] - (tile.limits[i + k] - offset) * ends, V{});
    });
    norm.apply(beyond);
    each([&](int k) { part[k] += weighted ? tile.weights[i + k] * beyond[k] : beyond[k]; });
  }
  for (int k = 1; k < U; k++) part[0] += part[k];
  return part[0];
}

struct OptimumErrors {
  using Add = void (*)(const OptimumJob&, const Window&, const PieceTile&, const Quantizer*, double,
                       D*, D*);
  Add add[3];  // of 1, 2 and 4 vectors of candidates
  double (*clipped)(const OptimumJob&, const PieceTile&, V, float);
  V (*single)(const Window&, V, V, const Quantizer&);
  V (*of_lanes)(const OptimumJob&, const Window&, const LaneTile&, const Quantizer&);
  V (*clipped_of_lanes)(const OptimumJob&, const LaneTile&, V, float);
  float offset;
};

template <class Grid, class Norm, bool weighted> OptimumErrors errors_by() {
  OptimumErrors found{{add_errors<Grid, Norm, weighted, 1>, add_errors<Grid, Norm, weighted, 2>,
                       add_errors<Grid, Norm, weighted, kMost>},
                      clipped_errors<Norm, weighted>,
                      single_errors<Grid>,
                      nullptr,
                      lane_clipped_errors<Norm, weighted>,
                      Grid::offset};
  if constexpr (!Grid::shifted) found.of_lanes = lane_errors<Grid, Norm, weighted>;
  return found;
}

template <class Grid> OptimumErrors errors_by(const OptimumJob& job) {
  const bool weighted = job.weights.data;
  if (job.norm == 2) return weighted ? errors_by<Grid, Square, true>() : errors_by<Grid, Square, false>();
  return weighted ? errors_by<Grid, AnyPower<true>, true>() : errors_by<Grid, AnyPower<true>, false>();
}

inline OptimumErrors errors_by(const OptimumJob& job) {
  OptimumErrors found{};
  with_grid(job.grid, job.shifted, [&](auto grid) {
    using Grid = decltype(grid);
    // Of a uniform grid, a zero point has moved the window.
    if constexpr (!(Grid::shifted && Grid::uniform)) found = errors_by<Grid>(job);
  });
  return found;
}

}  // namespace
}  // namespace calipers
