// Short pieces side by side: one per lane, and a vector for each position.
#pragma once

#include "grid.h"
#include "tile.h"

namespace calipers {
namespace {

// Lanes from consecutive numbers (at most W of them), or all from the first.
inline V take(const float* from, std::int64_t lanes, bool spread) {
  if (spread) return all(*from);
  V taken{};
  std::memcpy(&taken, from, lanes * sizeof(float));
  return taken;
}

// Turn W rows of floats into one vector per position, up to a multiple of U of them.
template <class F>
std::int64_t lanes_from_rows(const float* rows, std::int64_t count, std::int64_t pitch, F store) {
  for (std::int64_t i = 0; i < count; i += W) {
    V block[W];
    for (int row = 0; row < W; row++) {
      prefetch(rows + row * pitch + i, W * pitch * sizeof(float));
      block[row] = load_as<V>(rows + row * pitch + i);
    }
    transpose(block);
    const std::int64_t part = count - i < W ? count - i : W;
    for (std::int64_t k = 0; k < part; k++) store(i + k, block[k]);
  }
  const std::int64_t vectors = round_up(count, U);
  for (std::int64_t i = count; i < vectors; i++) store(i, V{});
  return vectors;
}

// The positions of `lanes` pieces, each given to `store` as a vector with a piece per lane; lanes
// without a piece, and positions up to a multiple of U, are zero. `rows` is scratch memory for a tile.
template <class F>
std::int64_t load_lanes(const Pieces& from, std::int64_t first, std::int64_t lanes, float* rows, F store) {
  const std::int64_t count = from.length(), pitch = round_up(count, W);
  const bool in_place = lanes == W && from.packed();
  const float* source = in_place ? tile_in_place(from, first, 0, count) : nullptr;
  if (!source) {
    for (std::int64_t row = 0; row < W; row++)
      for (std::int64_t i = row < lanes ? count : 0; i < pitch; i++) rows[row * pitch + i] = 0;
    load_tile(from, first, lanes, 0, count, rows, pitch);
    source = rows;
  }
  return lanes_from_rows(source, count, pitch, store);
}

}  // namespace
}  // namespace calipers
