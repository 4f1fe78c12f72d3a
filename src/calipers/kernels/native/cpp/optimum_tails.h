// Squared errors of a piece of a 16-bit dtype, without going through its values.
//
// Let g < g' be neighbouring numbers of a grid, in the middle between which m lies. At a scale s, the
// values beyond m·s have a number that is at least g'. With X = Σ w·x² the error is X − 2·s·L + s²·Q,
// where L = Σ w·|x|·g and Q = Σ w·g², and both are sums over the steps from one number to the next:
//   L = Σ (g' − g) · Σ w·|x|,  Q = Σ (g'² − g²) · Σ w,  each inner sum over the values beyond m·s.
// Values of 16 bits are few, so that these inner sums, of which there is one for each value, are made
// once; a scale then takes a look at them per step. (A value at m·s itself errs alike with g and g'.)
//
// What is lost to rounding is some 10⁻¹⁵ of X, so that errors are only trusted where they are not much
// smaller than X; and only values down to a floor are told apart, so that no scale must be too small.
#pragma once

#include "arena.h"
#include "optimum_errors.h"
#include "tile.h"

namespace calipers {
namespace {

constexpr double kTrusted = 1e-7;          // of X
constexpr float kLowestTold = 0.125f;      // of the scale that covers all values
constexpr std::int64_t kWorthTelling = 4;  // times as many sums as values

typedef double Pair __attribute__((vector_size(16)));  // of Σ w·|x| and Σ w; of L and Q

// Σ w·x² of the values that are larger than one, and the two that errors are made of.
struct Tail {
  double* squares;
  Pair* sums;
};

struct TailScratch {
  double *positive, *negative;  // the weight of each value; both in one region, reached from `positive`
  Tail both, below;             // of all values, and of the negative ones
  explicit TailScratch(Arena& arena)
      : positive(arena.take<double>(2 * kMostTails)), negative(positive ? positive + kMostTails : nullptr),
        both{arena.take<double>(kMostTails), arena.take<Pair>(kMostTails)},
        below{arena.take<double>(kMostTails), arena.take<Pair>(kMostTails)} {}
};

class Tails {
 public:
  Tails(const OptimumJob& job, const TailScratch& scratch) : job_(job), scratch_(scratch) {
    const bool floats16 = job.values.dtype != DType::f32;
    usable_ = floats16 && job.norm == 2 && job.window_count == 1 && !job.shifted && set_steps();
  }

  double squares() const { return squares_; }
  // Whether all scales that were asked for were large enough, and an error is not too small.
  bool are_trusted(double error) const { return !too_small_ && error > kTrusted * squares_; }

  // Make the sums of a piece, unless that is not worth it. `covering`: the scale that covers all values.
  bool make(std::int64_t piece, float largest, float covering, float unit, float* values, float* weights,
            float* places) {
    if (!usable_) return false;
    floor_ = covering * unit * kLowestTold;
    first_ = key_of(largest * unit);
    count_ = first_ - key_of(floor_ * middles_[0]) + 1;
    if (count_ < 1 || count_ >= kMostTails || count_ > kWorthTelling * job_.values.length()) return false;
    too_small_ = false;
    add_weights(piece, unit, values, weights, places);
    sum_up();
    return true;
  }

  // Scales are in the unit of the piece.
  double error(float scale) {
    too_small_ |= scale < floor_;
    if (too_small_) return 1e300;
    Pair part[4] = {};
    for (std::int64_t i = 0; i < steps_; i += W) {
      alignas(64) std::int32_t place[W];
      const I vector = places_of(load_as<V>(middles_ + i) * scale);
      if (!any(vector > 0)) break;
      store(place, vector);
      for (int k = 0; k < W; k++) part[k % 4] += scratch_.both.sums[place[k]] * added_[i + k];
    }
    const Pair sums = (part[0] + part[1]) + (part[2] + part[3]) + one_sided(scale);
    return squares_ - scale * (2 * sums[0] - (double)scale * sums[1]);
  }

  // What values beyond the ends err by; more than anything where scales are too small anyway.
  double clip(float scale) const {
    if (too_small_) return 1e300;
    const Window& in = job_.windows[0];
    return clip(scale * in.highest, true) + clip(scale * -in.lowest, false);
  }

 private:
  int shift() const { return job_.values.dtype == DType::bf16 ? 16 : 13; }
  std::int32_t key_of(float magnitude) const { return load_as<std::int32_t>(&magnitude) >> shift(); }
  // How many values, from the largest on, are beyond a magnitude.
  I places_of(V magnitudes) const {
    const I place = first_ - (I)((U32)magnitudes >> shift());
    return place > 0 ? place : I{};
  }
  static std::int64_t count_steps(const float* middles, std::int64_t count, float end) {
    std::int64_t steps = 0;
    while (steps < count && middles[steps] < end) steps++;
    return steps;
  }

