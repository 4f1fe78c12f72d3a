// Candidates of the pieces of a block, chosen together: piece after piece takes the one with the least
// Δᵀ H Δ given the others, until nothing changes.
//
// With the others fixed, that is Δ_cᵀ H_own Δ_c + 2 pull · Δ_c of candidate c. The first does not
// change from round to round. The pull of the others is brought up to date when a piece has its turn,
// and only by what changed since its last one.
#pragma once

#include "arena.h"
#include "products.h"
#include "tile.h"

namespace calipers {
namespace {

constexpr std::int32_t kNothing = -1;  // a piece that has not been told of another's choice

struct JointScratch {
  float* differences;     // [places][rows][candidates][length]
  float *pulls, *others;  // [places][rows][length]: by the choice, and by another start
  float* steps;           // [rows][length]
  float* forms;           // [places][rows][candidates]
  std::int32_t* choice;   // [places][rows]
  std::int32_t* told;     // [places][other places][rows]
  JointScratch(Arena& arena, const JointJob& job) {
    const std::int64_t rows = job.cut.pieces_per_run, pieces = job.places * rows;
    differences = arena.take<float>(pieces * job.candidates * job.length());
    pulls = arena.take<float>(pieces * job.length()), others = arena.take<float>(pieces * job.length());
    steps = arena.take<float>(rows * job.length());
    forms = arena.take<float>(pieces * job.candidates);
    choice = arena.take<std::int32_t>(pieces), told = arena.take<std::int32_t>(pieces * job.places);
  }
};

struct Joint : JointScratch {
  const JointJob& job;
  std::int64_t block, first, rows;  // of the grid

  Joint(const JointJob& job, std::int64_t task, const JointScratch& scratch)
      : JointScratch(scratch), job(job), block(task / job.cut.runs),
        first(task % job.cut.runs * job.cut.pieces_per_run),
        rows(job.values.grid_rows - first < job.cut.pieces_per_run ? job.values.grid_rows - first
                                                                   : job.cut.pieces_per_run) {}

  float* difference(std::int64_t place, std::int64_t row, std::int64_t candidate) const {
    return differences + ((place * rows + row) * job.candidates + candidate) * job.length();
  }
  float* pull(std::int64_t place, std::int64_t row) const { return pull_of(pulls, place, row); }
  float* pull_of(float* pulls, std::int64_t place, std::int64_t row) const {
    return pulls + (place * rows + row) * job.length();
  }
  float* form(std::int64_t place, std::int64_t row) const {
    return forms + (place * rows + row) * job.candidates;
  }
  // What `place` gets from the errors of `other`.
  Panels across(std::int64_t other, std::int64_t place) const {
    const std::int64_t each = job.values.columns * kPanel, of_place = block * job.places + place;
    return {job.across + (of_place * job.panels * job.places + other) * each, job.panels,
            job.places * each};
  }
  Panels own(std::int64_t place) const {
    const std::int64_t each = job.length() * kPanel, of_place = block * job.places + place;
    return {job.own + of_place * job.panels * each, job.panels, each};
  }

  template <class Grid> void quantize(std::int64_t place) const {
    const std::int64_t columns = job.values.columns, length = job.length();
    const V lowest = all(job.lowest), highest = all(job.highest);
    for (std::int64_t row = 0; row < rows; row++) {
      const std::int64_t piece =
          (first + row) * job.values.grid_columns + block * job.places + place;
      float* values = steps;
      std::memset(values, 0, length * sizeof(float));
      load_tile(job.values, piece, 1, 0, columns, values, columns);
      for (std::int64_t i = 0; i < length; i += W)
        store(values + i, finite_or_zero(load_as<V>(values + i)));
      for (std::int64_t c = 0; c < job.candidates; c++) {
        const V scale = all(job.scales[piece * job.candidates + c]);
        const V zero = job.zeros ? all(job.zeros[piece * job.candidates + c]) : V{};
        float* to = difference(place, row, c);
        for (std::int64_t i = 0; i < length; i += W) {
          const V x = load_as<V>(values + i);
          const V rounded = Grid::round(x / scale + zero, lowest, highest) - zero;
          store(to + i, rounded * scale - x);
        }
      }
    }
  }

  void compare(std::int64_t place) const {
    const float* all_of_them[kTile / 8];
    const std::int64_t count = rows * job.candidates;
    for (std::int64_t begin = 0; begin < count; begin += kTile / 8) {
      const std::int64_t part = count - begin < (std::int64_t)kTile / 8 ? count - begin : kTile / 8;
      for (std::int64_t i = 0; i < part; i++)
        all_of_them[i] = difference(place, 0, 0) + (begin + i) * job.length();
      quadratic_forms(all_of_them, part, own(place), form(place, 0) + begin);
    }
  }

  void multiply_across(std::int64_t other, std::int64_t place, const float* const* from,
                       float* const* to, std::int64_t count) const {
    add_products(from, to, count, job.values.columns, across(other, place));
  }

