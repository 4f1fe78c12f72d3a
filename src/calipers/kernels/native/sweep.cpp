// Between two scales at which some code changes, the error Σ w·(x − g·s)² is a parabola in s, whose
// lowest point is easily found; but there are thousands of them in a piece. They are looked at only
// where one can be the lowest.
//
// Let X = Σ w·x², and at some scale L = Σ w·|x|·g and Q = Σ w·g². The error is X − 2·s·L + s²·Q as long
// as codes stay. A value that goes from the number g to the next one, g', does so at the scale c at
// which both err alike, and from there on errs less than it would with g by
//   w·(|x| − g·t)² − w·(|x| − g'·t)² = w·(g'² − g²)·t·(c − t).
// So within a stretch of scales that begins at s with L and Q, and in which Q grows by D altogether,
// no scale t errs less than
//   X − 2·t·L + t²·Q − D·t·(s − t) = X − t·(2·L + s·D) + t²·(Q + D),
// since c ≤ s. That is a parabola too: where its lowest point in the stretch is not low enough, the
// changes within it need not be put in order, and mostly it is not.
#include "sweep.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kept.h"

namespace calipers {
namespace {

constexpr std::int64_t kSpare = 8;        // candidates beyond those asked for, told apart in the end
constexpr double kRounding = 1e-12;       // of Σ w·x², which errors are differences of
constexpr double kPart = 1.0 / 3;         // of a scale that is walked through at a time
constexpr double kFewest = 16, kMost = 2048;  // stretches that such a part is cut into
constexpr double kNarrowest = 1e-5;       // of a scale: float32 tells stretches apart that are wider
constexpr float kMostWhole = 1e6f;        // more than any code
constexpr double kTiny = 1e-30;           // below, floats are too far apart for what is proved here
constexpr std::int64_t kFlush = 512;      // values after which sums go from float to double
constexpr double kGuesses[] = {1, 0.92, 0.85, 0.78, 0.7, 0.62};  // of the scale that covers all values

constexpr int kCodeShift = 20;            // bits of a float that codes are not looked up by
constexpr std::uint32_t kCodeTable = 0x7f800000u >> kCodeShift;

typedef double Pair __attribute__((vector_size(16)));  // of L and of Q
typedef float Quad __attribute__((vector_size(16)));
typedef std::int32_t Indices __attribute__((vector_size(16)));

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

void load_floats(const Pieces& from, std::int64_t piece, float* to) {
  const std::int64_t size = element_size(from.dtype), length = from.length();
  for (std::int64_t i = 0; i < length;) {
    const std::byte* row = from.data + (from.offset(piece) + from.offset_within(i)) * size;
    for (const std::int64_t end = i + from.run(i); i < end; i++, row += from.column_stride * size)
      to[i] = float_of(from.dtype, row);
  }
}

Quad load_quad(const float* from) {
  Quad quad;
  std::memcpy(&quad, from, sizeof quad);
  return quad;
}
Quad quad(float x) { return x - Quad{}; }

// Where a value goes from its code to the next.
struct Change {
  std::int32_t stretch;
  double scale;
  Pair step;
};

// The scales that are walked through at a time, cut into stretches of the same width.
struct Part {
  double from, to, width;
  std::int32_t count;
  Part(double from, double to, double changes) : from(from), to(to) {
    const double wide_enough = (1 - to / from) / kNarrowest;
    count = static_cast<std::int32_t>(std::max(1.0, std::min(std::clamp(changes, kFewest, kMost), wide_enough)));
    width = (from - to) / count;
  }
  double begin(std::int32_t stretch) const { return stretch == count ? to : from - stretch * width; }
};

class PieceSweep {
 public:
  explicit PieceSweep(const SweepJob& job)
      : job_(job), grid_(job.magnitudes, job.magnitudes + job.magnitude_count),
        size_(job.values.length()), codes_from_(kCodeTable) {
    for (std::size_t i = 0; i + 1 < grid_.size(); i++) {
      const double g = grid_[i], next = grid_[i + 1];
      middles_.push_back((g + next) / 2);
      inverses_.push_back(1 / middles_.back());
      steps_.push_back(Pair{next - g, (next - g) * (next + g)});
      whole_ &= middles_[i] == i + 0.5;
    }
    // Vectors are loaded from any code and up to any value on.
    rough_inverses_.assign(inverses_.begin(), inverses_.end());
    rough_inverses_.resize(inverses_.size() + 4);
    for (auto* part : {&magnitudes_, &weights_, &ends_}) part->assign(size_ + 3, 0);
    for (auto* part : {&codes_, &next_, &most_}) part->assign(size_, 0);
    negative_.assign(size_, 0);
    for (std::uint32_t i = 0; i < kCodeTable; i++) {
      const std::uint32_t bits = i << kCodeShift;
      float least;
      std::memcpy(&least, &bits, sizeof least);
      codes_from_[i] = static_cast<std::int32_t>(
          std::upper_bound(middles_.begin(), middles_.end(), least) - middles_.begin());
    }
  }

