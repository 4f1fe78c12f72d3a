// Kernels that round values: quantize, feedback, descent, joint, pack.
#pragma once

#include "harness.h"
#include "power.h"

namespace check {

inline void check_quantize() {
  const Numbers numbers = any_numbers();
  Tensor values = any_tensor({{1, 3, 7, 1, 37}, {2, 2, 3, 3, 11}, {1, 1, 2, 3, 1501}});
  if (below(2)) values.add_nonfinite();
  const Tensor weights = weights_for(values);
  const bool weighted = below(2), has_zeros = kGrids[numbers.row].has_zero_points && below(2);
  const std::int64_t pieces = values.count_pieces(), length = values.length();
  const DType dtype = values.pieces.dtype;
  const std::vector<float> scales = floats(pieces, [&] { return std::exp(normal()) * 2 / numbers.highest; });
  const std::vector<float> zeros = floats(pieces, [&] { return numbers.nearest(3 * normal()); });
  QuantizeJob job{};
  job.values = values.pieces;
  if (weighted) job.weights = weights.pieces;
  job.cut = cut_into(pieces, 5, length, below(2) ? length : divide_up(length, 3));
  job.scales = scales.data(), job.zero_points = has_zeros ? zeros.data() : nullptr;
  set_grid(job, numbers);
  job.norm = one_of({2.f, 3.f, 2.4f, 5.5f}), job.power = power_of(job.norm);
  std::vector<std::byte> output(pieces * length * element_size(dtype));
  std::vector<double> errors(job.cut.chunks * pieces);
  job.output = output.data(), job.errors = errors.data();
  run(kernels.quantize, job);
  for (std::int64_t piece = 0; piece < pieces; piece++) {
    const auto quantized = [&](double x) {
      return numbers.quantized_in_float(x, scales[piece], has_zeros ? zeros[piece] : 0);
    };
    double error = 0;
    for (std::int64_t chunk = 0; chunk < job.cut.chunks; chunk++) error += errors[chunk * pieces + piece];
    expect_near("an error", error,
                error_of(values, weighted ? &weights : nullptr, piece, job.norm, quantized), kRough);
    for (std::int64_t i = 0; i < length; i++) {
      const double x = values.at(piece, i);
      const double found = read(dtype, &output[(piece * length + i) * element_size(dtype)]);
      expect_equal("a value", found, std::isfinite(x) ? rounded(dtype, quantized(x)) : x);
    }
  }
}

// Scales and zero points of a matrix with groups of eight columns.
struct ScaledMatrix {
  Numbers numbers = any_numbers();
  std::int64_t rows, columns, group_count = divide_up(columns, 8);
  bool is_shared = below(2), has_zeros = kGrids[numbers.row].has_zero_points && below(2);
  std::vector<float> scales, zeros;
  std::vector<std::int64_t> groups;

