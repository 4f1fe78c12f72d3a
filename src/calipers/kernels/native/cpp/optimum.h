// The best of all scales that can be stored, of one piece at a time: candidates in the lanes.
//
// A piece looks for its best scale only where it can be. Let s be a scale.
// - From above: if doubling every code that s uses stays within the window, s/2 reaches every number
//   that s reaches, so that no error grows; `above` and `below` say from which scale on that holds
//   for positive and negative values. Where s/2 is no entry of the table (`halvable`), s is tried.
// - From below: values beyond the window err at least by their distance to its end, which only
//   grows as the scale becomes smaller. Once the sum of that is not below the best error known, no
//   smaller scale is better.
// - In between: let |·| be the norm whose power is summed up, q the quantized piece at s, and t
//   another scale. The codes of q are there at t too, so that t errs at most by
//   |x − q·t/s| ≤ |x − q| + |t/s − 1|·|q|, and |q| ≤ |x| + |x − q|. If t errs by e and s is to err by
//   less than b, then e < b + |t/s − 1|·(|x| + b): a scale that errs much rules out its neighbours.
//   (A norm below 1 is none, and rules out nothing.)
// - Of squares, where only the best scale is wanted, far more is ruled out. Let s be the best, x = q + r,
//   and n a neighbour of s in the table. The codes of s err at n by |r − (n/s − 1)·q|², a parabola in n
//   that is not below |r|² at either neighbour, since s is the best; so its vertex lies at most half
//   way to one: 2·|⟨r, q⟩| ≤ g·|q|², where g is the largest gap relative to its scale. Hence t errs
//   by at most |r − (t/s − 1)·q|² ≤ |r|² + (g·d + d²)·|q|², d = |t/s − 1|, and |q|²·(1 − g) ≤ |x|². If t
//   errs by more, s is not the best. (Where scales may overflow, a neighbour may be none to take.)
// - If there are several windows of integers, none errs less than one without ends, which thus
//   gives a largest scale for all of them.
#pragma once

#include "kept.h"
#include "optimum_tails.h"

namespace calipers {
namespace {

constexpr double kRounding = 1 + 1e-5;    // more than sums in float32 are off
constexpr float kEndless = 1e6f;          // a code that no value comes to
constexpr std::int64_t kRefinement = 8;   // how much finer each level of a search is
constexpr double kNoGap = 1;              // too large for anything to follow from it

struct OptimumScratch {
  float *rows, *weight_rows, *values, *magnitudes, *limits, *weights;  // a tile of each
  TailScratch tails;
  std::int32_t *points, *more, *merged;  // scales that were tried, that are to be, and both
  float* roots;                          // by the number of the scale
  OptimumScratch(Arena& arena, const OptimumJob& job)
      : rows(arena.take<float>(kTile)), weight_rows(arena.take<float>(kTile)),
        values(arena.take<float>(kTile)), magnitudes(arena.take<float>(kTile)),
        limits(arena.take<float>(kTile)), weights(arena.take<float>(kTile)), tails(arena),
        points(arena.take<std::int32_t>(job.scales)), more(arena.take<std::int32_t>(job.scales)),
        merged(arena.take<std::int32_t>(job.scales)), roots(arena.take<float>(job.scales)) {}
};

struct PieceSearch {
  const OptimumJob& job;
  const OptimumErrors& errors;
  const OptimumScratch& scratch;
  Tails tails;
  bool by_tails = false;          // errors come from there
  std::int64_t piece = 0;
  float unit = 1;
  bool whole = false;             // the piece fits into a tile, and is there
  const Window* window = nullptr; // that the limits in the tile are of
  double length = 0;              // |x|
  double gap = kNoGap;            // the largest between scales that are searched, relative to them
  bool may_overflow = false;      // nothing becomes more than twice as large as it is
  Kept kept{};

  PieceSearch(const OptimumJob& job, const OptimumErrors& errors, const OptimumScratch& scratch)
      : job(job), errors(errors), scratch(scratch), tails(job, scratch.tails) {}

  // Above, a sum is hopeless.
  double limit() const { return kept.worst() * kRounding; }

  // Tiles of the piece

