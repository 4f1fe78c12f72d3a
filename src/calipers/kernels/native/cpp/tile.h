// From strided memory of any dtype to float tiles that fit into the cache.
#pragma once

#include "simd.h"

namespace calipers {
namespace {

template <DType dtype> V load_vector(const std::byte* from) {
  if constexpr (dtype == DType::f32) return load_as<V>(from);
  if constexpr (dtype == DType::bf16) return from_bf16(load_as<U16>(from));
  if constexpr (dtype == DType::f16) return from_f16(load_as<U16>(from));
}

// `count` values, `stride` elements apart; what lies behind them in `to` stays as it is.
template <DType dtype>
void load_values(const std::byte* from, std::int64_t stride, std::int64_t count, float* to) {
  constexpr std::int64_t size = element_size(dtype);
  std::int64_t i = 0;
  if (stride == 1)
    for (; i + W <= count; i += W) {
      prefetch(from + i * size, kTileBytes);  // what the next tile is likely to be
      store(to + i, load_vector<dtype>(from + i * size));
    }
  while (i < count) {
    const std::int64_t part = count - i < W ? count - i : W;
    alignas(64) std::byte gathered[W * size] = {};
    for (std::int64_t k = 0; k < part; k++)
      std::memcpy(gathered + k * size, from + (i + k) * stride * size, size);
    const V values = load_vector<dtype>(gathered);
    std::memcpy(to + i, &values, part * sizeof(float));
    i += part;
  }
}

// Call f with the dtype as a constant, for use as a template argument: something<dtype()>.
template <class F> void with_constant(DType dtype, F f) {
  switch (dtype) {
    case DType::f32: return f(std::integral_constant<DType, DType::f32>{});
    case DType::f16: return f(std::integral_constant<DType, DType::f16>{});
    case DType::bf16: return f(std::integral_constant<DType, DType::bf16>{});
  }
}

inline void load_values(DType dtype, const std::byte* from, std::int64_t stride, std::int64_t count,
                        float* to) {
  with_constant(dtype, [&](auto constant) { load_values<constant()>(from, stride, count, to); });
}

// Positions [begin, begin + count) of the pieces [first, first + pieces), one row of `pitch` floats
// per piece. Reads memory in the order in which it lies.
inline void load_tile(const Pieces& from, std::int64_t first, std::int64_t pieces, std::int64_t begin,
                      std::int64_t count, float* to, std::int64_t pitch) {
  const std::int64_t size = element_size(from.dtype);
  if (count == from.length() && pitch == count && from.packed()) {
    load_values(from.dtype, from.data + first * count * size, 1, pieces * count, to);
    return;
  }
  const bool side_by_side = from.column_stride > 1 && pieces > 1 &&
                            from.offset(first + pieces - 1) - from.offset(first) ==
                                (pieces - 1) * (from.offset(first + 1) - from.offset(first)) &&
                            from.offset(first + 1) - from.offset(first) < from.column_stride;
  if (side_by_side) {
    const std::int64_t step = from.offset(first + 1) - from.offset(first);
    alignas(64) float column[4 * kLanes];
    for (std::int64_t lane = 0; lane < pieces; lane += 4 * kLanes) {
      const std::int64_t lanes = pieces - lane < 4 * kLanes ? pieces - lane : 4 * kLanes;
      for (std::int64_t i = 0; i < count; i++) {
        const std::int64_t at = from.offset(first + lane) + from.offset_within(begin + i);
        load_values(from.dtype, from.data + at * size, step, lanes, column);
        for (std::int64_t k = 0; k < lanes; k++) to[(lane + k) * pitch + i] = column[k];
      }
    }
    return;
  }
  for (std::int64_t piece = 0; piece < pieces; piece++) {
    const std::byte* start = from.data + from.offset(first + piece) * size;
    for (std::int64_t i = 0; i < count;) {
      const std::int64_t left = count - i, run = from.run(begin + i);
      const std::int64_t part = left < run ? left : run;
      load_values(from.dtype, start + from.offset_within(begin + i) * size, from.column_stride, part,
                  to + piece * pitch + i);
      i += part;
    }
  }
}

// The other way, for values that the dtype can hold.
inline void store_values(DType dtype, const float* values, std::int64_t count, std::byte* to) {
  for (std::int64_t i = 0; i < count; i += W) {
    const std::int64_t part = count - i < W ? count - i : W;
    V x{};
    std::memcpy(&x, values + i, part * sizeof(float));
    if (dtype == DType::f32) {
      std::memcpy(to + i * 4, &x, part * 4);
    } else {
      const U16 lower = dtype == DType::bf16 ? to_bf16(x) : to_f16(x);
      std::memcpy(to + i * 2, &lower, part * 2);
    }
  }
}

// Where a tile can be read as it lies: float32, one row per piece, whole vectors. Else null.
inline const float* tile_in_place(const Pieces& from, std::int64_t first, std::int64_t begin,
                                  std::int64_t count) {
  const bool in_row = from.column_stride == 1 && from.run(begin) >= count && count % W == 0;
  if (from.dtype != DType::f32 || !in_row) return nullptr;
  return (const float*)from.data + from.offset(first) + from.offset_within(begin);
}

constexpr std::int64_t round_up(std::int64_t count, std::int64_t unit) {
  return (count + unit - 1) / unit * unit;
}

// Fill up a row with zeros, which have no error, to a multiple of `unit`. Returns its vectors.
inline std::int64_t pad_with_zeros(float* row, std::int64_t count, std::int64_t unit) {
  const std::int64_t padded = round_up(count, unit);
  for (std::int64_t i = count; i < padded; i++) row[i] = 0;
  return padded / W;
}

// The pieces and positions of one task.
struct Task {
  std::int64_t chunk, first, end, begin, stop;
  Task(const Cut& cut, std::int64_t task, std::int64_t pieces, std::int64_t length)
      : chunk(task % cut.chunks),
        first(task / cut.chunks * cut.pieces_per_run),
        end(first + cut.pieces_per_run < pieces ? first + cut.pieces_per_run : pieces),
        begin(chunk * cut.positions_per_chunk),
        stop(begin + cut.positions_per_chunk < length ? begin + cut.positions_per_chunk : length) {}
};

}  // namespace
}  // namespace calipers
