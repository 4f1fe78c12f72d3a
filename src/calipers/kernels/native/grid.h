// The numbers a code can stand for, and how an error counts.
#pragma once

#include "simd.h"

namespace calipers {
namespace {

// What a value becomes: the nearest number of the grid, ties to even.

struct IntegerGrid {
  V lowest, highest;
  IntegerGrid(float lowest, float highest) : lowest(all(lowest)), highest(all(highest)) {}
  V round(V code) const {
    const V large = all(12582912.f);  // 1.5 · 2²³: its last bit is worth 1
    return (minimum(maximum(code, lowest), highest) + large) - large;
  }
};

template <int mantissa, int smallest_exponent> struct FloatGrid {
  V lowest, highest;
  FloatGrid(float lowest, float highest) : lowest(all(lowest)), highest(all(highest)) {}
  V round(V code) const {
    return round_to_float<mantissa, smallest_exponent>(minimum(maximum(code, lowest), highest));
  }
};
using Fp8Grid = FloatGrid<3, -6>;
using Fp4Grid = FloatGrid<1, 0>;

// |error|^norm

struct Square {
  explicit Square(const Power&) {}
  V operator()(V error) const { return error * error; }
};

struct Cube {
  explicit Cube(const Power&) {}
  V operator()(V error) const { return absolute(error) * (error * error); }
};

struct AnyPower {
  V coefficients[Power::degree + 1];
  Table32 octaves;
  int squares;
  explicit AnyPower(const Power& power) : octaves(power.octaves), squares(power.squares) {
    for (int i = 0; i <= Power::degree; i++) coefficients[i] = all(power.coefficients[i]);
  }
  V operator()(V error) const {
    const V size = maximum(absolute(error), all(0x1p-29f));  // at which the table holds zero
    const I bits = (I)size;
    const V mantissa = (V)((bits & 0x007fffff) | 0x3f800000);
    V power = coefficients[0];
    for (int i = 1; i <= Power::degree; i++) power = power * mantissa + coefficients[i];
    power *= octaves[bits >> 23];
    for (int i = 0; i < squares; i++) power *= size * size;
    return power;
  }
};

}  // namespace
}  // namespace calipers
