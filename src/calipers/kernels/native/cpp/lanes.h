// Rows of matrices in the lanes of vectors, and rounding by the scale of a row and a group of columns.
#pragma once

#include "grid.h"

namespace calipers {
namespace {

constexpr std::int64_t kRowsInStep = U * W;

inline V load_part(const float* from, std::int64_t count) {
  if (count >= W) return load_as<V>(from);
  V part{};
  std::memcpy(&part, from, count * sizeof(float));
  return part;
}

// `columns` floats of each of `count` rows, as columns of kRowsInStep lanes; further lanes are zero.
inline void to_lanes(float* const* rows, std::int64_t count, std::int64_t columns, V* to) {
  for (int v = 0; v < U; v++)
    for (std::int64_t begin = 0; begin < columns; begin += W) {
      V part[W];
      for (int i = 0; i < W; i++)
        part[i] = v * W + i < count ? load_part(rows[v * W + i] + begin, columns - begin) : V{};
      transpose(part);
      for (std::int64_t i = 0; i < W && begin + i < columns; i++) to[(begin + i) * U + v] = part[i];
    }
}

inline void from_lanes(const V* from, std::int64_t count, std::int64_t columns, float* const* rows) {
  for (int v = 0; v < U; v++)
    for (std::int64_t begin = 0; begin < columns; begin += W) {
      const std::int64_t left = columns - begin < W ? columns - begin : W;
      V part[W];
      for (std::int64_t i = 0; i < W; i++) part[i] = i < left ? from[(begin + i) * U + v] : V{};
      transpose(part);
      for (int i = 0; i < W && v * W + i < count; i++)
        std::memcpy(rows[v * W + i] + begin, &part[i], left * sizeof(float));
    }
}

// Scales and zero points of kRowsInStep rows, for one group of columns.
struct Divisors {
  V scale[U], zero[U];

  Divisors(const Scaling& by, const std::int64_t* rows, std::int64_t count, std::int64_t group) {
    float scales[kRowsInStep], zeros[kRowsInStep];
    for (std::int64_t i = 0; i < kRowsInStep; i++) {
      const std::int64_t at = i < count ? rows[i] * by.pitch + group : -1;
      scales[i] = at < 0 ? 1 : by.scales[at];
      zeros[i] = at < 0 || !by.zeros ? 0 : by.zeros[at];
    }
    std::memcpy(scale, scales, sizeof scale);
    std::memcpy(zero, zeros, sizeof zero);
  }

  // The arithmetic of compressed-tensors.
  template <class Grid> V round(int i, V x, V lowest, V highest) const {
    return (Grid::round(x / scale[i] + zero[i], lowest, highest) - zero[i]) * scale[i];
  }
};

}  // namespace
}  // namespace calipers