  ScaledMatrix(std::int64_t rows, std::int64_t columns) : rows(rows), columns(columns) {
    scales = floats(rows * group_count, [&] { return std::exp(0.3 * normal()) * 2 / numbers.highest; });
    zeros = floats(rows * group_count, [&] { return numbers.nearest(normal()); });
    for (std::int64_t i = 0; i < columns; i++) groups.push_back(i / 8);
  }
  Scaling scaling() const {
    Scaling made{};
    made.scales = scales.data(), made.zeros = has_zeros ? zeros.data() : nullptr;
    made.pitch = is_shared ? 0 : group_count, made.groups = groups.data();
    set_grid(made, numbers);
    return made;
  }
  std::int64_t place(std::int64_t row, std::int64_t column) const {
    return (is_shared ? 0 : row * group_count) + groups[column];
  }
  double scale(std::int64_t row, std::int64_t column) const { return scales[place(row, column)]; }
  double zero(std::int64_t row, std::int64_t column) const {
    return has_zeros ? zeros[place(row, column)] : 0;
  }
  double quantized(double x, std::int64_t row, std::int64_t column) const {
    return numbers.quantized(x, scale(row, column), zero(row, column));
  }
};

// Each result must be the number nearest to its value after the errors of the columns before it.
inline void check_feedback() {
  const std::int64_t rows = 37, pitch = 45, begin = 5, columns = 29;
  const ScaledMatrix by(rows, pitch);
  const std::vector<float> target = floats(rows * pitch, normal), start = floats(rows * columns, normal);
  const std::vector<float> factor = floats(pitch * pitch, [] { return 0.2 * normal(); });
  std::vector<float> adjusted = start, result(rows * pitch), errors(rows * pitch);
  FeedbackJob job{};
  job.cut = cut_into(rows, 24, 1, 1), job.rows = rows, job.columns = columns, job.pitch = pitch;
  job.scaling = by.scaling(), job.scaling.groups += begin;
  job.adjusted = adjusted.data(), job.target = target.data() + begin;
  job.factor = factor.data() + begin * (pitch + 1);
  job.result = result.data() + begin, job.errors = errors.data() + begin;
  run(kernels.feedback, job);
  for (std::int64_t row = 0; row < rows; row++)
    for (std::int64_t k = 0; k < columns; k++) {
      const std::int64_t column = begin + k, at = row * pitch + column;
      double value = start[row * columns + k], found = result[at];
      for (std::int64_t j = begin; j < column; j++)
        value += double{errors[row * pitch + j]} * factor[j * pitch + column];
      expect_equal("an error", errors[at], target[at] - result[at]);
      expect_near("a number of the format", found, by.quantized(found, row, column), 1e-6);
      const double nearest = by.quantized(value, row, column);
      expect_at_most("the distance to a value", std::abs(found - value),
                     std::abs(nearest - value) + 1e-5 * (1 + std::abs(value)));
    }
}

// A Hessian of `width` columns, that of the last of which is zero.
inline std::vector<float> any_hessian(std::int64_t width) {
  const std::vector<float> inputs = floats(2 * width * width, normal);
  std::vector<float> hessian(width * width);
  for (std::int64_t i = 0; i < width - 1; i++)
    for (std::int64_t j = 0; j < width - 1; j++) {
      double total = 0;
      for (std::int64_t k = 0; k < 2 * width; k++)
        total += double{inputs[k * width + i]} * inputs[k * width + j];
      hessian[i * width + j] = static_cast<float>(total / (2 * width) + 0.3);
    }
  return hessian;
}

// No value alone can be changed for a lower Δ H Δᵀ, and the pulls are H Δᵀ.
inline void check_descent() {
  const std::int64_t rows = 37, columns = 45;
  const ScaledMatrix by(rows, columns);
  const std::vector<float> hessian = any_hessian(columns), target = floats(rows * columns, normal);
  std::vector<float> values(rows * columns), pulls(rows * columns);
  for (std::int64_t i = 0; i < rows * columns; i++)
    values[i] = static_cast<float>(by.quantized(target[i] + 0.1 * normal(), i / columns, i % columns));
  const auto pull_of = [&](std::int64_t row, std::int64_t column) {
    double pull = 0;
    for (std::int64_t j = 0; j < columns; j++)
      pull += (double{values[row * columns + j]} - target[row * columns + j]) * hessian[j * columns + column];
    return pull;
  };
  for (std::int64_t i = 0; i < rows * columns; i++)
    pulls[i] = static_cast<float>(pull_of(i / columns, i % columns));
  const std::vector<float> before = values;
  DescentJob job{};
  job.cut = cut_into(rows, 24, 1, 1), job.rows = rows, job.columns = columns;
  job.block = 16, job.sweeps = 200, job.least_gain = 1e-3f;
  job.scaling = by.scaling(), job.hessian = hessian.data();
  std::vector<std::int64_t> changed(job.cut.tasks());
  job.values = values.data(), job.pulls = pulls.data(), job.changed = changed.data();
  run(kernels.descent, job);
  double different = 0, told = 0;
  for (std::int64_t i = 0; i < rows * columns; i++) {
    const std::int64_t row = i / columns, column = i % columns;
    const double pull = pull_of(row, column), curvature = hessian[column * (columns + 1)], now = values[i];
    different += values[i] != before[i];
    expect_at_most("how far a pull is off", std::abs(pulls[i] - pull), 1e-4);
    expect_near("a number of the format", now, by.quantized(now, row, column), 1e-5);
    for (const double magnitude : by.numbers.magnitudes)
      for (const double number : {magnitude, -magnitude}) {
        const double held = std::min(std::max(number, by.numbers.lowest), by.numbers.highest);
        const double step = (held - by.zero(row, column)) * by.scale(row, column) - now;
        const double cost = step * step * curvature;
        if (std::abs(step) < 1e-6) continue;  // that number already
        expect_at_most("what a change gains", -cost - 2 * pull * step,
                       job.least_gain * cost + 1e-4 * std::abs(step));
      }
  }
  for (const std::int64_t count : changed) told += count;
  expect_at_most("the number of values that differ", different, told);
  expect_at_most("one change", 1, different);
}

// Pieces of a row in two blocks, and their candidates.
struct Choices {
  static constexpr std::int64_t rows = 35, blocks = 2, places = 3, columns = 21, panels = 2,
                                width = places * columns;
  std::int64_t candidates = one_of({5, 19});
  Numbers numbers = any_numbers();
  Tensor values{any_dtype(), {1, rows, blocks * places, 1, columns}, any_memory()};
  std::vector<float> scales, zeros, hessian[blocks];
  bool has_zeros = kGrids[numbers.row].has_zero_points && below(2);

