// Codes of a weight, rounded as compressed-tensors rounds and packed as it packs: a row is a stream
// of bits, the codes one behind the other, the lowest bit first. With them come the values they stand
// for, and Σ(q−w)² of each column, so that nothing has to be rounded again to know what was lost.
//
// It computes in the dtype of its tensors, so that every step is rounded to that here too. A NaN has
// no code that is the same everywhere: whether one came up is all that is told about it.
#pragma once

#include "arena.h"
#include "grid.h"
#include "tile.h"

namespace calipers {
namespace {

inline I nan_lanes(V x) { return ((I)x & 0x7fffffff) > kExponent; }

// The code of the nearest number of a grid, ties to even.
template <class Grid> struct Coder;

template <bool shifted> struct Coder<Grid<Integers, shifted>> {
  V lowest, highest, large;
  explicit Coder(const PackJob& job)
      : lowest(all(job.lowest)), highest(all(job.highest)), large(all(kLarge + job.offset)) {}

  U32 operator()(V x) const {
    return (U32)(minimum(maximum(x, lowest), highest) + large) - (U32)all(kLarge);
  }
};

template <int mantissa, int smallest_exponent, bool shifted>
struct Coder<Grid<Floats<mantissa, smallest_exponent>, shifted>> {
  V highest;
  int behind_sign;  // bits of a float that are not in a code
  explicit Coder(const PackJob& job) : highest(all(job.highest)), behind_sign(32 - job.bits) {}

