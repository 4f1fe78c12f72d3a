// Between two scales at which some code changes, the error Σ w·(x − g·s)² is a parabola in s. Walk
// from the largest scale that can matter downwards, from change to change, and look at the lowest
// point of every parabola within its stretch.
#include "sweep.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kept.h"

namespace calipers {
namespace {

constexpr std::size_t kShortlist = 8;   // candidates whose error is summed anew in the end
constexpr double kLongestStretch = 1.0 / 12;
constexpr double kMostWhole = 1e6;      // more than any code

float float_of(DType dtype, const std::byte* from) {
  if (dtype == DType::f32) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, from, sizeof bits);
  if (dtype == DType::bf16) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                          : exponent     ? std::ldexp(1024.f + mantissa, exponent - 25)
                                         : std::ldexp(static_cast<float>(mantissa), -24);
  return bits >> 15 ? -magnitude : magnitude;
}

float value_at(const Pieces& from, std::int64_t piece, std::int64_t position) {
  const std::int64_t at = from.offset(piece) + from.offset_within(position);
  return float_of(from.dtype, from.data + at * element_size(from.dtype));
}

struct Value {
  double magnitude, weight;
  bool is_negative;
  std::int32_t code, most;              // the code it has now, and the last on its side
};

// Where a value goes from its code to the next.
struct Change {
  double scale;
  std::int64_t value;
};

class PieceSweep {
 public:
  explicit PieceSweep(const SweepJob& job) : job_(job), grid_(job.magnitudes, job.magnitudes + job.magnitude_count) {
    for (std::size_t i = 0; i + 1 < grid_.size(); i++) {
      middles_.push_back((grid_[i] + grid_[i + 1]) / 2);
      inverses_.push_back(1 / middles_.back());
      whole_ &= middles_[i] == i + 0.5;
    }
  }

  void search(std::int64_t piece) {
    load(piece);
    const std::size_t size = std::max<std::size_t>(kShortlist, job_.kept);
    scales_.resize(size), windows_.resize(size), errors_.resize(size);
    kept_ = {scales_.data(), windows_.data(), errors_.data(), static_cast<std::int64_t>(size), 0};
    if (std::max(-job_.low[piece], job_.high[piece]) == 0)
      kept_.take(0, 0, 0);
    else
      for (std::int32_t i = 0; i < job_.window_count; i++) walk(i, job_.low[piece], job_.high[piece]);
    store(piece);
  }

 private:
  void load(std::int64_t piece) {
    values_.resize(job_.values.length());
    squares_ = 0;
    for (std::size_t i = 0; i < values_.size(); i++) {
      const double x = value_at(job_.values, piece, i);
      const double weight = job_.weights.data ? value_at(job_.weights, piece, i) : 1;
      values_[i] = {std::isfinite(x) ? std::abs(x) : 0, weight, x < 0, 0, 0};
      squares_ += weight * values_[i].magnitude * values_[i].magnitude;
    }
  }

  std::int32_t last_code(double limit) const {
    return static_cast<std::int32_t>(std::upper_bound(grid_.begin(), grid_.end(), limit) - grid_.begin()) - 1;
  }
  double change(const Value& value) const { return value.magnitude * inverses_[value.code]; }
  // How many middles a value is not below.
  std::int32_t code_of(double value) const {
    if (whole_) return static_cast<std::int32_t>(std::min(value, kMostWhole) + 0.5);
    return static_cast<std::int32_t>(std::upper_bound(middles_.begin(), middles_.end(), value) - middles_.begin());
  }
  bool changes(const Value& value, double scale) const {
    return value.code < value.most && change(value) > scale;
  }

  // Give each value its code at a scale.
  void set_codes(const Window& in, double scale) {
    const std::int32_t above = last_code(in.highest), below = last_code(-in.lowest);
    linear_ = quadratic_ = codes_ = 0;
    for (Value& value : values_) {
      value.most = value.is_negative ? below : above;
      value.code = std::min(value.most, code_of(value.magnitude / scale));
      while (value.code > 0 && value.magnitude * inverses_[value.code - 1] <= scale) value.code--;
      while (changes(value, scale)) value.code++;
      const double g = grid_[value.code];
      linear_ += value.weight * value.magnitude * g;
      quadratic_ += value.weight * g * g;
      codes_ += value.code;
    }
  }

