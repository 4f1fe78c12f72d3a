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

// One power of two per lane, that brings the largest magnitude between 2⁵ and 2⁶ (at the ends of
// float32: between 2⁻²³ and 2⁷). Errors are at most twice that, as `Power` asks for.
constexpr int kUnitExponent = 5;
inline V unit_of(V largest) {
  const I exponent = 254 + kUnitExponent - (I)((U32)largest >> 23);
  const I held = exponent < 1 ? all_bits(1) : (exponent > 253 ? all_bits(253) : exponent);
  return (V)((U32)held << 23);
}

// A candidate: scale, 1 / scale and zero point of each lane.
struct Quantizer {
  V scale, inverse, zero;
};

// Numbers: how codes become the nearest of them, ties to even. Codes come with an `offset`, which may
// be all it takes. `mirrored`: each has its negative. `uniform`: all steps are alike.

constexpr float kLarge = 12582912.f;  // 1.5 · 2²³: its last bit is worth 1

struct Integers {
  static constexpr float offset = kLarge;
  static constexpr bool mirrored = false, uniform = true;
  static V round(V code) { return code; }
};

template <int mantissa, int smallest_exponent> struct Floats {
  static constexpr float offset = 0;
  static constexpr bool mirrored = true, uniform = false;
  static V round(V code) { return round_to_float<mantissa, smallest_exponent>(code); }
};

// A grid: numbers between two ends, whose codes may be shifted by a zero point. Unless they are,
// values come without their sign, which saves one end; where the ends are not alike, each value then
// has a limit of its own, the end on its side.
template <class Numbers, bool shifted_> struct Grid {
  static constexpr bool shifted = shifted_, uniform = Numbers::uniform;
  static constexpr bool has_limits = !shifted && !Numbers::mirrored;
  static constexpr float offset = Numbers::offset;

  static V round(V code, V lowest, V highest) {
    const V held = minimum(maximum(code, lowest), highest);
    if constexpr (offset == 0) return Numbers::round(held);
    return Numbers::round(held + offset) - offset;
  }

  // x − q of N pairs of a value and a quantizer. Limits and ends come with the offset.
  template <int N, class Values, class Quantizers, class Limits>
  [[gnu::always_inline]] static void errors(Values x, Quantizers by, Limits limit, V zero, V lowest,
                                            V (&error)[N]) {
    constexpr bool moved = shifted || offset != 0;
    const V base = shifted ? offset + zero : all(offset);
    V code[N];
    each<N>([&](int i) { code[i] = moved ? x(i) * by(i).inverse + base : x(i) * by(i).inverse; });
    if (shifted) each<N>([&](int i) { code[i] = maximum(code[i], lowest); });
    each<N>([&](int i) { code[i] = minimum(code[i], limit(i)); });
    each<N>([&](int i) { code[i] = Numbers::round(code[i]); });
    each<N>([&](int i) { error[i] = x(i) - (moved ? code[i] - base : code[i]) * by(i).scale; });
  }
};

// Round to the dtype that is computed in, with the sign of zeros. Far beyond all codes float16 goes on
// where it would be infinite.
template <DType working> V round_in(V x) {
  if constexpr (working == DType::bf16) return round_to_bf16(x);
  if constexpr (working == DType::f16) {
    const V magnitude = round_to_float<10, -14>(minimum(absolute(x), all(65536)));
    return (V)((I)magnitude | ((I)x & ~0x7fffffff));
  }
  return x;
}

template <std::size_t row>
using NumbersOf = std::conditional_t<kGrids[row].rounding == Rounding::to_integers, Integers,
                                     Floats<kGrids[row].mantissa, kGrids[row].smallest_exponent>>;

template <std::size_t row, class F> void with_row(bool shifted, F f) {
  if constexpr (kGrids[row].has_zero_points)
    if (shifted) return f(Grid<NumbersOf<row>, true>{});
  f(Grid<NumbersOf<row>, false>{});
}

template <class F, std::size_t... row>
void with_grid(std::size_t wanted, bool shifted, F f, std::index_sequence<row...>) {
  ((wanted == row ? with_row<row>(shifted, f) : void()), ...);
}

// Call f with the grid of a row, as a type. Kernels ask nowhere else which format they work on.
template <class F> void with_grid(std::size_t row, bool shifted, F f) {
  with_grid(row, shifted, f, std::make_index_sequence<kGridCount>{});
}

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

// 2^(e·exponent) of the exponent e of a float, which is given by its bits.
#if defined(__AVX512F__)
struct Octaves {
  Table32 all;
  explicit Octaves(const Power& power) : all(power.octaves) {}
  V operator[](I bits) const { return all[bits >> 23]; }
};
#else
struct Octaves {
  Table8 fine, coarse;
  explicit Octaves(const Power& power) : fine(power.fine), coarse(power.coarse) {}
  V operator[](I bits) const { return fine[bits >> 23] * coarse[bits >> 26]; }
};
#endif

// `large`: for norms beyond 4. Without its loop, the last product and the sum are one operation.
template <bool large> struct AnyPower {
  V coefficients[Power::degree + 1];
  Octaves octaves;
  int squares;
  explicit AnyPower(const Power& power) : octaves(power), squares(power.squares) {
    for (int i = 0; i <= Power::degree; i++) coefficients[i] = all(power.coefficients[i]);
  }
  template <int N> void apply(V (&error)[N]) const {
    V mantissa[N], power[N];
    // At the floor the table holds zero.
    each<N>([&](int i) { error[i] = larger_magnitude(error[i], all(0x1p-24f)); });
    each<N>([&](int i) { mantissa[i] = (V)(((I)error[i] & 0x007fffff) | 0x3f800000); });
    each<N>([&](int i) { power[i] = coefficients[0] * mantissa[i] + coefficients[1]; });
    for (int k = 2; k <= Power::degree; k++)
      each<N>([&](int i) { power[i] = power[i] * mantissa[i] + coefficients[k]; });
    each<N>([&](int i) { power[i] = power[i] * octaves[(I)error[i]]; });
    for (int k = 0; large && k < squares; k++)
      each<N>([&](int i) { power[i] = power[i] * (error[i] * error[i]); });
    each<N>([&](int i) { error[i] = power[i]; });
  }
};

}  // namespace
}  // namespace calipers
