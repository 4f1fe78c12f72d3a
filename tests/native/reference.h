// What the kernels are judged by: floats of 16 bits, number formats and errors, one value at a time and in
// double; and random tensors in every kind of memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <random>
#include <vector>

#include "jobs.h"

namespace check {

using calipers::DType;
using calipers::Pieces;

// Chance, the same in every run

inline std::mt19937& chance() {
  static std::mt19937 engine(20);
  return engine;
}
inline std::int64_t below(std::int64_t end) { return chance()() % end; }
inline double normal() {
  const double radius = std::sqrt(-2 * std::log((chance()() + 1.0) / 4294967297.0));
  return radius * std::cos(6.283185307179586 * (chance()() / 4294967296.0));
}
template <class T> T one_of(std::initializer_list<T> choices) {
  return choices.begin()[below(choices.size())];
}

// Floats of 16 bits

inline double decode(DType dtype, std::uint32_t bits) {
  const int digits = dtype == DType::f16 ? 10 : 7, bias = dtype == DType::f16 ? 15 : 127;
  const int exponent = (bits & 0x7fff) >> digits, mantissa = bits & ((1 << digits) - 1);
  const double magnitude = exponent == 2 * bias + 1 ? (mantissa ? NAN : INFINITY)
                           : exponent ? std::ldexp((1 << digits) + mantissa, exponent - bias - digits)
                                      : std::ldexp(mantissa, 1 - bias - digits);
  return bits & 0x8000 ? -magnitude : magnitude;
}

// The nearest, ties to even. Without a sign, floats ascend with their bits.
inline std::uint16_t encode(DType dtype, double x) {
  const std::uint32_t infinity = dtype == DType::f16 ? 0x7c00 : 0x7f80;
  if (std::isnan(x)) return dtype == DType::f16 ? 0x7e00 : 0x7fc0;
  std::uint32_t low = 0, high = infinity;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (decode(dtype, middle) <= std::abs(x) ? low : high) = middle;
  }
  const double step = high == infinity ? decode(dtype, low) - decode(dtype, low - 1)
                                       : decode(dtype, high) - decode(dtype, low);
  const double tie = decode(dtype, low) + step / 2;
  const bool up = std::abs(x) > tie || (std::abs(x) == tie && low % 2);
  return static_cast<std::uint16_t>((up ? high : low) | (std::signbit(x) ? 0x8000 : 0));
}

// What float32 and then the dtype make of a number.
inline double rounded(DType dtype, double x) {
  const float single = static_cast<float>(x);
  return dtype == DType::f32 ? single : decode(dtype, encode(dtype, single));
}

inline double read(DType dtype, const std::byte* from) {
  float single;
  std::uint16_t bits;
  if (dtype != DType::f32) return std::memcpy(&bits, from, 2), decode(dtype, bits);
  return std::memcpy(&single, from, 4), single;
}
inline void write(DType dtype, double x, std::byte* to) {
  const float single = static_cast<float>(x);
  if (dtype == DType::f32) {
    std::memcpy(to, &single, 4);
  } else {
    const std::uint16_t bits = encode(dtype, single);
    std::memcpy(to, &bits, 2);
  }
}

// Tensors

enum class Memory { packed, with_gaps, in_blocks, transposed };

struct Shape {
  std::int64_t observations, grid_rows, grid_columns, rows, columns;
};

struct Tensor {
  std::vector<std::byte> memory;
  Pieces pieces{};

  // Of normal values; what lies between them is 10⁴, which would show.
  Tensor(DType dtype, Shape shape, Memory kind) {
    const std::int64_t sizes[] = {shape.observations, shape.grid_rows, shape.grid_columns, shape.rows,
                                  shape.columns};
    // The dimensions from the outermost on.
    static constexpr int plain[] = {1, 2, 0, 3, 4}, blocks[] = {0, 1, 3, 2, 4}, turned[] = {4, 3, 0, 1, 2};
    const int* order = kind == Memory::in_blocks ? blocks : kind == Memory::transposed ? turned : plain;
    std::int64_t strides[5], count = kind == Memory::with_gaps ? 3 : 1;
    for (int i = 4; i >= 0; i--) {
      strides[order[i]] = count;
      count = count * sizes[order[i]] + (kind == Memory::with_gaps ? 2 : 0);
    }
    memory.resize(count * calipers::element_size(dtype));
    pieces = {memory.data(), dtype,      sizes[0],   sizes[1],   sizes[2],   sizes[3],
              sizes[4],      strides[0], strides[1], strides[2], strides[3], strides[4]};
    for (std::int64_t i = 0; i < count; i++)
      write(dtype, 1e4, memory.data() + i * calipers::element_size(dtype));
    for (std::int64_t piece = 0; piece < count_pieces(); piece++)
      for (std::int64_t i = 0; i < length(); i++) set(piece, i, normal());
  }