  void load(std::int64_t begin, std::int64_t count) {
    load_tile(job.values, piece, 1, begin, count, scratch.values, count);
    if (job.weights.data) load_tile(job.weights, piece, 1, begin, count, scratch.weights, count);
    for (std::int64_t i = count; i < round_up(count, W); i++)
      scratch.values[i] = scratch.weights[i] = 0;
    for (std::int64_t i = 0; i < count; i += W) {
      const V x = finite_or_zero(load_as<V>(scratch.values + i)) * unit;
      store(scratch.values + i, x);
      store(scratch.magnitudes + i, absolute(x));
    }
  }
  void set_limits(std::int64_t count) {
    const float above = window->highest - window->zero, below = window->zero - window->lowest;
    for (std::int64_t i = 0; i < count; i += W) {
      const V x = load_as<V>(scratch.values + i);
      store(scratch.limits + i, (x < 0 ? all(below) : all(above)) + errors.offset);
    }
  }
  template <class F> void each_tile(const Window& wanted, F f) {
    const std::int64_t length = job.values.length();
    for (std::int64_t begin = 0; begin < length; begin += kTile) {
      const std::int64_t left = length - begin, count = left < (std::int64_t)kTile ? left : kTile;
      const bool loaded = !whole;
      if (loaded) load(begin, count);
      if (loaded || window != &wanted) {
        window = &wanted;
        set_limits(count);
      }
      whole = count == length;
      if (!f(count)) return;
    }
  }

  // Sums of errors

  PieceTile tile(std::int64_t count) const {
    return {scratch.values, scratch.magnitudes, scratch.limits, scratch.weights, count};
  }
  Quantizer quantizer(V scale) const {
    Quantizer by{};
    by.scale = maximum(scale * unit, all(1e-30f));
    by.inverse = reciprocal(by.scale);
    return by;
  }
  // Of M vectors of candidates; `limit` ends those that are hopeless.
  template <int M> void sum_errors(const Window& in, const float* scales, double limit, double* sums) {
    Quantizer by[M];
    each<M>([&](int k) { by[k] = quantizer(load_as<V>(scales + k * W)); });
    D low[M] = {}, high[M] = {};
    each_tile(in, [&](std::int64_t count) {
      errors.add[M / 2](job, in, tile(count), by, limit, low, high);
      return !are_hopeless(low, high, M, limit);
    });
    each<M>([&](int k) {
      store(sums + k * W, low[k]);
      store(sums + k * W + W / 2, high[k]);
    });
  }

  // The errors of `count` candidates, or at least `limit`; f gets each.
  template <class F>
  void try_each(const Window& in, const std::int32_t* indices, std::int64_t count, double limit, F f) {
    if (by_tails) {
      for (std::int64_t i = 0; i < count; i++) f(indices[i], tails.error(job.storable[indices[i]] * unit));
      return;
    }
    alignas(64) float scales[kMost * W];
    alignas(64) double sums[kMost * W];
    for (std::int64_t begin = 0; begin < count;) {
      const std::int64_t left = count - begin;
      const int vectors = left > 2 * W ? kMost : left > W ? 2 : 1;
      for (std::int64_t i = 0; i < vectors * W; i++)
        scales[i] = job.storable[indices[begin + (i < left ? i : left - 1)]];
      if (vectors == kMost) sum_errors<kMost>(in, scales, limit, sums);
      if (vectors == 2) sum_errors<2>(in, scales, limit, sums);
      if (vectors == 1) sum_errors<1>(in, scales, limit, sums);
      for (std::int64_t i = 0; i < vectors * W && i < left; i++) f(indices[begin + i], sums[i]);
      begin += vectors * W;
    }
  }

  double clip(const Window& in, float scale) {
    if (by_tails) return tails.clip(scale * unit);
    double total = 0;
    each_tile(in, [&](std::int64_t count) {
      total += errors.clipped(job, tile(count), all(scale * unit), errors.offset);
      return true;
    });
    return total;
  }

  // Whether an extremum, hence any value, becomes larger than allowed.
  bool overflows(const Window& in, float scale) const {
    if (!may_overflow) return false;
    V x{}, limit{};
    x[0] = (job.shifted ? job.low[piece] : -job.low[piece]) * unit;
    x[1] = job.high[piece] * unit;
    limit[0] = in.zero - in.lowest + errors.offset;
    limit[1] = in.highest - in.zero + errors.offset;
    const V value = absolute(x - errors.single(in, x, limit, quantizer(all(scale))));
    return !(value[0] <= job.most * unit && value[1] <= job.most * unit);
  }

  // Where in the table a window is to be searched