  // The steps of the grid up to the end that is further away. False if they are too many.
  bool set_steps() {
    const GridRow& row = kGrids[job_.grid];
    const Window& in = job_.windows[0];
    const float furthest = in.highest > -in.lowest ? in.highest : -in.lowest;
    std::int64_t count = 0;
    for (float g = 0; g < furthest; count++) {
      if (count == kMostSteps) return false;
      const float next = g + step_from(row, g);
      middles_[count] = (g + next) / 2;
      added_[count] = Pair{next - g, (double)next * next - (double)g * g};
      g = next;
    }
    above_ = count_steps(middles_, count, in.highest);
    below_ = count_steps(middles_, count, -in.lowest);
    steps_ = above_ < below_ ? above_ : below_;
    // What is behind the common steps does not count in whole vectors of them.
    for (std::int64_t i = steps_; i < count; i++)
      sided_middles_[i - steps_] = middles_[i], sided_[i - steps_] = added_[i];
    for (std::int64_t i = steps_; i < steps_ + W; i++) middles_[i] = 1e9f, added_[i] = Pair{};
    return count > 0;
  }
  static float step_from(const GridRow& row, float g) {
    if (row.rounding == Rounding::to_integers) return 1;
    float step = two_to(row.smallest_exponent);
    while (2 * step <= g) step *= 2;
    return step * two_to(-row.mantissa);
  }

  // Add the weight of each value to what is known of its magnitude.
  void add_weights(std::int64_t piece, float unit, float* values, float* weights, float* places) {
    for (double* side : {scratch_.positive, scratch_.negative})
      std::memset(side, 0, (count_ + 1) * sizeof(double));
    const std::int64_t length = job_.values.length(), negative = scratch_.negative - scratch_.positive;
    rest_ = 0;
    for (std::int64_t begin = 0; begin < length; begin += kTile) {
      const std::int64_t left = length - begin, size = left < (std::int64_t)kTile ? left : kTile;
      load_tile(job_.values, piece, 1, begin, size, values, size);
      if (job_.weights.data) load_tile(job_.weights, piece, 1, begin, size, weights, size);
      for (std::int64_t i = 0; i < size; i += W) {
        const V x = finite_or_zero(load_as<V>(values + i)) * unit;
        const I place = first_ - (I)((U32)absolute(x) >> shift());
        const I held = place < (std::int32_t)count_ ? place : all_bits((std::int32_t)count_);
        store(values + i, x);
        store(places + i, x < 0 ? held + (std::int32_t)negative : held);
      }
      for (std::int64_t i = 0; i < size; i++) {
        const std::int32_t place = load_as<std::int32_t>(places + i);
        const double weight = job_.weights.data ? weights[i] : 1;
        scratch_.positive[place] += weight;
        if (place == count_ || place == count_ + negative) rest_ += weight * values[i] * values[i];
      }
    }
  }
  void sum_up() {
    const Tail &both = scratch_.both, &below = scratch_.below;
    double squares = 0, squares_below = 0;
    Pair sums{}, sums_below{};
    for (std::int64_t i = 0; i <= count_; i++) {
      both.squares[i] = squares, both.sums[i] = sums;
      below.squares[i] = squares_below, below.sums[i] = sums_below;
      const double x = load_value((std::int32_t)(first_ - i));
      const double negative = scratch_.negative[i], all = scratch_.positive[i] + negative;
      squares += all * x * x, squares_below += negative * x * x;
      sums += Pair{all * x, all}, sums_below += Pair{negative * x, negative};
    }
    squares_ = both.squares[count_] + rest_;
  }
  double load_value(std::int32_t key) const {
    const std::int32_t bits = key << shift();
    return load_as<float>(&bits);
  }

  // Of all values, or of those on one side.
  Pair sums_at(std::int32_t place, bool positive) const {
    const Pair below = scratch_.below.sums[place];
    return positive ? scratch_.both.sums[place] - below : below;
  }
  // The steps that only values on the side of the further end take.
  Pair one_sided(float scale) const {
    const bool positive = above_ > below_;
    const std::int64_t count = (positive ? above_ : below_) - steps_;
    Pair sums{};
    for (std::int64_t i = 0; i < count; i++)
      sums += sums_at(places_of(all(sided_middles_[i] * scale))[0], positive) * sided_[i];
    return sums;
  }
  double clip(float end, bool positive) const {
    std::int64_t place = places_of(all(end))[0];
    place = place < count_ ? place : count_;
    const double below = scratch_.below.squares[place];
    const double squares = positive ? scratch_.both.squares[place] - below : below;
    const Pair sums = sums_at((std::int32_t)place, positive);
    const double total = squares - end * (2 * sums[0] - end * sums[1]);
    return total > 0 ? total : 0;
  }

  static constexpr std::int64_t kMostSteps = 256;
  const OptimumJob& job_;
  TailScratch scratch_;
  bool usable_ = false, too_small_ = false;
  std::int64_t steps_ = 0, above_ = 0, below_ = 0;  // that all values take, or those on one side
  float middles_[kMostSteps + W], sided_middles_[kMostSteps];
  Pair added_[kMostSteps + W], sided_[kMostSteps];
  float floor_ = 0;
  std::int32_t first_ = 0;      // the first bits of the largest magnitude
  std::int64_t count_ = 0;      // of magnitudes that are told apart
  double rest_ = 0, squares_ = 0;
};

}  // namespace
}  // namespace calipers