  void search(std::int64_t piece) {
    load(piece);
    const std::int64_t size = job_.kept + kSpare;
    scales_.resize(size), windows_.resize(size), errors_.resize(size);
    kept_ = {scales_.data(), windows_.data(), errors_.data(), size, 0};
    bound_ = 1e300;
    if (std::max(-job_.low[piece], job_.high[piece]) == 0)
      kept_.take(0, 0, 0);
    else
      for (std::int32_t i = 0; i < job_.window_count; i++)
        walk(i, job_.low[piece] * unit_, job_.high[piece] * unit_);
    store(piece);
  }

 private:
  // The piece, and what is known of it

  // Values, and thus scales, are measured in a power of two near the largest: no square leaves float32.
  void load(std::int64_t piece) {
    const double largest = std::max(-job_.low[piece], job_.high[piece]);
    unit_ = largest > 0 ? std::ldexp(1.0, -std::ilogb(largest)) : 1;
    load_floats(job_.values, piece, magnitudes_.data());
    if (job_.weights.data)
      load_floats(job_.weights, piece, weights_.data());
    else
      std::fill_n(weights_.begin(), size_, 1.f);
    squares_ = 0;
    for (std::int64_t i = 0; i < size_; i++) {
      const float x = magnitudes_[i];
      negative_[i] = x < 0;
      magnitudes_[i] = std::isfinite(x) ? static_cast<float>(std::abs(x) * unit_) : 0;
      squares_ += static_cast<double>(weights_[i]) * magnitudes_[i] * magnitudes_[i];
    }
  }

  // What an error must be below to matter.
  double limit() const {
    const double last = kept_.count < job_.kept ? 1e300 : errors_[job_.kept - 1];
    return std::min(last, bound_) + kRounding * squares_;
  }

  // Some scale errs so much, and so about does the nearest float: it is within 2⁻²⁴ of it, where the error
  // changes by at most 2·√(s²·Q·error) times that, and s²·Q ≤ 4·X. (Tiny floats are further apart.)
  void note(double scale, double error) {
    if (scale < kTiny * unit_) return;
    error = std::max(error, 0.0);
    bound_ = std::min(bound_, error + 0x1p-21 * std::sqrt(squares_ * error));
  }

  // Codes

  std::int32_t last_code(double limit) const {
    return static_cast<std::int32_t>(std::upper_bound(grid_.begin(), grid_.end(), limit) - grid_.begin()) - 1;
  }
  // How many middles a value is not below.
  std::int32_t code_of(double value) const {
    if (whole_) return static_cast<std::int32_t>(std::min<double>(value, kMostWhole) + 0.5);
    const float rough = static_cast<float>(std::min(value, 1e38)) * (1 - 0x1p-23f);  // not above
    std::uint32_t bits;
    std::memcpy(&bits, &rough, sizeof bits);
    std::size_t code = codes_from_[bits >> kCodeShift];
    while (code < middles_.size() && value >= middles_[code]) code++;
    return static_cast<std::int32_t>(code);
  }
  // The code of a value at a scale, from a guess that may be off.
  std::int32_t corrected(std::int64_t i, double scale, std::int32_t code) const {
    const double x = magnitudes_[i];
    code = std::min(most_[i], code);
    while (code > 0 && x * inverses_[code - 1] <= scale) code--;
    while (code < most_[i] && x * inverses_[code] > scale) code++;
    return code;
  }

