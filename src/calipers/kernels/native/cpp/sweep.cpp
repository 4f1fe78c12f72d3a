// Between two scales at which some code changes, the error Σ w·(x − g·s)² is a parabola in s, whose
// lowest point is easily found; but there are thousands of them in a piece. They are looked at only
// where one can be the lowest, and where that is, a few errors tell.
//
// Let X = Σ w·x², and for some choice of numbers g, one for each value, L = Σ w·|x|·g and Q = Σ w·g². The
// error E of a scale s is the least of X − 2·s·L + s²·Q over all choices. With u = 1/s,
//   E·u² = X·u² − Ψ(u), where Ψ(u) = max (2·u·L − Q) is convex: it is the largest of straight lines.
// Let no error below l matter. What is asked is where (X − l)·u² − Ψ(u) = (E − l)·u² is negative.
// - Between scales a > b, Ψ is not above its chord. With u = (1 − p)/a + p/b that is
//     (E − l)·u² ≥ (1 − p)·A² + p·B² − (X − l)·p·(1 − p)·d²,
//   where A = √(E(a) − l)/a, B = √(E(b) − l)/b and d = 1/b − 1/a. It is nowhere negative if
//   A²/p + B²/(1 − p) ≥ (X − l)·d² for all p; the least of the left side is (A + B)². So no scale between
//   a and b errs less than l if both err by at least l, and
//     b·√(E(a) − l) + a·√(E(b) − l) ≥ √(X − l)·(a − b).
// - Below a, no slope of Ψ is above 2·M, where M is L with all numbers at their ends. So
//     (E − l)·u² ≥ A² + 2·v·((X − l)/a − M) + (X − l)·v², with v = u − 1/a ≥ 0,
//   which is nowhere negative if M·a ≤ (X − l) + √((E(a) − l)·(X − l)).
//
// A value goes from the number g to the next one, g', at the scale at which both err alike, 2·|x|/(g + g').
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
constexpr double kExactEnough = 1e-6;     // of Σ w·x²: a larger error is known well from that difference
constexpr double kTiny = 1e-30;           // below, floats are too far apart for what is proved here
constexpr double kFaint = 1e-20;          // Σ w·x² below which float32 may lose errors
constexpr double kPart = 1.0 / 3;         // of a scale that is walked through at a time, at most
constexpr double kMostStretches = 2048;   // that such a part is cut into
constexpr double kCoarse = 0.85;          // from one of the first samples to the next
constexpr std::int64_t kFirst = 4;        // samples that tell what an error must be below
constexpr double kFewChanges = 0.025;      // of each value, that are put in order rather than sampled further
constexpr double kNarrowest = 1e-5;       // of a scale, between two samples

constexpr int kCodeShift = 20;            // bits of a float that codes are not looked up by
constexpr std::uint32_t kCodeTable = 0x7f800000u >> kCodeShift;

typedef double Pair __attribute__((vector_size(16)));  // of L and of Q

Pair pair_of(const SweepSums& sums) { return Pair{sums.linear, sums.quadratic}; }

// A scale and its error.
struct Sample {
  double scale, error;
};

// A value and the codes that it goes through.
struct Active {
  std::int32_t index, code, end;
};

// Where a value goes from its code to the next.
struct Change {
  std::int32_t stretch;
  double scale;
  Pair step;
};

// Scales that are walked through at a time, cut into stretches of the same width.
struct Part {
  double from, to, width;
  std::int32_t count;
  Part(double from, double to) : from(from), to(to) { cut(1); }
  void cut(double stretches) {
    count = static_cast<std::int32_t>(std::clamp(stretches, 1.0, kMostStretches));
    width = (from - to) / count;
  }
  double begin(std::int32_t stretch) const { return stretch == count ? to : from - stretch * width; }
  std::int32_t stretch_of(double scale) const {
    return std::clamp(static_cast<std::int32_t>((from - scale) / width), 0, count - 1);
  }
};