  Tensor(Tensor&&) = default;  // `pieces` points into `memory`, which a copy would not have

  std::int64_t count_pieces() const { return pieces.count(); }
  std::int64_t length() const { return pieces.length(); }
  std::int64_t place(std::int64_t piece, std::int64_t position) const {
    return (pieces.offset(piece) + pieces.offset_within(position)) * calipers::element_size(pieces.dtype);
  }
  double at(std::int64_t piece, std::int64_t position) const {
    return read(pieces.dtype, memory.data() + place(piece, position));
  }
  double finite_at(std::int64_t piece, std::int64_t position) const {
    const double x = at(piece, position);
    return std::isfinite(x) ? x : 0;
  }
  void set(std::int64_t piece, std::int64_t position, double x) {
    write(pieces.dtype, x, memory.data() + place(piece, position));
  }
  void make_positive() {
    for (std::int64_t piece = 0; piece < count_pieces(); piece++)
      for (std::int64_t i = 0; i < length(); i++) set(piece, i, std::abs(at(piece, i)));
  }
  // A few NaN and Inf, and if there are several pieces, one of nothing else.
  void add_nonfinite() {
    for (int i = 0; i < 4; i++)
      set(below(count_pieces()), below(length()), one_of<double>({NAN, INFINITY, -INFINITY}));
    const std::int64_t piece = below(count_pieces());
    for (std::int64_t i = 0; count_pieces() > 1 && i < length(); i++) set(piece, i, NAN);
  }
};

// Number formats

struct Numbers {
  std::size_t row;
  double lowest, highest;
  std::vector<double> magnitudes;  // ascending from zero; the place of each is its code

  Numbers(std::size_t row, double lowest, double highest) : row(row), lowest(lowest), highest(highest) {
    const calipers::GridRow& grid = calipers::kGrids[row];
    const double most = std::max(-lowest, highest);
    for (int code = 0;; code++) {
      const int exponent = code >> grid.mantissa, mantissa = code - (exponent << grid.mantissa);
      const double next = grid.rounding == calipers::Rounding::to_integers ? code
                          : exponent ? std::ldexp((1 << grid.mantissa) + mantissa,
                                                  exponent - 1 + grid.smallest_exponent - grid.mantissa)
                                     : std::ldexp(mantissa, grid.smallest_exponent - grid.mantissa);
      if (next > most) break;
      magnitudes.push_back(next);
    }
  }

  // The code, without its sign, of the nearest number between two ends; ties to even.
  std::size_t code(double x, double lowest, double highest) const {
    const double held = std::abs(std::min(std::max(x, lowest), highest));
    const std::size_t next =
        std::lower_bound(magnitudes.begin(), magnitudes.end(), held) - magnitudes.begin();
    if (!next || next == magnitudes.size()) return next ? next - 1 : 0;
    const double tie = (magnitudes[next - 1] + magnitudes[next]) / 2;
    return held > tie || (held == tie && next % 2 == 0) ? next : next - 1;
  }
  double nearest(double x, double lowest, double highest) const {
    return std::copysign(magnitudes[code(x, lowest, highest)], x);
  }
  double nearest(double x) const { return nearest(x, lowest, highest); }

  double quantized(double x, double scale, double zero) const {
    return (nearest(x / scale + zero) - zero) * scale;
  }
  // The same in the steps of float32.
  double quantized_in_float(double x, double scale, double zero) const {
    const float quotient = static_cast<float>(x / scale), code = static_cast<float>(quotient + zero);
    return static_cast<float>(static_cast<float>(nearest(code) - zero) * scale);
  }
};

// int4, int8, e4m3, e3m2, e2m3 and e2m1; or those that have zero points.
inline Numbers any_numbers(bool with_zero_points = false) {
  switch (below(with_zero_points ? 3 : 6)) {
    case 0:
      return {0, -8, 7};
    case 1:
      return {0, -128, 127};
    case 2:
      return {1, -448, 448};
    case 3:
      return {2, -28, 28};
    case 4:
      return {3, -7.5, 7.5};
    default:
      return {4, -6, 6};
  }
}

}  // namespace check