  double clip(double scale) const {
    double total = 0;
    for (const Value& value : values_) {
      const double beyond = std::max(0.0, value.magnitude - grid_[value.most] * scale);
      total += value.weight * beyond * beyond;
    }
    return total;
  }

  // The changes from here to a lower scale, the largest first.
  void gather(double to) {
    changes_.clear();
    for (std::size_t i = 0; i < values_.size(); i++)
      for (Value& value = values_[i]; changes(value, to); value.code++)
        changes_.push_back({change(value), static_cast<std::int64_t>(i)});
    for (const Change& change : changes_) values_[change.value].code--;
    std::sort(changes_.begin(), changes_.end(), [](const Change& a, const Change& b) {
      return a.scale != b.scale ? a.scale > b.scale : a.value < b.value;
    });
  }

  void look_at(double from, double to, std::int32_t window) {
    // Mostly not even the lowest point of the whole parabola is low enough.
    if ((squares_ * (1 - 1e-12) - kept_.worst()) * quadratic_ > linear_ * linear_) return;
    const double lowest = quadratic_ > 0 ? linear_ / quadratic_ : from;
    const float scale = static_cast<float>(std::clamp(lowest, to, from));
    if (!(scale > 0)) return;
    const double error = squares_ - scale * (2 * linear_ - scale * quadratic_);
    kept_.take(scale, window, error);
  }

  void walk(std::int32_t window, double low, double high) {
    const Window& in = job_.windows[window];
    // Below the second number, half of a scale need not be a float.
    double from = std::max(std::max(high * in.above, -low * in.below) * 1.0001, 0x1p-125);
    set_codes(in, from);
    while (from > 1e-300 && clip(from) < std::max(kept_.worst(), 1e-300)) {
      const double most_changes = 4096 + values_.size() / 4.0;
      const double to = from * (1 - std::min(kLongestStretch, most_changes / (codes_ + 1.0)));
      gather(to);
      for (const Change& change : changes_) {
        look_at(from, change.scale, window);
        from = change.scale;
        Value& value = values_[change.value];
        const double g = grid_[value.code], next = grid_[++value.code];
        linear_ += value.weight * value.magnitude * (next - g);
        quadratic_ += value.weight * (next - g) * (next + g);
        codes_++;
      }
      look_at(from, to, window);
      from = to;
    }
  }

  // The difference of large sums is not exact enough to tell the very best apart.
  double exact_error(const Window& in, double scale) const {
    const std::int32_t above = last_code(in.highest), below = last_code(-in.lowest);
    double total = 0;
    for (const Value& value : values_) {
      const std::int32_t most = value.is_negative ? below : above;
      const double error = value.magnitude - grid_[std::min(most, code_of(value.magnitude / scale))] * scale;
      total += value.weight * error * error;
    }
    return total;
  }

  void store(std::int64_t piece) {
    const std::int64_t at = piece * job_.kept;
    Kept result{job_.best + at, job_.window + at, job_.errors + at, job_.kept, 0};
    for (std::int64_t i = 0; i < kept_.count; i++) {
      const double error = scales_[i] > 0 ? exact_error(job_.windows[windows_[i]], scales_[i]) : 0;
      result.take(scales_[i], windows_[i], error);
    }
    result.fill_up();
  }

  const SweepJob& job_;
  std::vector<double> grid_, middles_, inverses_;
  bool whole_ = true;                   // the numbers are 0, 1, 2 and so on
  std::vector<Value> values_;
  std::vector<Change> changes_;
  double squares_ = 0, linear_ = 0, quadratic_ = 0, codes_ = 0;
  std::vector<float> scales_;
  std::vector<std::int32_t> windows_;
  std::vector<double> errors_;
  Kept kept_{};
};

}  // namespace

void sweep_task(const SweepJob& job, std::int64_t index, std::byte*) {
  PieceSweep sweep(job);
  const std::int64_t first = index * job.cut.pieces_per_run;
  const std::int64_t end = std::min(first + job.cut.pieces_per_run, job.values.count());
  for (std::int64_t piece = first; piece < end; piece++) sweep.search(piece);
}

}  // namespace calipers