  // Give each value the codes of a window, and its code at a scale.
  void enter(const Window& in, double scale) {
    const std::int32_t above = last_code(in.highest), below = last_code(-in.lowest);
    const double inverse = 1 / scale;
    sums_ = Pair{};
    code_sum_ = 0;
    for (std::int64_t i = 0; i < size_; i++) {
      most_[i] = negative_[i] ? below : above;
      ends_[i] = static_cast<float>(grid_[most_[i]]);
      codes_[i] = corrected(i, scale, code_of(magnitudes_[i] * inverse));
      const double g = grid_[codes_[i]], weight = weights_[i];
      sums_ += Pair{weight * magnitudes_[i] * g, weight * g * g};
      code_sum_ += codes_[i];
    }
  }
  void set_next(double scale) {
    const double inverse = 1 / scale;
    for (std::int64_t i = 0; i < size_; i++) {
      const std::int32_t guess = whole_ ? code_of(magnitudes_[i] * inverse) : codes_[i];
      next_[i] = std::max(codes_[i], corrected(i, scale, guess));
    }
  }

  // The first change that is not above a scale, so that no parabola is in two parts; beyond the last,
  // where codes stay, a scale so small that it ends the walk.
  double next_change(double scale) {
    set_next(scale);
    double found = 1e-305;
    for (std::int64_t i = 0; i < size_; i++)
      if (next_[i] < most_[i]) found = std::max(found, magnitudes_[i] * inverses_[next_[i]]);
    return found;
  }

  // Rough errors: in float32, and right to a part in 10⁵

  template <class F> double sum_of(F f) const {
    double total = 0;
    for (std::int64_t begin = 0; begin < size_; begin += kFlush) {
      Quad part{};
      const std::int64_t end = std::min(begin + kFlush, size_);
      for (std::int64_t i = begin; i < end; i += 4) part += f(i);
      total += static_cast<double>(part[0]) + part[1] + part[2] + part[3];
    }
    return total;
  }
  // Of values beyond the ends.
  double clip(double scale) const {
    const Quad by = quad(static_cast<float>(scale));
    return sum_of([&](std::int64_t i) {
      const Quad beyond = load_quad(&magnitudes_[i]) - load_quad(&ends_[i]) * by;
      return load_quad(&weights_[i]) * (beyond > 0 ? beyond * beyond : Quad{});
    });
  }
  bool is_clipped(double scale) const { return clip(scale) * (1 - 1e-5) >= limit(); }

  // Of a scale, and at least that: a code that is not quite the nearest errs more.
  double error_of(double scale) const {
    const Quad by = quad(static_cast<float>(scale)), inverse = quad(static_cast<float>(1 / scale));
    return (1 + 1e-5) * sum_of([&](std::int64_t i) {
      const Quad x = load_quad(&magnitudes_[i]), end = load_quad(&ends_[i]);
      Quad g = x * inverse;
      if (whole_) {
        g = __builtin_convertvector(__builtin_convertvector((g < end ? g : end) + 0.5f, Indices), Quad);
      } else {
        for (int k = 0; k < 4; k++) g[k] = static_cast<float>(grid_[code_of(g[k])]);
        g = g < end ? g : end;
      }
      const Quad error = x - g * by;
      return load_quad(&weights_[i]) * error * error;
    });
  }

  // Parts

  // Call f with the changes of a part between two scales, and perhaps a few beyond them: with the
  // stretch, the value, and the code that it goes on from.
  template <class F> void each_change(const Part& part, double high, double low, F f) const {
    const Quad from = quad(static_cast<float>(part.from)), rate = quad(static_cast<float>(1 / part.width));
    const Quad first{}, last = quad(static_cast<float>(part.count - 1));
    const bool narrow = whole_ && (high < part.from || low > part.to);
    const float to_first = static_cast<float>(1 / high), to_last = static_cast<float>(std::min(1 / low, 1e30));
    for (std::int64_t i = 0; i < size_; i++) {
      std::int32_t code = codes_[i], end = next_[i];
      if (narrow) {
        code = std::max(code, static_cast<std::int32_t>(std::min(magnitudes_[i] * to_first, kMostWhole)) - 1);
        end = std::min(end, static_cast<std::int32_t>(std::min(magnitudes_[i] * to_last, kMostWhole)) + 2);
      }
      for (; code < end; code += 4) {
        const Quad scales = magnitudes_[i] * load_quad(&rough_inverses_[code]);
        Quad place = (from - scales) * rate;
        place = place > first ? place : first;
        const Indices stretches = __builtin_convertvector(place < last ? place : last, Indices);
        const std::int32_t count = std::min(end - code, 4);
        for (std::int32_t k = 0; k < count; k++) f(stretches[k], i, code + k);
      }
    }
  }
  // What going from a code to the next adds to the sums.
  Pair step_of(std::int64_t i, std::int32_t code) const {
    const double weight = weights_[i];
    return Pair{weight * magnitudes_[i], weight} * steps_[code];
  }
  double error_at(double scale, Pair sums) const { return squares_ - scale * (2 * sums[0] - scale * sums[1]); }

