// The numbers a code can stand for, and how an error counts.
//
// Everything here works on several vectors in step: their chains of operations do not depend on each
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

template <int N = U, class F> [[gnu::always_inline]] inline void each(F f) {
  for (int i = 0; i < N; i++) f(i);
}

constexpr std::int64_t kBlock = 32;  // values of a lane after which its sum is looked at

// One power of two per lane, that brings the largest magnitude between 1 and 2 (at the ends of
// float32: between 2⁻²³ and 4).
inline V unit_of(V largest) {
  const I exponent = 254 - (I)((U32)largest >> 23);
  const I held = exponent < 1 ? all_bits(1) : (exponent > 253 ? all_bits(253) : exponent);
  return (V)((U32)held << 23);
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
  template <int N> void apply(V (&error)[N]) const {
    each<N>([&](int i) { error[i] = error[i] * error[i]; });
  }
};

struct Cube {
  explicit Cube(const Power&) {}
  template <int N> void apply(V (&error)[N]) const {
    each<N>([&](int i) { error[i] = absolute(error[i]) * (error[i] * error[i]); });
  }
};

struct AnyPower {
  V coefficients[Power::degree + 1];
  Table32 octaves;
  int squares;
  explicit AnyPower(const Power& power) : octaves(power.octaves), squares(power.squares) {
    for (int i = 0; i <= Power::degree; i++) coefficients[i] = all(power.coefficients[i]);
  }
  template <int N> void apply(V (&error)[N]) const {
    V mantissa[N], power[N];
    // At the floor the table holds zero.
    each<N>([&](int i) { error[i] = larger_magnitude(error[i], all(0x1p-29f)); });
    each<N>([&](int i) { mantissa[i] = (V)(((I)error[i] & 0x007fffff) | 0x3f800000); });
    each<N>([&](int i) { power[i] = coefficients[0] * mantissa[i] + coefficients[1]; });
    for (int k = 2; k <= Power::degree; k++)
      each<N>([&](int i) { power[i] = power[i] * mantissa[i] + coefficients[k]; });
    each<N>([&](int i) { power[i] = power[i] * octaves[(I)error[i] >> 23]; });
    for (int k = 0; k < squares; k++)
      each<N>([&](int i) { power[i] = power[i] * (error[i] * error[i]); });
    each<N>([&](int i) { error[i] = power[i]; });
  }
};

}  // namespace
}  // namespace calipers
