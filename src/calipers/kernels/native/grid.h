// The numbers a code can stand for, and how an error counts.
//
// Everything here works on U vectors in step: their chains of operations do not depend on each
// other, so that the processor always finds one that is ready.
#pragma once

#include "simd.h"

namespace calipers {
namespace {

#if defined(__AVX512F__)
constexpr int U = 4;  // as many as the registers hold
#else
constexpr int U = 2;
#endif

template <class F> [[gnu::always_inline]] inline void each(F f) {
  for (int i = 0; i < U; i++) f(i);
}

// A candidate: scale, 1 / scale and zero point of each lane.
struct Quantizer {
  V scale, inverse, zero;
};

// Grids: the nearest number, ties to even, and the error of values. Unless codes are shifted by a
// zero point, values come without their sign, which saves one end of the grid. Where the ends are
// not alike, `limits` has for each value the end on its side.

constexpr float kLarge = 12582912.f;  // 1.5 · 2²³: its last bit is worth 1

template <bool shifted> struct IntegerGrid {
  V lowest, highest;
  IntegerGrid(float lowest, float highest) : lowest(all(lowest)), highest(all(highest)) {}
  V round(V code) const { return (minimum(maximum(code, lowest), highest) + kLarge) - kLarge; }
  static V limit(V x, float lowest, float highest) {
    return x < 0 ? all(kLarge - lowest) : all(kLarge + highest);
  }
  void error(const Quantizer& by, const V* x, const V* limits, V (&error)[U]) const {
    const V base = shifted ? kLarge + by.zero : all(kLarge);
    const V least = kLarge + lowest, most = kLarge + highest;
    V code[U];
    each([&](int i) { code[i] = x[i] * by.inverse + base; });
    if (shifted) each([&](int i) { code[i] = maximum(code[i], least); });
    each([&](int i) { code[i] = minimum(code[i], shifted ? most : limits[i]); });
    each([&](int i) { code[i] = code[i] - base; });
    each([&](int i) { error[i] = x[i] - code[i] * by.scale; });
  }
};

template <int mantissa, int smallest_exponent, bool shifted> struct FloatGrid {
  V lowest, highest;
  FloatGrid(float lowest, float highest) : lowest(all(lowest)), highest(all(highest)) {}
  V round(V code) const {
    return round_to_float<mantissa, smallest_exponent>(minimum(maximum(code, lowest), highest));
  }
  void error(const Quantizer& by, const V* x, const V*, V (&error)[U]) const {
    V code[U];
    each([&](int i) { code[i] = shifted ? x[i] * by.inverse + by.zero : x[i] * by.inverse; });
    if (shifted) each([&](int i) { code[i] = maximum(code[i], lowest); });
    each([&](int i) { code[i] = minimum(code[i], highest); });
    V large[U];
    const V smallest = all(two_to(smallest_exponent)), step = all(1.5f * (1 << (23 - mantissa)));
    each([&](int i) { large[i] = maximum((V)((I)code[i] & kExponent), smallest); });
    each([&](int i) { code[i] = code[i] + large[i] * step; });
    each([&](int i) { code[i] = code[i] - large[i] * step; });
    each([&](int i) { error[i] = x[i] - (shifted ? code[i] - by.zero : code[i]) * by.scale; });
  }
};
template <bool shifted> using Fp8Grid = FloatGrid<3, -6, shifted>;
template <bool shifted> using Fp4Grid = FloatGrid<1, 0, shifted>;

// Norms: |error|^norm, in place.

struct Square {
  explicit Square(const Power&) {}
  void apply(V (&error)[U]) const {
    each([&](int i) { error[i] = error[i] * error[i]; });
  }
};

struct Cube {
  explicit Cube(const Power&) {}
  void apply(V (&error)[U]) const {
    each([&](int i) { error[i] = absolute(error[i]) * (error[i] * error[i]); });
  }
};

struct AnyPower {
  V coefficients[Power::degree + 1];
  Table32 octaves;
  int squares;
  explicit AnyPower(const Power& power) : octaves(power.octaves), squares(power.squares) {
    for (int i = 0; i <= Power::degree; i++) coefficients[i] = all(power.coefficients[i]);
  }
  void apply(V (&error)[U]) const {
    V mantissa[U], power[U];
    // At the floor the table holds zero.
    each([&](int i) { error[i] = larger_magnitude(error[i], all(0x1p-29f)); });
    each([&](int i) { mantissa[i] = (V)(((I)error[i] & 0x007fffff) | 0x3f800000); });
    each([&](int i) { power[i] = coefficients[0] * mantissa[i] + coefficients[1]; });
    for (int k = 2; k <= Power::degree; k++)
      each([&](int i) { power[i] = power[i] * mantissa[i] + coefficients[k]; });
    each([&](int i) { power[i] = power[i] * octaves[(I)error[i] >> 23]; });
    for (int k = 0; k < squares; k++)
      each([&](int i) { power[i] = power[i] * (error[i] * error[i]); });
    each([&](int i) { error[i] = power[i]; });
  }
};

}  // namespace
}  // namespace calipers
