// The best of all scales that can be stored, where those are few and pieces are short: W pieces side
// by side, one per lane. Each tries its scales one by one, from the largest that can matter down to
// where values beyond the ends rule out the rest; optimum.h proves that nothing is missed.
#pragma once

#include "optimum.h"
#include "transposed.h"

namespace calipers {
namespace {

// The best candidates of each lane; those that are not there have an error that none has.
struct KeptLanes {
  static constexpr std::int64_t most = kMostKeptLanes;
  V errors[most], scales[most];
  I windows[most];
  std::int64_t size;
  explicit KeptLanes(std::int64_t size) : size(size) {
    for (std::int64_t i = 0; i < size; i++) errors[i] = all(kNone), scales[i] = V{}, windows[i] = I{};
  }
  V worst() const { return errors[size - 1]; }
  void take(V error, V scale, I window) {
    for (std::int64_t i = 0; i < size; i++) {
      const I better = error < errors[i];
      if (!any(better)) continue;
      exchange(better, error, errors[i]);
      exchange(better, scale, scales[i]);
      exchange(better, window, windows[i]);
    }
  }
  template <class T> static void exchange(I where, T& a, T& b) {
    const T kept = where ? a : b;
    a = where ? b : a, b = kept;
  }
  Kept of_lane(const OptimumJob& job, std::int64_t piece, std::int64_t lane, double measure) const {
    const std::int64_t at = piece * size;
    Kept kept{job.best + at, job.window + at, job.errors + at, size, 0};
    for (; kept.count < size && errors[kept.count][lane] < kNone; kept.count++) {
      kept.scales[kept.count] = scales[kept.count][lane];
      kept.windows[kept.count] = windows[kept.count][lane];
      kept.errors[kept.count] = errors[kept.count][lane] * measure;
    }
    return kept;
  }
  static constexpr float kNone = 3e38f;
};

struct LaneSearch {
  const OptimumJob& job;
  const OptimumErrors& errors;
  const OptimumScratch& scratch;
  V low, high, unit;
  std::int64_t vectors;
  KeptLanes kept;

  LaneSearch(const OptimumJob& job, const OptimumErrors& errors, const OptimumScratch& scratch,
             std::int64_t first, std::int64_t lanes)
      : job(job), errors(errors), scratch(scratch), low(take(job.low + first, lanes, false)),
        high(take(job.high + first, lanes, false)), unit(unit_of(larger_magnitude(low, high))),
        kept(job.kept) {
    load(first, lanes);
  }

  void load(std::int64_t first, std::int64_t lanes) {
    V *values = (V*)scratch.values, *magnitudes = (V*)scratch.magnitudes, *weights = (V*)scratch.weights;
    vectors = load_lanes(job.values, first, lanes, scratch.rows, [&](std::int64_t i, V x) {
      values[i] = finite_or_zero(x) * unit;
      magnitudes[i] = absolute(values[i]);
    });
    if (!job.weights.data) return;
    load_lanes(job.weights, first, lanes, scratch.weight_rows, [&](std::int64_t i, V x) { weights[i] = x; });
  }

  void set_limits(const Window& in) {
    V *values = (V*)scratch.values, *limits = (V*)scratch.limits;
    const V above = all(in.highest + errors.offset), below = all(errors.offset - in.lowest);
    for (std::int64_t i = 0; i < vectors; i++) limits[i] = values[i] < 0 ? below : above;
  }

  // How many scales are below.
  I index_of(V scale) const {
    I found{};
    std::int64_t step = 1;
    while (step * 2 <= job.scales) step *= 2;
    for (; step; step /= 2) {
      const I next = found + (std::int32_t)step;
      const I there = next <= (std::int32_t)job.scales;
      const V entry = gather(job.storable, there ? next - 1 : I{});
      found = there & (entry < scale) ? next : found;
    }
    return found;
  }
  I top_of(const Window& in) const {
    const V dominated = maximum(high * in.above, -low * in.below) * 1.0001f;
    const I top = index_of(maximum(dominated, all(job.halvable)));
    return top > 0 ? top : all_bits(1);
  }
  // The scale, in the unit, at which no value is beyond the ends.
  V covering_scale(const Window& in) const {
    const float above = in.highest > 0 ? in.highest : 1e-3f, below = in.lowest < 0 ? -in.lowest : 1e-3f;
    return maximum(high * unit / above, -low * unit / below);
  }

  void search(std::int32_t number) {
    const Window& in = job.windows[number];
    set_limits(in);
    const LaneTile tile{(const V*)scratch.magnitudes, (const V*)scratch.limits,
                        (const V*)scratch.weights, vectors};
    const V covering = covering_scale(in) * 1.0001f;
    I index = top_of(in) - 1, open = all_bits(-1);
    for (;; index -= 1) {
      open &= (index >= 0) & (kept.worst() > 0);
      if (!any(open)) return;
      const V scale = gather(job.storable, open ? index : I{});
      Quantizer by{};
      by.scale = maximum(scale * unit, all(1e-30f));
      by.inverse = reciprocal(by.scale);
      if (any(open & (by.scale < covering))) {
        open &= errors.clipped_of_lanes(job, tile, by.scale, errors.offset) < kept.worst() * (float)kRounding;
        if (!any(open)) return;
      }
      const V error = errors.of_lanes(job, in, tile, by);
      kept.take(open ? error : all(KeptLanes::kNone), scale, all_bits(number));
    }
  }

  void store(std::int64_t first, std::int64_t lanes) const {
    for (std::int64_t lane = 0; lane < lanes; lane++) {
      const double unit_of_lane = unit[lane];
      const double measure = job.norm == 2 ? 1 / (unit_of_lane * unit_of_lane)
                                           : __builtin_pow(1 / unit_of_lane, job.norm);
      Kept found = kept.of_lane(job, first + lane, lane, measure);
      if (low[lane] == 0 && high[lane] == 0) found.count = 0;
      found.fill_up();
    }
  }
};

inline void search_lanes(const OptimumJob& job, const Task& task, const OptimumErrors& errors,
                         const OptimumScratch& scratch) {
  PieceSearch one_by_one(job, errors, scratch);
  for (std::int64_t first = task.first; first < task.end; first += W) {
    const std::int64_t lanes = task.end - first < W ? task.end - first : W;
    LaneSearch search(job, errors, scratch, first, lanes);
    if (any(larger_magnitude(search.low, search.high) > job.most / 2)) {  // may overflow
      for (std::int64_t i = 0; i < lanes; i++) one_by_one.search(first + i);
      continue;
    }
    for (std::int32_t i = 0; i < job.window_count; i++) search.search(i);
    search.store(first, lanes);
  }
}

inline void optimum_task(const OptimumJob& job, std::int64_t index, OptimumScratch& scratch) {
  const Task task(job.cut, index, job.values.count(), job.values.length());
  const OptimumErrors errors = errors_by(job);
  if (job.in_lanes) return search_lanes(job, task, errors, scratch);
  PieceSearch search(job, errors, scratch);
  for (std::int64_t piece = task.first; piece < task.end; piece++) search.search(piece);
}

}  // namespace
}  // namespace calipers