  Choices() {
    for (int i = 0; i < 3; i++)
      values.set(below(values.count_pieces()), i, one_of<double>({NAN, INFINITY, -INFINITY}));
    scales = floats(values.count_pieces() * candidates,
                    [&] { return std::exp(0.3 * normal()) * 2 / numbers.highest; });
    zeros = floats(scales.size(), [&] { return numbers.nearest(normal()); });
    for (auto& block : hessian) block = any_hessian(width);
  }
  double h(std::int64_t block, std::int64_t i, std::int64_t j) const { return hessian[block][i * width + j]; }

  // In the panels that the kernel wants: what is within a piece, as a triangle; and all that ends in one.
  std::vector<float> own() const {
    std::vector<float> made;
    for (std::int64_t at = 0; at < blocks * places * panels * panels * kPanel; at++) {
      const std::int64_t i = at % (panels * kPanel), panel = at / (panels * kPanel) % panels,
                         piece = at / (panels * panels * kPanel);
      for (std::int64_t j = panel * kPanel; j < (panel + 1) * kPanel; j++) {
        const std::int64_t first = piece % places * columns, inside = i < columns && j < columns;
        const double twice = i < j ? 2 : i == j ? 1 : 0;
        made.push_back(inside ? static_cast<float>(twice * h(piece / places, first + i, first + j)) : 0);
      }
    }
    return made;
  }
  std::vector<float> across() const {
    std::vector<float> made;
    for (std::int64_t at = 0; at < blocks * places * panels * width; at++) {
      const std::int64_t from = at % width, panel = at / width % panels, piece = at / (width * panels);
      for (std::int64_t j = panel * kPanel; j < (panel + 1) * kPanel; j++)
        made.push_back(j < columns ? static_cast<float>(h(piece / places, from, piece % places * columns + j))
                                   : 0);
    }
    return made;
  }
  // Δᵀ H Δ of a row and a block.
  double error(std::int64_t row, std::int64_t block, const std::vector<std::int64_t>& chosen) const {
    std::vector<double> differences;
    for (std::int64_t i = 0; i < width; i++) {
      const std::int64_t piece = row * blocks * places + block * places + i / columns,
                         at = piece * candidates + chosen[i / columns];
      const double x = values.finite_at(piece, i % columns);
      differences.push_back(numbers.quantized_in_float(x, scales[at], has_zeros ? zeros[at] : 0) - x);
    }
    double total = 0;
    for (std::int64_t i = 0; i < width; i++)
      for (std::int64_t j = 0; j < width; j++) total += differences[i] * h(block, i, j) * differences[j];
    return total;
  }
};

// No piece can choose better by itself, and both ways to begin are worse.
inline void check_joint() {
  const Choices given;
  const std::vector<float> own = given.own(), across = given.across();
  std::vector<std::int64_t> chosen(given.values.count_pieces(), -1);
  JointJob job{};
  job.values = given.values.pieces;
  job.cut = {kJointRows, 1, divide_up(given.rows, kJointRows), given.blocks};
  job.candidates = given.candidates, job.places = given.places, job.panels = given.panels, job.rounds = 50;
  job.scales = given.scales.data(), job.zeros = given.has_zeros ? given.zeros.data() : nullptr;
  job.own = own.data(), job.across = across.data(), job.chosen = chosen.data();
  set_grid(job, given.numbers);
  run(kernels.joint, job);
  for (std::int64_t at = 0; at < given.rows * given.blocks; at++) {
    const std::int64_t row = at / given.blocks, block = at % given.blocks;
    const auto first = chosen.begin() + at * given.places;
    std::vector<std::int64_t> these(first, first + given.places);
    const double error = given.error(row, block, these);
    for (const std::int64_t start : {std::int64_t{0}, given.candidates - 1})
      expect_at_most("the error", error, given.error(row, block, {start, start, start}) * (1 + 1e-4));
    for (std::int64_t& one : these) {
      const std::int64_t taken = one;
      for (one = 0; one < given.candidates; one++)
        expect_at_most("the error", error, given.error(row, block, these) * (1 + 1e-4));
      one = taken;
    }
  }
}

struct Codes {
  Numbers numbers;
  int bits;
};
inline Codes any_codes() {
  return one_of<Codes>({{{0, -2, 1}, 2},
                        {{0, -4, 3}, 3},
                        {{0, -8, 7}, 4},
                        {{0, -128, 127}, 8},
                        {{1, -448, 448}, 8},
                        {{2, -28, 28}, 6},
                        {{3, -7.5, 7.5}, 6},
                        {{4, -6, 6}, 4}});
}

inline void check_pack() {
  const Codes codes = any_codes();
  const Numbers& numbers = codes.numbers;
  const bool is_whole = kGrids[numbers.row].rounding == Rounding::to_integers, has_nan = !below(5);
  Tensor values = any_tensor({{1, 1, 1, 7, 37}, {1, 1, 1, 3, 1030}});
  const std::int64_t rows = values.pieces.rows, columns = values.pieces.columns;
  values.set(0, below(columns), -0.0);
  values.set(0, below(columns), INFINITY);
  values.set(0, columns + below(columns), has_nan ? NAN : 1e-9);
  PackJob job{};
  job.values = values.pieces, job.cut = cut_into(rows, 2, 1, 1);
  job.height = one_of({1, 2}), job.width = one_of({8, 19, 2000});
  job.scale_columns = divide_up(columns, job.width);
  const std::int64_t blocks = divide_up(rows, job.height) * job.scale_columns;
  const std::vector<float> scales = floats(blocks, [&] { return std::exp(normal()) * 2 / numbers.highest; });
  const std::vector<float> zeros = floats(blocks, [&] { return is_whole ? below(3) - 1.0 : one_of({0.0, -0.0}); });
  job.scales = scales.data(), job.zeros = zeros.data(), job.zero_step = below(2), job.working = any_dtype();
  set_grid(job, numbers);
  job.offset = is_whole && below(2) ? -job.lowest : 0;
  const std::int64_t bits = job.bits = codes.bits;
  job.row_bytes = divide_up(columns * bits, 8) + 3;
  std::vector<std::uint8_t> packed(rows * job.row_bytes, 255), expected(packed.size()), nans(job.cut.tasks());
  std::vector<double> errors(job.cut.tasks() * columns, -1), exact(columns);
  std::vector<float> output(rows * columns);
  job.packed = packed.data(), job.nans = nans.data(), job.errors = errors.data(), job.output = output.data();
  job.rows_together = one_of({1, 2, 5});
  run(kernels.pack, job);
  expect_equal("whether there is a NaN", *std::max_element(nans.begin(), nans.end()), has_nan);
  if (has_nan) return;
  for (std::int64_t i = 0; i < rows * columns; i++) {
    const std::int64_t row = i / columns, column = i % columns;
    const std::int64_t block = row / job.height * job.scale_columns + column / job.width;
    const double quotient = rounded(job.working, values.at(0, i) / scales[block]);
    const double moved = rounded(job.working, quotient + zeros[block * job.zero_step]);
    const int magnitude = static_cast<int>(numbers.code(moved, numbers.lowest, numbers.highest));
    const int sign = std::signbit(moved);
    const int code = is_whole ? (sign ? -magnitude : magnitude) + static_cast<int>(job.offset)
                              : magnitude | sign << (bits - 1);
    for (std::int64_t bit = 0, at = column * bits; bit < bits; bit++, at++)
      expected[row * job.row_bytes + at / 8] |= (code >> bit & 1) << at % 8;
    const double number = numbers.nearest(moved);
    const double value = static_cast<float>((number - zeros[block * job.zero_step]) * scales[block]);
    expect_equal("a value", output[i], value);
    if (std::isfinite(values.at(0, i))) exact[column] += std::pow(value - values.at(0, i), 2);
  }
  for (std::int64_t column = 0; column < columns; column++) {
    double error = 0;
    for (std::int64_t task = 0; task < job.cut.tasks(); task++) error += errors[task * columns + column];
    expect_near("the error of a column", error, exact[column], 1e-6);
  }
  for (std::size_t i = 0; i < packed.size(); i++) expect_equal("a byte", packed[i], expected[i]);
}

}  // namespace check
