// Error feedback and descent under a Hessian. Rows know nothing of each other: they are in the lanes.
// A column is done at a time, since each waits for the one before.
#pragma once

#include "arena.h"
#include "lanes.h"

namespace calipers {
namespace {

// Rows [first, first + count) of a matrix.
struct RowSet {
  std::int64_t index[kRowsInStep];
  std::int64_t count;
  void pointers(float* matrix, std::int64_t pitch, float** to) const {
    for (std::int64_t i = 0; i < count; i++) to[i] = matrix + index[i] * pitch;
  }
};

// `values`: adjusted to the columns before, and then what becomes of them; `errors`: the target, and
// then how far that is from it.
template <class Grid>
void feed_back(const FeedbackJob& job, const RowSet& rows, V* values, V* errors) {
  const V lowest = all(job.scaling.lowest), highest = all(job.scaling.highest);
  const std::int64_t* groups = job.scaling.groups;
  Divisors by(job.scaling, rows.index, rows.count, groups[0]);
  for (std::int64_t j = 0; j < job.columns; j++) {
    if (j && groups[j] != groups[j - 1])
      by = Divisors(job.scaling, rows.index, rows.count, groups[j]);
    V error[U];
    each([&](int i) {
      const V rounded = by.round<Grid>(i, values[j * U + i], lowest, highest);
      values[j * U + i] = rounded;
      errors[j * U + i] = error[i] = errors[j * U + i] - rounded;
    });
    const float* factor = job.factor + j * job.pitch;
    for (std::int64_t k = j + 1; k < job.columns; k++)
      each([&](int i) { values[k * U + i] += error[i] * factor[k]; });
  }
}

inline auto feed_back_of(std::size_t row) {
  decltype(&feed_back<Grid<Integers, false>>) found = nullptr;
  with_grid(row, false, [&](auto grid) { found = feed_back<decltype(grid)>; });
  return found;
}

struct FeedbackScratch {
  V *values, *errors;  // kRowsInStep rows of the block
  FeedbackScratch(Arena& arena, const FeedbackJob& job)
      : values(arena.take<V>(job.columns * U)), errors(arena.take<V>(job.columns * U)) {}
};

inline void feedback_task(const FeedbackJob& job, std::int64_t task, FeedbackScratch& scratch) {
  const auto feed_back = feed_back_of(job.scaling.grid);
  V *values = scratch.values, *errors = scratch.errors;
  const std::int64_t end = (task + 1) * job.cut.pieces_per_run;
  const std::int64_t stop = end < job.rows ? end : job.rows;
  for (std::int64_t row = task * job.cut.pieces_per_run; row < stop; row += kRowsInStep) {
    RowSet rows{{}, stop - row < kRowsInStep ? stop - row : kRowsInStep};
    for (std::int64_t i = 0; i < rows.count; i++) rows.index[i] = row + i;
    float* places[kRowsInStep];
    rows.pointers(job.adjusted, job.columns, places);
    to_lanes(places, rows.count, job.columns, values);
    rows.pointers(const_cast<float*>(job.target), job.pitch, places);
    to_lanes(places, rows.count, job.columns, errors);
    feed_back(job, rows, values, errors);
    rows.pointers(job.result, job.pitch, places);
    from_lanes(values, rows.count, job.columns, places);
    rows.pointers(job.errors, job.pitch, places);
    from_lanes(errors, rows.count, job.columns, places);
  }
}

// Descent. A block of columns is gone through for all rows of a task; what changed is then added to
// the pull on all other columns, a strip at a time, for which the Hessian stays in the cache.

constexpr std::int64_t kStripColumns = 1024;

// The changes of one row within a block.
struct Changes {
  std::int32_t count;
  std::int32_t* columns;
  float* steps;
};

// Returns whether any value changed; `steps` are by how much.
template <class Grid>
bool descend(const DescentJob& job, const RowSet& rows, std::int64_t begin, std::int64_t columns,
             V* values, V* pulls, V* steps) {
  const V lowest = all(job.scaling.lowest), highest = all(job.scaling.highest);
  const std::int64_t* groups = job.scaling.groups + begin;
  Divisors by(job.scaling, rows.index, rows.count, groups[0]);
  I changed{};
  for (std::int64_t j = 0; j < columns; j++) {
    if (j && groups[j] != groups[j - 1])
      by = Divisors(job.scaling, rows.index, rows.count, groups[j]);
    const float* hessian = job.hessian + (begin + j) * job.columns + begin;
    const float curvature = hessian[j];
    each([&](int i) { steps[j * U + i] = V{}; });
    if (!(curvature > 0)) continue;
    I moved{};
    V step[U];
    each([&](int i) {
      const V now = values[j * U + i], pull = pulls[j * U + i];
      const V best = by.round<Grid>(i, now - pull / curvature, lowest, highest);
      const V way = best - now;
      const I gains = way * (way * curvature + 2 * pull) < -job.least_gain * (way * way * curvature);
      step[i] = gains ? way : V{};
      values[j * U + i] = gains ? best : now;
      moved |= gains;
    });
    if (!any(moved)) continue;
    changed |= moved;
    each([&](int i) { steps[j * U + i] = step[i]; });
    for (std::int64_t k = 0; k < columns; k++)
      each([&](int i) { pulls[k * U + i] += step[i] * hessian[k]; });
  }
  return any(changed);
}

inline auto descend_of(std::size_t row) {
  decltype(&descend<Grid<Integers, false>>) found = nullptr;
  with_grid(row, false, [&](auto grid) { found = descend<decltype(grid)>; });
  return found;
}

// pulls[begin, end) += Σ step · H
inline void add_changes(const DescentJob& job, const Changes& changes, float* pulls,
                        std::int64_t begin, std::int64_t end) {
  constexpr int together = 4;
  std::int64_t at = begin;
  for (; at + together * W <= end; at += together * W) {
    V sum[together];
    each<together>([&](int i) { sum[i] = load_as<V>(pulls + at + i * W); });
    for (std::int32_t c = 0; c < changes.count; c++) {
      const float* hessian = job.hessian + changes.columns[c] * job.columns + at;
      each<together>([&](int i) { sum[i] += changes.steps[c] * load_as<V>(hessian + i * W); });
    }
    each<together>([&](int i) { store(pulls + at + i * W, sum[i]); });
  }
  for (; at < end; at++)
    for (std::int32_t c = 0; c < changes.count; c++)
      pulls[at] += changes.steps[c] * job.hessian[changes.columns[c] * job.columns + at];
}

// What a task remembers of its rows.
struct Descent {
  V *values, *pulls, *steps;            // of one block, kRowsInStep rows
  std::int64_t* active;                 // rows in which the last sweep changed something
  std::uint8_t* moved;                  // of these, whether this sweep did
  Changes* changes;                     // of these, within the block
  float* change_steps;                  // [rows][block], what the changes point to
  std::int32_t* change_columns;
  Descent(Arena& arena, const DescentJob& job) {
    const std::int64_t rows = job.cut.pieces_per_run;
    values = arena.take<V>(job.block * U), pulls = arena.take<V>(job.block * U);
    steps = arena.take<V>(job.block * U);
    active = arena.take<std::int64_t>(rows);
    moved = arena.take<std::uint8_t>(rows);
    changes = arena.take<Changes>(rows);
    change_steps = arena.take<float>(rows * job.block);
    change_columns = arena.take<std::int32_t>(rows * job.block);
  }
};

// One block of the active rows.
template <class Kernel>
void descend_block(const DescentJob& job, Kernel kernel, const Descent& own, std::int64_t active,
                   std::int64_t begin, std::int64_t columns, std::int64_t& total) {
  for (std::int64_t first = 0; first < active; first += kRowsInStep) {
    RowSet rows{{}, active - first < kRowsInStep ? active - first : kRowsInStep};
    float *values[kRowsInStep], *pulls[kRowsInStep];
    for (std::int64_t i = 0; i < rows.count; i++) {
      rows.index[i] = own.active[first + i];
      own.changes[first + i].count = 0;
    }
    rows.pointers(job.values + begin, job.columns, values);
    rows.pointers(job.pulls + begin, job.columns, pulls);
    to_lanes(values, rows.count, columns, own.values);
    to_lanes(pulls, rows.count, columns, own.pulls);
    if (!kernel(job, rows, begin, columns, own.values, own.pulls, own.steps)) continue;
    from_lanes(own.values, rows.count, columns, values);
    from_lanes(own.pulls, rows.count, columns, pulls);
    for (std::int64_t j = 0; j < columns; j++)
      each([&](int v) {
        const V step = own.steps[j * U + v];
        for (std::uint32_t bits = lane_bits(step != 0); bits; bits &= bits - 1) {
          const int lane = __builtin_ctz(bits);
          Changes& changes = own.changes[first + v * W + lane];
          changes.columns[changes.count] = static_cast<std::int32_t>(begin + j);
          changes.steps[changes.count++] = step[lane];
        }
      });
    for (std::int64_t i = first; i < first + rows.count; i++) {
      own.moved[i] |= own.changes[i].count > 0;
      total += own.changes[i].count;
    }
  }
  const auto pass_on = [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t strip = from; strip < to; strip += kStripColumns)
      for (std::int64_t i = 0; i < active; i++)
        if (own.changes[i].count)
          add_changes(job, own.changes[i], job.pulls + own.active[i] * job.columns, strip,
                      strip + kStripColumns < to ? strip + kStripColumns : to);
  };
  pass_on(0, begin);
  pass_on(begin + columns, job.columns);
}

inline void descent_task(const DescentJob& job, std::int64_t task, Descent& own) {
  const auto kernel = descend_of(job.scaling.grid);
  const std::int64_t first = task * job.cut.pieces_per_run, left = job.rows - first;
  std::int64_t active = left < job.cut.pieces_per_run ? left : job.cut.pieces_per_run;
  for (std::int64_t i = 0; i < active; i++) {
    own.active[i] = first + i;
    own.changes[i] = {0, own.change_columns + i * job.block, own.change_steps + i * job.block};
  }
  std::int64_t total = 0;
  for (std::int64_t sweep = 0; sweep < job.sweeps && active; sweep++) {
    std::memset(own.moved, 0, active);
    for (std::int64_t begin = 0; begin < job.columns; begin += job.block) {
      const std::int64_t rest = job.columns - begin;
      descend_block(job, kernel, own, active, begin, rest < job.block ? rest : job.block, total);
    }
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < active; i++)
      if (own.moved[i]) own.active[kept++] = own.active[i];
    active = kept;
  }
  job.changed[task] = total;
}

}  // namespace
}  // namespace calipers