  // The first scale that is not below.
  std::int64_t index_of(float scale) const {
    std::int64_t low = 0, high = job.scales;
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      if (job.storable[middle] < scale)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  std::int64_t top_of(const Window& in) const {
    const float above = job.high[piece] * in.above, below = -job.low[piece] * in.below;
    const float dominated = (above > below ? above : below) * 1.0001f;
    const std::int64_t top = index_of(dominated > job.halvable ? dominated : job.halvable);
    return top > 0 ? top : 1;
  }
  // The scale at which no value is beyond the ends.
  float covering_scale(const Window& in) const {
    const float above = in.highest - in.zero, below = in.zero - in.lowest;
    const float high = job.high[piece] > 0 ? job.high[piece] / (above > 0 ? above : 1e-3f) : 0;
    const float low = job.low[piece] < 0 ? -job.low[piece] / (below > 0 ? below : 1e-3f) : 0;
    return high > low ? high : low;
  }

  // Which scales one that was tried rules out

  double root_of(double sum) const {
    return job.norm == 2 ? __builtin_sqrt(sum) : __builtin_pow(sum, 1 / (double)job.norm);
  }
  // |t/s − 1| up to which the scale t of a root rules out others, if the best errs by less than `best`.
  struct Radius {
    double best, by_norm, by_square, gap;
    Radius(const PieceSearch& of, double best)
        : best(best), by_norm(of.job.norm < 1 ? 0 : 1 / (of.length + best)),
          by_square(of.gap < kNoGap ? (1 - of.gap) / (of.length * of.length) : 0), gap(of.gap) {}
    double operator()(float found) const {
      const double root = found * (1 - 4e-6);
      if (root <= best) return 0;
      const double more = (root * root - best * best) * by_square;
      const double square = (__builtin_sqrt(gap * gap + 4 * more) - gap) / 2, norm = (root - best) * by_norm;
      return norm > square ? norm : square;
    }
  };
  // The largest gap between scales from one point to another: those between them have neighbours.
  double gap_between(std::int64_t first, std::int64_t last) const {
    if (job.norm != 2 || job.kept > 1 || may_overflow || last < W) return kNoGap;
    V largest{};
    for (std::int64_t i = first; i < last; i += W) {
      const std::int64_t at = i < last - W ? i : last - W;
      const V here = load_as<V>(job.storable + at) * unit, next = load_as<V>(job.storable + at + 1) * unit;
      largest = maximum(largest, (next - here) / here);
    }
    float found = 0;
    for (int i = 0; i < W; i++) found = largest[i] > found ? largest[i] : found;
    return found * (1 + 1e-6);
  }
  // The scales between two points, `stride` apart, that are out of reach of both radii. Returns how
  // many are noted by then.
  std::int64_t note_open(std::int32_t from, double below, std::int32_t to, double above,
                         std::int64_t stride, std::int64_t noted) {
    // In the unit of the piece: 1 / a denormal scale is no float.
    const double first = (double)job.storable[from] * unit, last = (double)job.storable[to] * unit;
    if (first * (1 + above) >= last * (1 - below) * (1 + 1e-6)) return noted;
    const float after = (float)((1 - below) / first) * (1 + 1e-6f);
    const float before = (float)((1 + above) / last) * (1 - 1e-6f);
    for (std::int64_t i = from + 1; i < to; i += W) {
      const V scale = load_as<V>(job.storable + i) * unit;
      std::uint32_t open = lane_bits((scale * after > 1) & (scale * before < 1));
      if (to - i < W) open &= (1u << (to - i)) - 1;
      for (; open; open &= open - 1) {
        const std::int64_t k = i + __builtin_ctz(open);
        if (((k - from) & (stride - 1)) == 0) scratch.more[noted++] = (std::int32_t)k;
      }
    }
    return noted;
  }

  // The search

  // How far apart in the table the scales are that are tried first: less than 2·W to an octave, or
  // twice as many as are kept. Were they fewer, bad ones would be kept, which rule out nothing.
  std::int64_t coarse_stride(std::int64_t top) const {
    const std::int64_t octave = top - 1 - index_of(job.storable[top - 1] / 2);
    const std::int64_t most = 2 * (job.kept < W ? W : job.kept);
    std::int64_t stride = 1;
    while (stride * most <= octave) stride *= kRefinement;
    return stride;
  }
  // Try every scale `stride` apart from `top` downwards, until values beyond the ends rule out the
  // rest. Returns how many; their numbers are the points, ascending.
  template <class F> std::int64_t descend(const Window& in, std::int64_t top, std::int64_t stride, F f) {
    std::int64_t count = 0;
    for (std::int64_t next = top - 1; next >= 0;) {
      std::int32_t indices[W];
      std::int64_t size = 0;
      const int together = by_tails ? 4 : W;  // one by one, there are no lanes to fill
      for (; size < together && next >= 0; next -= stride) indices[size++] = (std::int32_t)next;
      try_each(in, indices, size, limit(), [&](std::int32_t index, double error) {
        scratch.roots[index] = (float)root_of(error);
        f(index, error);
      });
      for (std::int64_t i = 0; i < size; i++) scratch.points[count++] = indices[i];
      if (clip(in, job.storable[indices[size - 1]]) >= limit()) break;
      if (next < 0 && indices[size - 1] > 0) next = 0;
    }
    for (std::int64_t i = 0; i < count / 2; i++) {
      const std::int32_t point = scratch.points[i];
      scratch.points[i] = scratch.points[count - 1 - i];
      scratch.points[count - 1 - i] = point;
    }
    return count;
  }

  // Which of the scales between points, `stride` apart, are not ruled out. Returns how many.
  std::int64_t open_scales(std::int64_t count, std::int64_t stride) {
    const Radius radius(*this, root_of(limit()));
    std::int64_t found = 0;
    double below = radius(scratch.roots[scratch.points[0]]);
    for (std::int64_t i = 0; i + 1 < count; i++) {
      const std::int32_t from = scratch.points[i], to = scratch.points[i + 1];
      const double above = radius(scratch.roots[to]);
      found = note_open(from, below, to, above, stride, found);
      below = above;
    }
    return found;
  }
  std::int64_t merge_points(std::int64_t count, std::int64_t found) {
    for (std::int64_t i = 0, k = 0; i + k < count + found;) {
      const bool old = k == found || (i < count && scratch.points[i] < scratch.more[k]);
      scratch.merged[i + k] = old ? scratch.points[i] : scratch.more[k];
      (old ? i : k)++;
    }
    std::memcpy(scratch.points, scratch.merged, (count + found) * sizeof(std::int32_t));
    return count + found;
  }

  void search_window(std::int32_t number, std::int64_t top) {
    const Window& in = job.windows[number];
    const auto take = [&](std::int32_t index, double error) {
      if (!overflows(in, job.storable[index])) kept.take(job.storable[index], number, error);
    };
    std::int64_t stride = coarse_stride(top);
    std::int64_t count = descend(in, top, stride, take);
    gap = gap_between(scratch.points[0], scratch.points[count - 1]);
    while (stride > 1) {
      stride /= kRefinement;
      const std::int64_t found = open_scales(count, stride), step = kMost * W;
      for (std::int64_t i = 0; i < found; i += step)
        try_each(in, scratch.more + i, found - i < step ? found - i : step, limit(),
                 [&](std::int32_t index, double error) {
                   scratch.roots[index] = (float)root_of(error);
                   take(index, error);
                 });
      if (stride > 1) count = merge_points(count, found);
    }
  }

  // The scale from which on even a window without ends errs more than the best known.
  std::int64_t ceiling() {
    static constexpr Window endless{0, -kEndless, kEndless, 0, 0};
    std::int64_t top = 1;
    for (std::int64_t i = 0; i < job.window_count; i++) {
      const std::int64_t of_window = top_of(job.windows[i]);
      top = of_window > top ? of_window : top;
    }
    while (top > 1) {
      std::int64_t size = 0, lowest = top;
      for (; size < kMost * W && lowest > 0; size++) scratch.more[size] = (std::int32_t)--lowest;
      std::int64_t found = 0;
      try_each(endless, scratch.more, size, limit(), [&](std::int32_t index, double error) {
        if (error < limit() && index >= found) found = index + 1;
      });
      if (found) return found;
      top = lowest;
    }
    return 1;
  }

  void search_windows() {
    std::int32_t first = 0;
    for (std::int32_t i = 1; i < job.window_count; i++)
      if (covering_scale(job.windows[i]) < covering_scale(job.windows[first])) first = i;
    length = root_of(by_tails ? tails.squares() : clip(job.windows[first], 0));
    search_window(first, top_of(job.windows[first]));
    const std::int64_t most = job.windows_have_floor ? ceiling() : job.scales;
    for (std::int32_t i = 0; i < job.window_count; i++) {
      const Window& in = job.windows[i];
      const std::int64_t top = top_of(in) < most ? top_of(in) : most;
      if (i != first && clip(in, job.storable[top - 1]) < limit()) search_window(i, top);
    }
  }

  void search(std::int64_t number) {
    piece = number;
    const V largest = larger_magnitude(all(job.low[piece]), all(job.high[piece]));
    unit = unit_of(largest)[0];
    may_overflow = !(largest[0] <= job.most / 2);
    whole = false;
    window = nullptr;
    const std::int64_t at = piece * job.kept;
    kept = {job.best + at, job.window + at, job.errors + at, job.kept, 0};
    if (largest[0] == 0) {
      kept.take(0, 0, 0);
    } else {
      const float covering = covering_scale(job.windows[0]);
      by_tails = !may_overflow && tails.make(piece, largest[0], covering, unit, scratch.values,
                                             scratch.weights, scratch.limits);
      search_windows();
      if (by_tails && !tails.are_trusted(kept.errors[0])) {
        by_tails = false;
        kept.count = 0;
        search_windows();
      }
    }
    bring_back();
  }

  // Errors are in the unit of the piece until here.
  void bring_back() {
    const double measure = __builtin_pow(1.0 / unit, job.norm);
    for (std::int64_t i = 0; i < kept.count; i++) kept.errors[i] *= measure;
    kept.fill_up();
  }
};

}  // namespace
}  // namespace calipers
