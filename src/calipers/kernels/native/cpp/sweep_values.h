// What a sweep asks of all values of a piece.
#pragma once

#include "grid.h"
#include "tile.h"

namespace calipers {
namespace {

constexpr std::int64_t kSweepFlush = 512;  // values after which sums go from float to double

inline float load_piece(const Pieces& from, std::int64_t piece, float* to) {
  load_tile(from, piece, 1, 0, from.length(), to, from.length());
  V largest{};
  for (std::int64_t i = 0; i < from.length(); i += W) largest = maximum(largest, load_as<V>(to + i));
  float found = 0;
  for (int i = 0; i < W; i++) found = largest[i] > found ? largest[i] : found;
  return found;
}

inline SweepSums measure_values(const SweepPiece& piece, SweepUnit of_values, SweepUnit of_weights) {
  D total{}, squares[2] = {};
  for (std::int64_t i = 0; i < piece.length; i += W) {
    const V x = finite_or_zero(load_as<V>(piece.values + i)) * of_values.first * of_values.second;
    const V weight = load_as<V>(piece.weights + i) * of_weights.first * of_weights.second;
    store(piece.values + i, x);
    store(piece.weights + i, weight);
    store(piece.magnitudes + i, absolute(x));
    total += lower_doubles(absolute(x)) + upper_doubles(absolute(x));
    squares[0] += lower_doubles(weight) * lower_doubles(x) * lower_doubles(x);
    squares[1] += upper_doubles(weight) * upper_doubles(x) * upper_doubles(x);
  }
  return {sum(total), sum(squares[0] + squares[1])};
}

inline SweepSums set_ends(const SweepPiece& piece, float below, float above) {
  D linear[2] = {}, quadratic[2] = {};
  for (std::int64_t i = 0; i < piece.length; i += W) {
    const V end = load_as<V>(piece.values + i) < 0 ? all(below) : all(above);
    const V weight = load_as<V>(piece.weights + i), x = load_as<V>(piece.magnitudes + i);
    store(piece.ends + i, end);
    const D low = lower_doubles(weight) * lower_doubles(end), high = upper_doubles(weight) * upper_doubles(end);
    linear[0] += low * lower_doubles(x), linear[1] += high * upper_doubles(x);
    quadratic[0] += low * lower_doubles(end), quadratic[1] += high * upper_doubles(end);
  }
  return {sum(linear[0] + linear[1]), sum(quadratic[0] + quadratic[1])};
}

// The nearest number to each code, or the end where that is nearer.
template <bool whole> [[gnu::always_inline]] inline V nearest(const SweepPiece& piece, V x, V inverse, V end) {
  if constexpr (whole) return minimum(x * inverse + kLarge, end + kLarge) - kLarge;
  const V code = minimum(x * inverse, end);
  const V large = maximum((V)((I)code & kExponent), all(piece.smallest)) * piece.large;
  return (code + large) - large;
}

template <bool whole, int M>
void add_sweep_errors(const SweepPiece& piece, const float* scales, double* errors) {
  V scale[M], inverse[M];
  each<M>([&](int k) { scale[k] = all(scales[k]), inverse[k] = all(1 / scales[k]), errors[k] = 0; });
  for (std::int64_t begin = 0; begin < piece.length; begin += kSweepFlush) {
    const std::int64_t stop = piece.length - begin < kSweepFlush ? piece.length : begin + kSweepFlush;
    V part[M] = {};
    for (std::int64_t i = begin; i < stop; i += W) {
      const V x = load_as<V>(piece.magnitudes + i), end = load_as<V>(piece.ends + i);
      const V weight = load_as<V>(piece.weights + i);
      each<M>([&](int k) {
        const V error = x - nearest<whole>(piece, x, inverse[k], end) * scale[k];
        part[k] += weight * error * error;
      });
    }
    each<M>([&](int k) { errors[k] += sum(part[k]); });
  }
}

inline void sweep_errors(const SweepPiece& piece, const float* scales, std::int64_t count, double* errors) {
  constexpr int M = 4;
  std::int64_t i = 0;
  for (; i + M <= count; i += M)
    piece.smallest ? add_sweep_errors<false, M>(piece, scales + i, errors + i)
                   : add_sweep_errors<true, M>(piece, scales + i, errors + i);
  for (; i < count; i++)
    piece.smallest ? add_sweep_errors<false, 1>(piece, scales + i, errors + i)
                   : add_sweep_errors<true, 1>(piece, scales + i, errors + i);
}

template <bool whole>
SweepSums list_changed(const SweepPiece& piece, float high, float low, Changed* changed, std::int64_t* count) {
  const V from = all(1 / high), to = all(1 / low);
  D linear[2] = {}, quadratic[2] = {};
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < piece.length; i += W) {
    const V x = load_as<V>(piece.magnitudes + i), end = load_as<V>(piece.ends + i);
    const V weight = load_as<V>(piece.weights + i);
    const V number = nearest<whole>(piece, x, from, end), next = nearest<whole>(piece, x, to, end);
    const D first = lower_doubles(weight) * lower_doubles(number);
    const D second = upper_doubles(weight) * upper_doubles(number);
    linear[0] += first * lower_doubles(x), linear[1] += second * upper_doubles(x);
    quadratic[0] += first * lower_doubles(number), quadratic[1] += second * upper_doubles(number);
    for (std::uint32_t bits = lane_bits(number != next); bits; bits &= bits - 1) {
      const int k = __builtin_ctz(bits);
      changed[found++] = {(std::int32_t)(i + k), number[k], next[k]};
    }
  }
  *count = found;
  return {sum(linear[0] + linear[1]), sum(quadratic[0] + quadratic[1])};
}
inline SweepSums sweep_changed(const SweepPiece& piece, float high, float low, Changed* changed,
                               std::int64_t* count) {
  return piece.smallest ? list_changed<false>(piece, high, low, changed, count)
                        : list_changed<true>(piece, high, low, changed, count);
}

}  // namespace
}  // namespace calipers