  // What each stretch adds to the sums, and then what they are at its beginning. Errors at the ends of
  // stretches with changes are of different parabolas.
  void sum_stretches(const Part& part) {
    stretches_.assign(part.count + 1, Pair{});
    each_change(part, part.from, part.to, [&](std::int32_t stretch, std::int64_t i, std::int32_t code) {
      stretches_[stretch] += step_of(i, code);
    });
    at_ends_.clear();
    Pair sums = sums_;
    for (std::int32_t i = 0; i < part.count; i++) {
      const Pair added = stretches_[i];
      stretches_[i] = sums;
      sums += added;
      if (added[1] > 0) at_ends_.push_back(error_at(part.begin(i + 1), sums));
    }
    stretches_[part.count] = sums;
    if (static_cast<std::int64_t>(at_ends_.size()) < job_.kept) return;
    std::nth_element(at_ends_.begin(), at_ends_.begin() + job_.kept - 1, at_ends_.end());
    note(part.to, at_ends_[job_.kept - 1]);
  }

  // Whether a stretch can hold a lower error than the limit: see the head of this file. Stretches are
  // told apart in float32: a change may be in the next one, off by 2·10⁻⁷ of its scale.
  bool is_open(const Part& part, std::int32_t stretch, double limit) const {
    const double from = part.begin(stretch), quadratic = stretches_[stretch + 1][1];
    limit += 1e-6 * from * from * (quadratic - stretches_[std::max(stretch - 1, 0)][1]);
    const double linear = stretches_[stretch][0] + from * (quadratic - stretches_[stretch][1]) / 2;
    if ((squares_ - limit) * quadratic > linear * linear) return false;  // nowhere low enough
    const double lowest = quadratic > 0 ? std::clamp(linear / quadratic, part.begin(stretch + 1), from) : from;
    return error_at(lowest, Pair{linear, quadratic}) < limit;
  }

  void look_at(double from, double to, Pair sums, std::int32_t window) {
    if (!(from > to)) return;
    const double lowest = sums[1] > 0 ? sums[0] / sums[1] : from;
    const float stored = static_cast<float>(std::clamp(lowest, to, from) / unit_);
    if (!(stored > 0)) return;
    const double error = error_at(stored * unit_, sums);
    if (error < limit()) kept_.take(stored, window, error);
  }

  // Put the changes of the stretches that are open in order, and look at what is between them.
  void look_at_open(const Part& part, std::int32_t window) {
    const auto first = std::find(open_.begin(), open_.end(), 1) - open_.begin();
    const auto last = open_.rend() - std::find(open_.rbegin(), open_.rend(), 1);
    const double high = part.begin(static_cast<std::int32_t>(first)), low = part.begin(static_cast<std::int32_t>(last));
    changes_.clear();
    each_change(part, high, low, [&](std::int32_t stretch, std::int64_t i, std::int32_t code) {
      if (open_[stretch]) changes_.push_back({stretch, magnitudes_[i] * inverses_[code], step_of(i, code)});
    });
    std::stable_sort(changes_.begin(), changes_.end(), [](const Change& a, const Change& b) {
      return a.stretch != b.stretch ? a.stretch < b.stretch : a.scale > b.scale;
    });
    auto change = changes_.begin();
    double from = 0;
    Pair sums{};
    for (std::int32_t i = 0; i < part.count; i++) {
      if (!open_[i]) continue;
      if (i == 0 || !open_[i - 1]) from = part.begin(i), sums = stretches_[i];
      for (; change != changes_.end() && change->stretch == i; ++change) {
        look_at(from, change->scale, sums, window);
        from = change->scale;
        sums += change->step;
      }
      if (i + 1 == part.count || !open_[i + 1]) look_at(from, part.begin(i + 1), sums, window);
    }
  }