class PieceSweep {
 public:
  explicit PieceSweep(const SweepJob& job)
      : job_(job), grid_(job.magnitudes, job.magnitudes + job.magnitude_count), codes_from_(kCodeTable) {
    for (std::size_t i = 0; i + 1 < grid_.size(); i++) {
      const double g = grid_[i], next = grid_[i + 1];
      middles_.push_back((g + next) / 2);
      inverses_.push_back(1 / middles_.back());
      steps_.push_back(Pair{next - g, (next - g) * (next + g)});
    }
    std::size_t code = 0;
    for (std::uint32_t i = 0; i < kCodeTable; i++) {
      const std::uint32_t bits = i << kCodeShift;
      float least;
      std::memcpy(&least, &bits, sizeof least);
      while (code < middles_.size() && least >= middles_[code]) code++;
      codes_from_[i] = static_cast<std::int32_t>(code);
    }
    piece_.length = job.values.length();
    float** parts[] = {&piece_.values, &piece_.weights, &piece_.magnitudes, &piece_.ends};
    floats_.assign(4 * (piece_.length + kLanes), 0);
    for (int i = 0; i < 4; i++) *parts[i] = floats_.data() + i * (piece_.length + kLanes);
    if (!job.weights.data) std::fill_n(piece_.weights, piece_.length, 1.f);
    changed_.resize(piece_.length);
    learn_rounding();
  }

  void search(std::int64_t piece) {
    const std::int64_t size = job_.kept + kSpare;
    scales_.resize(size), windows_.resize(size), errors_.resize(size);
    kept_ = {scales_.data(), windows_.data(), errors_.data(), size, 0};
    bound_ = 1e300;
    if (std::max(-job_.low[piece], job_.high[piece]) == 0) {
      kept_.take(0, 0, 0);
    } else {
      load(piece);
      for (window_ = 0; window_ < job_.window_count; window_++)
        search_window(job_.low[piece] * unit_, job_.high[piece] * unit_);
    }
    store(piece);
  }

 private:
  // How vectors round to the numbers, if they are whole or floats.
  void learn_rounding() {
    whole_ = true;
    for (std::size_t i = 0; i < grid_.size(); i++) whole_ &= grid_[i] == i;
    in_vectors_ = whole_;
    if (whole_ || grid_.size() < 2) return;
    std::size_t even = 1;  // steps that are as wide as the first
    while (even + 1 < grid_.size() && grid_[even + 1] == (even + 1) * grid_[1]) even++;
    const int mantissa = std::ilogb(even) - 1;
    const double smallest = std::ldexp(grid_[1], mantissa);
    in_vectors_ = mantissa >= 0;
    for (std::size_t i = 0; i + 1 < grid_.size(); i++) {
      const double binade = std::max(std::exp2(std::floor(std::log2(std::max(grid_[i], smallest)))), smallest);
      in_vectors_ &= grid_[i + 1] - grid_[i] == std::ldexp(binade, -mantissa);
    }
    piece_.smallest = static_cast<float>(smallest);
    piece_.large = std::ldexp(1.5f, 23 - mantissa);
    codes_per_e_ = std::ldexp(1 / std::log(2.0), mantissa);
  }

  // The piece, and what is known of it

