// How kernels are run, and what they found is reported.
#pragma once

#include <atomic>
#include <cstdio>
#include <functional>
#include <map>
#include <string>

#include "parallel.h"
#include "reference.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace calipers {
extern const Kernels JOIN(kernels_, CALIPERS_ISA);
}

namespace check {

using namespace calipers;

inline const Kernels& kernels = JOIN(kernels_, CALIPERS_ISA);
constexpr double kRough = 2e-5;  // of sums in float32

// What is reported

inline std::string checked;  // the kernel
inline std::map<std::string, int> failures;

inline void expect(bool holds, const char* what, double found, const char* expected, double value) {
  if (holds || failures[checked]++ >= 3) return;
  std::printf("%s %s: %s is %.9g, expected %s%.9g\n", kernels.name, checked.c_str(), what, found, expected,
              value);
}
inline void expect_near(const char* what, double found, double expected, double tolerance) {
  const double most = tolerance * std::max(std::abs(found), std::abs(expected));
  const bool both_nan = std::isnan(found) && std::isnan(expected);
  expect(found == expected || both_nan || std::abs(found - expected) <= most, what, found, "", expected);
}
inline void expect_equal(const char* what, double found, double expected) {
  expect_near(what, found, expected, 0);
}
inline void expect_at_most(const char* what, double found, double most) {
  expect(found <= most, what, found, "at most ", most);
}

// What all jobs need

template <class Job> void set_grid(Job& job, const Numbers& numbers) {
  job.grid = numbers.row;
  job.lowest = static_cast<float>(numbers.lowest);
  job.highest = static_cast<float>(numbers.highest);
}

template <class Job> void run(const Kernel<Job>& kernel, const Job& job) {
  std::atomic<bool> intact{true};
  run_tasks(
      job.cut.tasks(), 3, kernel.scratch_bytes(job),
      [&](std::int64_t task, std::byte* memory) {
        if (!kernel.run(job, task, memory)) intact = false;
      },
      [] { return false; });
  expect(intact, "whether it stayed within its scratch memory", intact, "", 1);
}

inline std::int64_t divide_up(std::int64_t count, std::int64_t unit) { return (count + unit - 1) / unit; }
inline Cut cut_into(std::int64_t pieces, std::int64_t per_run, std::int64_t positions,
                    std::int64_t per_chunk) {
  return {per_run, per_chunk, divide_up(pieces, per_run), divide_up(positions, per_chunk)};
}
inline Cut whole(const Tensor& values) { return cut_into(values.count_pieces(), kLanes, 1, values.length()); }

inline DType any_dtype() { return one_of({DType::f32, DType::f16, DType::bf16}); }
inline Memory any_memory() {
  return one_of({Memory::packed, Memory::with_gaps, Memory::in_blocks, Memory::transposed});
}
inline Tensor any_tensor(std::initializer_list<Shape> shapes) {
  return Tensor(any_dtype(), one_of(shapes), any_memory());
}
inline Tensor weights_for(const Tensor& values) {
  const Pieces& p = values.pieces;
  Tensor weights(any_dtype(), {p.observations, p.grid_rows, p.grid_columns, p.rows, p.columns}, any_memory());
  weights.make_positive();
  return weights;
}
inline std::vector<float> floats(std::int64_t count, const std::function<double()>& next) {
  std::vector<float> made(count);
  for (float& one : made) one = static_cast<float>(next());
  return made;
}

// The smallest and the largest of zero and the values of each piece.
struct Ends {
  std::vector<float> low, high;
  explicit Ends(const Tensor& values) : low(values.count_pieces()), high(values.count_pieces()) {
    for (std::int64_t piece = 0; piece < values.count_pieces(); piece++)
      for (std::int64_t i = 0; i < values.length(); i++) {
        low[piece] = std::min(low[piece], static_cast<float>(values.finite_at(piece, i)));
        high[piece] = std::max(high[piece], static_cast<float>(values.finite_at(piece, i)));
      }
  }
};

// Σ w·|q−x|^norm
template <class F>
double error_of(const Tensor& values, const Tensor* weights, std::int64_t piece, double norm, F quantized) {
  double total = 0;
  for (std::int64_t i = 0; i < values.length(); i++) {
    const double x = values.finite_at(piece, i), error = std::abs(quantized(x) - x);
    total += (weights ? weights->at(piece, i) : 1) * (norm == 2 ? error * error : std::pow(error, norm));
  }
  return total;
}

}  // namespace check