  void walk_part(const Part& part, std::int32_t window) {
    set_next(part.to);
    sum_stretches(part);
    const double limit = this->limit();
    open_.resize(part.count);
    bool any = false;
    for (std::int32_t i = 0; i < part.count; i++) any |= (open_[i] = is_open(part, i, limit));
    if (any) look_at_open(part, window);
    for (std::int64_t i = 0; i < size_; i++) code_sum_ += next_[i] - codes_[i];
    codes_.swap(next_);
    sums_ = stretches_[part.count];
  }

  // The scale at which no value is beyond the ends.
  double covering_scale() const {
    double covering = 0;
    for (std::int64_t i = 0; i < size_; i++)
      if (most_[i] > 0) covering = std::max<double>(covering, magnitudes_[i] / ends_[i]);
    return covering;
  }
  // A scale at which values beyond the ends alone err too much, not far below the first of them.
  double lowest_scale(double covering) const {
    double low = 0;
    for (double step = covering / 2; step > covering / 64; step /= 2)
      if (is_clipped(low + step)) low += step;
    return low;
  }

  void walk(std::int32_t window, double low, double high) {
    const Window& in = job_.windows[window];
    // Below the second number, half of a scale need not be a float.
    double from = std::max(std::max(high * in.above, -low * in.below) * 1.0001, 0x1p-125 * unit_);
    enter(in, from);
    const double covering = covering_scale();
    // A few guesses put most other scales out of the question. They only tell of the best one.
    if (job_.kept == 1 && covering > kTiny * unit_)
      for (const double guess : kGuesses) note(covering * guess, error_of(covering * guess));
    // All at once, if it is known where the end is.
    const double lowest = covering > kTiny * unit_ && limit() < squares_ ? lowest_scale(covering) : 0;
    while (from > 1e-300 && !is_clipped(from)) {
      const double to = lowest > 0 && lowest < from ? lowest : next_change(from * (1 - kPart));
      walk_part(Part(from, to, code_sum_ * (from / to - 1)), window);
      from = to;
    }
  }

  // The difference of large sums is not exact enough to tell the very best apart.
  double exact_error(const Window& in, double scale) const {
    const std::int32_t above = last_code(in.highest), below = last_code(-in.lowest);
    double total = 0;
    for (std::int64_t i = 0; i < size_; i++) {
      const std::int32_t most = negative_[i] ? below : above;
      const double x = magnitudes_[i], error = x - grid_[std::min(most, code_of(x / scale))] * scale;
      total += weights_[i] * error * error;
    }
    return total;
  }

  void store(std::int64_t piece) {
    const std::int64_t at = piece * job_.kept;
    Kept result{job_.best + at, job_.window + at, job_.errors + at, job_.kept, 0};
    const double enough = errors_[std::max<std::int64_t>(std::min(job_.kept, kept_.count), 1) - 1] + 2 * kRounding * squares_;
    for (std::int64_t i = 0; i < kept_.count && !(errors_[i] > enough); i++) {
      const double error = scales_[i] > 0 ? exact_error(job_.windows[windows_[i]], scales_[i] * unit_) : 0;
      result.take(scales_[i], windows_[i], error / (unit_ * unit_));
    }
    result.fill_up();
  }

  const SweepJob& job_;
  std::vector<double> grid_, middles_, inverses_;
  std::vector<Pair> steps_;             // what going to the next number adds to g and to g²
  bool whole_ = true;                   // the numbers are 0, 1, 2 and so on
  std::vector<float> rough_inverses_;
  std::int64_t size_;
  std::vector<std::int32_t> codes_from_;  // of the least float with the same first bits
  // Of each value: itself, what it counts, the last number on its side and its code; its code now and
  // at the end of a part; whether it is negative.
  std::vector<float> magnitudes_, weights_, ends_;
  std::vector<std::int32_t> most_, codes_, next_;
  std::vector<std::uint8_t> negative_;
  double unit_ = 1;                     // what values are multiplied by
  double squares_ = 0, code_sum_ = 0;   // X, and the codes of all values together
  Pair sums_{};                         // L and Q
  std::vector<Pair> stretches_;
  std::vector<double> at_ends_;
  std::vector<std::uint8_t> open_;
  std::vector<Change> changes_;
  double bound_ = 1e300;                // no better than the last that is wanted
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