  // Values, and thus scales, are measured in a power of two near the largest, weights likewise: no error
  // leaves float32.
  void load(std::int64_t piece) {
    const int exponent = -std::ilogb(std::max(-job_.low[piece], job_.high[piece]));
    int of_weights = 0;
    job_.kernels->load(job_.values, piece, piece_.values);
    if (job_.weights.data) {
      const float largest = job_.kernels->load(job_.weights, piece, piece_.weights);
      if (largest > 0) of_weights = -std::ilogb(largest);
    }
    unit_ = std::ldexp(1.0, exponent), weight_unit_ = std::ldexp(1.0, of_weights);
    const SweepSums sums = job_.kernels->measure(piece_, factors_of(exponent), factors_of(of_weights));
    mean_ = sums.linear / piece_.length, squares_ = sums.quadratic;
  }
  static SweepUnit factors_of(int exponent) {
    return {std::ldexp(1.f, exponent / 2), std::ldexp(1.f, exponent - exponent / 2)};
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
  double error_at(double scale, Pair sums) const { return squares_ - scale * (2 * sums[0] - scale * sums[1]); }

  // See the head of this file; squared twice, which takes no roots.
  bool exclude_between(const Sample& a, const Sample& b, double limit) const {
    if (!(a.error >= limit && b.error >= limit)) return false;
    const double of_a = b.scale * b.scale * (a.error - limit), of_b = a.scale * a.scale * (b.error - limit);
    const double apart = (squares_ - limit) * (a.scale - b.scale) * (a.scale - b.scale);
    const double left = apart - of_a - of_b;
    return left <= 0 || left * left <= 4 * of_a * of_b;
  }
  bool excludes_below(const Sample& a, double limit) const {
    const double most = squares_ - limit;
    return a.error >= limit && most >= 0 && steepest_ * a.scale <= most + std::sqrt((a.error - limit) * most);
  }

  // Codes

  std::int32_t last_code(double limit) const {
    return static_cast<std::int32_t>(std::upper_bound(grid_.begin(), grid_.end(), limit) - grid_.begin()) - 1;
  }
  // How many middles a value is not below.
  std::int32_t code_of(double value) const {
    if (whole_) return static_cast<std::int32_t>(std::min(value, 1e6) + 0.5);  // there are fewer codes
    const float rough = static_cast<float>(std::min(value, 1e38)) * (1 - 0x1p-23f);  // not above
    std::uint32_t bits;
    std::memcpy(&bits, &rough, sizeof bits);
    std::size_t code = codes_from_[bits >> kCodeShift];
    while (code < middles_.size() && value >= middles_[code]) code++;
    return static_cast<std::int32_t>(code);
  }
  std::int32_t code_at(std::int64_t i, double scale) const {
    return std::min(piece_.values[i] < 0 ? below_ : above_, code_of(piece_.magnitudes[i] / scale));
  }
  double change_of(std::int64_t i, std::int32_t code) const { return piece_.magnitudes[i] * inverses_[code]; }
  // What going from a code to the next adds to the sums.
  Pair step_of(std::int64_t i, std::int32_t code) const {
    const double weight = piece_.weights[i];
    return Pair{weight * piece_.magnitudes[i], weight} * steps_[code];
  }
  void enter(const Window& in) {
    above_ = last_code(in.highest), below_ = last_code(-in.lowest);
    const auto below = static_cast<float>(grid_[below_]), above = static_cast<float>(grid_[above_]);
    steepest_ = job_.kernels->set_ends(piece_, below, above).linear;
  }

  // Samples

  // Errors in float32. A value errs wrongly by up to some 2⁻²² of itself, all of them together thus by the
  // root of X times that.
  void sample(const std::vector<float>& scales) {
    rough_.resize(scales.size());
    job_.kernels->errors(piece_, scales.data(), static_cast<std::int64_t>(scales.size()), rough_.data());
    fresh_.clear();
    for (std::size_t i = 0; i < scales.size(); i++) {
      const double slack = 1e-5 * rough_[i] + 1e-6 * std::sqrt(rough_[i] * squares_) + kRounding * squares_;
      fresh_.push_back({scales[i], rough_[i] - slack});
      if (job_.kept == 1) bound_ = std::min(bound_, rough_[i] + slack);  // floats are scales
    }
    merged_.resize(samples_.size() + fresh_.size());
    std::merge(samples_.begin(), samples_.end(), fresh_.begin(), fresh_.end(), merged_.begin(),
               [](const Sample& a, const Sample& b) { return a.scale > b.scale; });
    samples_.swap(merged_);
  }

  // The first samples, from the scale that covers all values down to where nothing is left, and up to the
  // largest scale that matters. False if they exclude nothing.
  bool sample_coarsely(double covering) {
    samples_.clear();
    double scale = covering;
    do {
      wanted_.clear();
      for (std::int64_t i = 0; i < kFirst; i++, scale *= kCoarse) wanted_.push_back(static_cast<float>(scale));
      sample(wanted_);
      if (bound_ == 1e300) look_around_best();
      if (!(limit() < squares_ * (1 - 1e-6))) return false;
    } while (!excludes_below(samples_.back(), limit()));
    wanted_.clear();
    for (scale = covering / kCoarse; scale < top_; scale /= kCoarse) wanted_.push_back(static_cast<float>(scale));
    wanted_.push_back(std::nextafter(static_cast<float>(top_), 1e38f));
    std::reverse(wanted_.begin(), wanted_.end());
    sample(wanted_);
    return true;
  }
  // Where several scales are wanted, errors of different parabolas are.
  void look_around_best() {
    const auto best = std::min_element(samples_.begin(), samples_.end(), [](const Sample& a, const Sample& b) {
      return a.error < b.error;
    });
    const double enough = 4.0 * job_.kept / (density(best->scale) * piece_.length);
    const double width = std::clamp(enough, 0.005, 0.2);
    Part part(best->scale * (1 + width), best->scale * (1 - width));
    list_active(part);
    sum_stretches(part);
  }

  // How often the code of a value changes while a scale becomes smaller by a factor e, about.
  double density(double scale) const { return whole_ ? mean_ / scale : codes_per_e_; }

  // Halve what is between samples and not excluded, until few changes are left in it.
  void sample_finely() {
    do {
      wanted_.clear();
      const double limit = this->limit();
      for (std::size_t i = 0; i + 1 < samples_.size(); i++) {
        const Sample &a = samples_[i], &b = samples_[i + 1];
        const double width = a.scale / b.scale - 1;
        const bool is_few = width < kNarrowest || width * density(b.scale) < kFewChanges;
        if (!is_few && !exclude_between(a, b, limit)) wanted_.push_back(static_cast<float>((a.scale + b.scale) / 2));
      }
      sample(wanted_);
    } while (!wanted_.empty());
  }

  // Parts

  // The values that change within a part, and the sums at its beginning. Vectors do not tell exactly at
  // which of two scales that are next to each other a value changes, so they are asked of a little more.
  void list_active(const Part& part) {
    std::int64_t count = 0;
    active_.clear();
    if (in_vectors_ && part.to > kTiny) {
      const auto high = static_cast<float>(part.from * (1 + 1e-6)), low = static_cast<float>(part.to * (1 - 1e-6));
      sums_ = pair_of(job_.kernels->changed(piece_, high, low, changed_.data(), &count));
      for (std::int64_t i = 0; i < count; i++)
        active_.push_back({changed_[i].index, code_of(changed_[i].number), code_of(changed_[i].next)});
    } else {
      sums_ = Pair{};
      for (std::int64_t i = 0; i < piece_.length; i++) {
        const std::int32_t code = code_at(i, part.from), end = std::max(code, code_at(i, part.to));
        const double g = grid_[code], weight = piece_.weights[i];
        sums_ += Pair{weight * piece_.magnitudes[i] * g, weight * g * g};
        active_.push_back({static_cast<std::int32_t>(i), code, end});
      }
    }
    changes_in_part_ = 0;
    for (Active& value : active_) {
      while (value.code < value.end && change_of(value.index, value.code) >= part.from)
        sums_ += step_of(value.index, value.code++);
      while (value.code < value.end && change_of(value.index, value.end - 1) < part.to) value.end--;
      changes_in_part_ += value.end - value.code;
    }
  }
  template <class F> void each_change(const Part& part, F f) const {
    for (const Active& value : active_)
      for (std::int32_t code = value.code; code < value.end; code++) {
        const double scale = change_of(value.index, code);
        f(part.stretch_of(scale), scale, value.index, code);
      }
  }

  // What the sums and errors are at the ends of all stretches. Errors at the ends of those with changes
  // are of different parabolas.
  void sum_stretches(Part& part) {
    part.cut(changes_in_part_ / 2.0);
    stretches_.assign(part.count + 1, Pair{});
    each_change(part, [&](std::int32_t stretch, double, std::int64_t i, std::int32_t code) {
      stretches_[stretch + 1] += step_of(i, code);
    });
    ends_.clear(), different_.clear();
    Pair sums = sums_;
    for (std::int32_t i = 0; i <= part.count; i++) {
      const bool changes = stretches_[i][1] > 0;
      stretches_[i] = sums += stretches_[i];
      ends_.push_back({part.begin(i), error_at(part.begin(i), sums)});
      if (changes) different_.push_back(ends_.back().error);
    }
    if (static_cast<std::int64_t>(different_.size()) < job_.kept) return;
    std::nth_element(different_.begin(), different_.begin() + job_.kept - 1, different_.end());
    note(part.to, different_[job_.kept - 1]);
  }

  // The lowest point of a parabola between two scales. It may go on beyond them, in a part or a stretch
  // next to this one, and is left to that if the lowest point is there.
  void look_at(double from, double to, bool goes_on_above, bool goes_on_below, Pair sums) {
    if (!(from > to)) return;
    const double lowest = sums[1] > 0 ? sums[0] / sums[1] : 1e300;
    if (goes_on_above && lowest > from * (1 + kRounding)) return;
    if (goes_on_below && lowest < to * (1 - kRounding)) return;
    const float stored = static_cast<float>(std::clamp(lowest, to, from) / unit_);
    if (!(stored > 0)) return;
    const double error = error_at(stored * unit_, sums);
    if (error < limit() && !is_kept(stored)) kept_.take(stored, window_, error);
  }
  bool is_kept(float scale) const {
    for (std::int64_t i = 0; i < kept_.count; i++)
      if (scales_[i] == scale && windows_[i] == window_) return true;
    return false;
  }

  // Put the changes of the stretches that are open in order, and look at what is between them.
  void look_at_open(const Part& part) {
    changes_.clear();
    each_change(part, [&](std::int32_t stretch, double scale, std::int64_t i, std::int32_t code) {
      if (open_[stretch]) changes_.push_back({stretch, scale, step_of(i, code)});
    });
    std::sort(changes_.begin(), changes_.end(), [](const Change& a, const Change& b) {
      return a.stretch != b.stretch ? a.stretch < b.stretch : a.scale > b.scale;
    });
    auto change = changes_.begin();
    for (std::int32_t i = 0; i < part.count; i++) {
      if (!open_[i]) continue;
      double from = part.begin(i);
      bool goes_on = from < top_;
      Pair sums = stretches_[i];
      for (; change != changes_.end() && change->stretch == i; ++change) {
        look_at(from, change->scale, goes_on, false, sums);
        from = change->scale, goes_on = false;
        sums += change->step;
      }
      look_at(from, part.begin(i + 1), goes_on, true, sums);
    }
  }

  void walk_part(Part part) {
    list_active(part);
    sum_stretches(part);
    const double limit = this->limit();
    open_.resize(part.count);
    bool any = false;
    for (std::int32_t i = 0; i < part.count; i++) any |= (open_[i] = !exclude_between(ends_[i], ends_[i + 1], limit));
    if (any) look_at_open(part);
  }
  void walk(double from, double to) {
    for (double next; from > to; from = next) {
      next = std::max(to, from * (1 - kPart));
      walk_part(Part(from, next));
      if (excludes_below(ends_.back(), limit())) return;
    }
  }

  // A scale below which codes stay, and with them the parabola, whose lowest point is above it: ends are
  // at most twice the middle before them.
  double lowest_scale() const {
    double lowest = top_;
    for (std::int64_t i = 0; i < piece_.length; i++) {
      const std::int32_t most = piece_.values[i] < 0 ? below_ : above_;
      if (most > 0 && piece_.magnitudes[i] > 0) lowest = std::min(lowest, change_of(i, most - 1));
    }
    return std::max(lowest / 4, 1e-300);
  }

  void search_window(double low, double high) {
    const Window& in = job_.windows[window_];
    enter(in);
    // Below the second number, half of a scale need not be a float.
    top_ = std::max(std::max(high * in.above, -low * in.below) * 1.0001, 0x1p-125 * unit_);
    const double covering = std::max(above_ ? high / grid_[above_] : 0, below_ ? -low / grid_[below_] : 0);
    const bool sampled = in_vectors_ && covering > kTiny * unit_ && covering > 1e-6 && squares_ > kFaint;
    if (!sampled || !sample_coarsely(covering)) return walk(top_, lowest_scale());
    sample_finely();
    for (std::size_t i = 0; i + 1 < samples_.size(); i++) {
      const std::size_t first = i;
      while (i + 1 < samples_.size() && !exclude_between(samples_[i], samples_[i + 1], limit())) i++;
      if (i > first) walk(samples_[first].scale, samples_[i].scale);
    }
  }

  // The difference of large sums is not exact enough to tell the very best apart.
  double exact_error(std::int32_t window, double scale) {
    const Window& in = job_.windows[window];
    above_ = last_code(in.highest), below_ = last_code(-in.lowest);
    double total = 0;
    for (std::int64_t i = 0; i < piece_.length; i++) {
      const double error = piece_.magnitudes[i] - grid_[code_at(i, scale)] * scale;
      total += piece_.weights[i] * error * error;
    }
    return total;
  }

  void store(std::int64_t piece) {
    const std::int64_t at = piece * job_.kept;
    Kept result{job_.best + at, job_.window + at, job_.errors + at, job_.kept, 0};
    const double near = 2 * kRounding * squares_, measure = unit_ * unit_ * weight_unit_;
    const std::int64_t last = std::max<std::int64_t>(std::min(job_.kept, kept_.count), 1) - 1;
    for (std::int64_t i = 0; i < kept_.count && !(errors_[i] > errors_[last] + near); i++) {
      const bool alone = (i == 0 || errors_[i] - errors_[i - 1] > near) &&
                         (i + 1 == kept_.count || errors_[i + 1] - errors_[i] > near);
      double error = errors_[i];
      if (scales_[i] > 0 && !(alone && error > kExactEnough * squares_))
        error = exact_error(windows_[i], scales_[i] * unit_);
      result.take(scales_[i], windows_[i], error / measure);
    }
    result.fill_up();
  }

  const SweepJob& job_;
  std::vector<double> grid_, middles_, inverses_;
  std::vector<Pair> steps_;             // what going to the next number adds to g and to g²
  std::vector<std::int32_t> codes_from_;  // of the least float with the same first bits
  bool whole_ = true;                   // the numbers are 0, 1, 2 and so on
  bool in_vectors_ = true;              // vectors can round to the numbers
  double codes_per_e_ = 1;              // numbers between one and e times as much, if they are floats
  std::vector<float> floats_;
  SweepPiece piece_{};
  double unit_ = 1, weight_unit_ = 1;   // what values and weights are multiplied by
  double squares_ = 0, mean_ = 0;       // X, and the mean of |x|
  // Of a window
  std::int32_t window_ = 0, above_ = 0, below_ = 0;  // its number and its last codes
  double top_ = 0, steepest_ = 0;       // the largest scale that matters; M
  std::vector<Sample> samples_, fresh_, merged_;  // from the largest scale on
  std::vector<float> wanted_;
  std::vector<double> rough_;
  // Of a part
  std::vector<Changed> changed_;
  std::vector<Active> active_;
  std::int64_t changes_in_part_ = 0;
  Pair sums_{};                         // L and Q at its beginning
  std::vector<Pair> stretches_;         // and at that of each stretch
  std::vector<Sample> ends_;
  std::vector<double> different_;
  std::vector<std::uint8_t> open_;
  std::vector<Change> changes_;
  double bound_ = 1e300;                // no better than the last that is wanted
  std::vector<float> scales_;
  std::vector<std::int32_t> windows_;
  std::vector<double> errors_;
  Kept kept_{};
};

}  // namespace

void sweep_task(const SweepJob& job, std::int64_t index) {
  PieceSweep sweep(job);
  const std::int64_t first = index * job.cut.pieces_per_run;
  const std::int64_t end = std::min(first + job.cut.pieces_per_run, job.values.count());
  for (std::int64_t piece = first; piece < end; piece++) sweep.search(piece);
}

}  // namespace calipers