  // Let all places of a row have one candidate. Places are told of those behind them only, which is
  // all it takes to know the error.
  void start_with(std::int32_t candidate, float* pulls, float* errors) const {
    std::memset(pulls, 0, job.places * rows * job.length() * sizeof(float));
    const float* from[kJointRows];
    float* to[kJointRows];
    for (std::int64_t row = 0; row < rows; row++) errors[row] = 0;
    for (std::int64_t place = 0; place < job.places; place++) {
      for (std::int64_t other = place + 1; other < job.places; other++) {
        for (std::int64_t row = 0; row < rows; row++) {
          from[row] = difference(other, row, candidate);
          to[row] = pull_of(pulls, place, row);
        }
        multiply_across(other, place, from, to, rows);
      }
      for (std::int64_t row = 0; row < rows; row++)
        errors[row] += form(place, row)[candidate] +
                       2 * dot(difference(place, row, candidate), pull_of(pulls, place, row), job.panels);
    }
  }

  // The better of two starts, row by row.
  void start() {
    float errors[2][kJointRows];
    const std::int32_t last = static_cast<std::int32_t>(job.candidates - 1);
    start_with(last, others, errors[1]);
    start_with(0, pulls, errors[0]);
    for (std::int64_t row = 0; row < rows; row++) {
      const bool is_last = errors[1][row] < errors[0][row];
      for (std::int64_t place = 0; place < job.places; place++) {
        const std::int64_t at = (place * rows + row) * job.length();
        if (is_last) std::memcpy(pulls + at, others + at, job.length() * sizeof(float));
        choice[place * rows + row] = is_last ? last : 0;
        for (std::int64_t other = 0; other < job.places; other++)
          told[(place * job.places + other) * rows + row] =
              other < place ? kNothing : choice[place * rows + row];
      }
    }
  }

  // Tell a place what the others chose since its last turn, and mark the rows in which they did.
  void tell(std::int64_t place, bool* news) const {
    const float* from[kJointRows];
    float* to[kJointRows];
    for (std::int64_t other = 0; other < job.places; other++) {
      if (other == place) continue;
      std::int32_t* known = told + (place * job.places + other) * rows;
      std::int64_t count = 0;
      for (std::int64_t row = 0; row < rows; row++) {
        const std::int32_t chosen = choice[other * rows + row];
        if (known[row] == chosen) continue;
        const float* now = difference(other, row, chosen);
        from[count] = now;
        if (known[row] != kNothing) {
          const float* before = difference(other, row, known[row]);
          float* step = steps + count * job.length();
          for (std::int64_t i = 0; i < job.length(); i += W)
            store(step + i, load_as<V>(now + i) - load_as<V>(before + i));
          from[count] = step;
        }
        to[count++] = pull(place, row);
        known[row] = chosen;
        news[row] = true;
      }
      multiply_across(other, place, from, to, count);
    }
  }

  std::int32_t best_of(std::int64_t place, std::int64_t row) const {
    const float* forms = form(place, row);
    std::int32_t best = 0;
    float least = 0;
    for (std::int64_t begin = 0; begin < job.candidates; begin += W) {
      const std::int64_t left = job.candidates - begin < W ? job.candidates - begin : W;
      const V pulled = dots(difference(place, row, begin), left, pull(place, row), job.panels);
      for (std::int64_t i = 0; i < left; i++) {
        const float error = forms[begin + i] + 2 * pulled[i];
        if (begin + i && !(error < least)) continue;
        least = error;
        best = static_cast<std::int32_t>(begin + i);
      }
    }
    return best;
  }

  // Give one place its turn. Returns whether any row chose anew.
  bool choose(std::int64_t place, bool is_first) const {
    bool news[kJointRows], changed = false;
    for (std::int64_t row = 0; row < rows; row++) news[row] = is_first;
    tell(place, news);
    for (std::int64_t row = 0; row < rows; row++) {
      if (!news[row]) continue;
      const std::int32_t best = best_of(place, row);
      changed |= choice[place * rows + row] != best;
      choice[place * rows + row] = best;
    }
    return changed;
  }
};

inline void joint_task(const JointJob& job, std::int64_t task, JointScratch& scratch) {
  Joint own(job, task, scratch);
  for (std::int64_t place = 0; place < job.places; place++) {
    with_grid(job.grid, false, [&](auto grid) { own.quantize<decltype(grid)>(place); });
    own.compare(place);
  }
  own.start();
  for (std::int64_t round = 0; round < job.rounds; round++) {
    bool changed = false;
    for (std::int64_t place = 0; place < job.places; place++) changed |= own.choose(place, !round);
    if (!changed) break;
  }
  for (std::int64_t row = 0; row < own.rows; row++)
    for (std::int64_t place = 0; place < job.places; place++)
      job.chosen[(own.first + row) * job.values.grid_columns + own.block * job.places + place] =
          own.choice[place * own.rows + row];
}

}  // namespace
}  // namespace calipers