  U32 operator()(V x) const {
    constexpr int dropped = 23 - mantissa;
    constexpr std::uint32_t below_half = (1u << (dropped - 1)) - 1;
    constexpr std::uint32_t bias = (126u + smallest_exponent) << mantissa;
    const V magnitude = minimum(absolute(x), highest);
    const U32 bits = (U32)magnitude;
    const U32 normal = ((bits + below_half + ((bits >> dropped) & 1)) >> dropped) - bias;
    // The last bit of `large` is worth a step between numbers that are not normal.
    const V large = all(two_to(dropped + smallest_exponent));
    const U32 subnormal = (U32)(magnitude + large) - (U32)large;
    const U32 code = magnitude < two_to(smallest_exponent) ? subnormal : normal;
    return code | (((U32)x & 0x80000000u) >> behind_sign);
  }
};

// A tile of each, and room behind it for a vector, or for eight codes that are moved together.
struct PackScratch {
  float *values, *rounded;
  std::uint8_t* codes;
  double* sums;
  PackScratch(Arena& arena, const PackJob&)
      : values(arena.take<float>(kPackTile + W)),
        rounded(arena.take<float>(kPackTile + W)),
        codes(arena.take<std::uint8_t>(kPackTile + kLanes)),
        sums(arena.take<double>(kPackTile + W)) {}
};

inline V first_lanes(V x, std::int64_t count) {
  for (std::int64_t i = count; i < W; i++) x[i] = 0;
  return x;
}

// The codes of the columns [begin, begin + count), whose scales are those of a row of blocks from
// `block` on, and the numbers they stand for, if these go anywhere. Squares of differences are added to
// the sums of their columns, in double, which holds every square; Inf, which stays what it is, counts as
// no error. Up to a vector behind them is read and written too. Returns lanes that had a NaN.
template <DType working, class Grid>
I code_values(const PackJob& job, const float* values, std::int64_t begin, std::int64_t count,
              std::int64_t block, const PackScratch& scratch) {
  const Coder<Grid> code(job);
  const V lowest = all(job.lowest), highest = all(job.highest);
  const auto [_, rounded, codes, sums] = scratch;
  I nans{};
  block += begin / job.width;
  std::int64_t end = job.width - begin % job.width;
  for (std::int64_t i = 0; i < count; i = end, end += job.width, block++) {
    const V scale = all(job.scales[block]), zero = all(job.zeros[block * job.zero_step]);
    const std::int64_t stop = end < count ? end : count;
    nans |= nan_lanes(zero);
    for (; i < stop; i += W) {
      const V x = load_as<V>(values + i), quotient = x / scale;
      nans |= nan_lanes(quotient);
      const V moved = round_in<working>(round_in<working>(quotient) + zero);
      store(codes + i, narrow_to_bytes(code(moved)));
      const V number = (Grid::round(moved, lowest, highest) - zero) * scale;
      if (job.output) store(rounded + i, number);
      V error = nonfinite_lanes(x) ? V{} : number - x;
      if (i + W > stop) error = first_lanes(error, stop - i);
      const D lower = lower_doubles(error), upper = upper_doubles(error);
      store(sums + i, load_as<D>(sums + i) + lower * lower);
      store(sums + i + W / 2, load_as<D>(sums + i + W / 2) + upper * upper);
    }
  }
  return nans;
}

inline auto code_values_of(const PackJob& job) {
  decltype(&code_values<DType::f32, Grid<Integers, false>>) found = nullptr;
  with_constant(job.working, [&](auto working) {
    with_grid(job.grid, false, [&](auto grid) { found = code_values<working(), decltype(grid)>; });
  });
  return found;
}

// Eight codes, a byte each, moved together.
template <int bits> std::uint64_t together(std::uint64_t codes) {
  constexpr std::uint64_t ones = ~std::uint64_t{0};
  constexpr std::uint64_t in_pairs = ones / 0xffff * ((1u << bits) - 1);
  constexpr std::uint64_t in_fours = ones / 0xffffffff * ((1u << 2 * bits) - 1);
  codes = (codes & in_pairs) | ((codes >> (8 - bits)) & (in_pairs << bits));
  codes = (codes & in_fours) | ((codes >> (16 - 2 * bits)) & (in_fours << 2 * bits));
  return (codes & 0xffffffff) | (codes >> 32 << 4 * bits);
}

// Bits beyond the last code are zero, up to the end of its byte.
template <int bits> void pack_codes(std::uint8_t* codes, std::int64_t count, std::uint8_t* to) {
  if (bits == 8) {
    std::memcpy(to, codes, count);
    return;
  }
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8, to += bits) {
    const std::uint64_t eight = together<bits>(load_as<std::uint64_t>(codes + i));
    std::memcpy(to, &eight, bits);
  }
  std::memset(codes + count, 0, 8);
  const std::uint64_t rest = together<bits>(load_as<std::uint64_t>(codes + i));
  std::memcpy(to, &rest, ((count - i) * bits + 7) / 8);
}

template <int... bits> auto pack_codes_of(int wanted, std::integer_sequence<int, bits...>) {
  decltype(&pack_codes<8>) found = nullptr;
  ((wanted == bits + 1 ? void(found = pack_codes<bits + 1>) : void()), ...);
  return found;
}

// Some rows at a time, which the cache holds, tile by tile: the sums of a tile stay near.
inline void pack_task(const PackJob& job, std::int64_t index, PackScratch& scratch) {
  const auto code_values = code_values_of(job);
  const auto pack_codes = pack_codes_of(job.bits, std::make_integer_sequence<int, 8>{});
  const Task task(job.cut, index, job.values.rows, 1);
  const std::int64_t columns = job.values.columns, used = (columns * job.bits + 7) / 8;
  const auto [values, rounded, codes, sums] = scratch;
  double* totals = job.errors + index * columns;
  I nans{};
  std::memset(totals, 0, columns * sizeof(double));
  for (std::int64_t first = task.first; first < task.end; first += job.rows_together) {
    const std::int64_t next = first + job.rows_together, end = next < task.end ? next : task.end;
    for (std::int64_t begin = 0; begin < columns; begin += kPackTile) {
      const std::int64_t left = columns - begin, count = left < kPackTile ? left : kPackTile;
      std::memcpy(sums, totals + begin, count * sizeof(double));
      for (std::int64_t row = first; row < end; row++) {
        load_tile(job.values, 0, 1, row * columns + begin, count, values, count);
        store(values + count, V{});  // what is read behind them must not be a NaN
        const std::int64_t block = row / job.height * job.scale_columns;
        nans |= code_values(job, values, begin, count, block, scratch);
        if (job.packed) pack_codes(codes, count, job.packed + row * job.row_bytes + begin * job.bits / 8);
        if (job.output) std::memcpy(job.output + row * columns + begin, rounded, count * sizeof(float));
      }
      std::memcpy(totals + begin, sums, count * sizeof(double));
    }
    for (std::int64_t row = first; job.packed && row < end; row++)
      std::memset(job.packed + row * job.row_bytes + used, 0, job.row_bytes - used);
  }
  job.nans[index] = any(nans);
}

}  // namespace
}  // namespace calipers
