// How often each of the 65,536 values of a 16-bit float occurs.
#pragma once

#include "arena.h"
#include "tile.h"

namespace calipers {
namespace {

constexpr std::int64_t kBins = 65536;
constexpr std::int64_t kTables = 2;  // neighbours often are equal: counted apart, they need not wait
// Clearing and adding the tables costs more than what they save on fewer values (measured; where all
// are equal they pay from half of this on, where all differ they hardly ever do).
constexpr std::int64_t kFew = 2 * kBins;

inline void count_codes(const std::byte* codes, std::int64_t count, std::uint32_t* tables) {
  std::int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    const auto four = load_as<std::uint64_t>(codes + 2 * i);
    prefetch(codes + 2 * i, 1024);
    tables[four & 0xffff]++;
    tables[kBins + ((four >> 16) & 0xffff)]++;
    tables[(four >> 32) & 0xffff]++;
    tables[kBins + (four >> 48)]++;
  }
  for (; i < count; i++) tables[load_as<std::uint16_t>(codes + 2 * i)]++;
}

// Floats become codes of bf16, rounded, all NaNs the same. Both have room for whole vectors.
inline void round_to_codes(const float* floats, std::int64_t count, std::uint16_t* codes) {
  for (std::int64_t i = 0; i < round_up(count, W); i += W) {
    const V x = load_as<V>(floats + i);
    const I is_nan = ((I)x & 0x7fffffff) > kExponent;
    store(codes + i, to_bf16(is_nan ? (V)all_bits(0x7fc00000) : round_to_bf16(x)));
  }
}

inline void gather_codes(const std::byte* from, std::int64_t stride, std::int64_t count,
                         std::uint16_t* codes) {
  if (stride == 1)
    std::memcpy(codes, from, count * 2);
  else
    for (std::int64_t i = 0; i < count; i++) std::memcpy(codes + i, from + i * stride * 2, 2);
}

// `count` values as 16-bit codes, where they lie or as a copy; float32 is rounded to bf16, and its
// NaNs become one.
inline const std::byte* load_codes(const Pieces& from, std::int64_t piece, std::int64_t begin,
                                   std::int64_t count, float* floats, std::uint16_t* codes) {
  if (from.dtype == DType::f32) {
    load_tile(from, piece, 1, begin, count, floats, count);
    round_to_codes(floats, count, codes);
    return (const std::byte*)codes;
  }
  const std::byte* start = from.data + from.offset(piece) * 2;
  if (from.column_stride == 1 && from.run(begin) >= count)
    return start + from.offset_within(begin) * 2;
  for (std::int64_t i = 0; i < count;) {
    const std::int64_t left = count - i, run = from.run(begin + i), part = left < run ? left : run;
    const std::byte* row = start + from.offset_within(begin + i) * 2;
    gather_codes(row, from.column_stride, part, codes + i);
    i += part;
  }
  return (const std::byte*)codes;
}

inline void count_into(const std::byte* codes, std::int64_t count, std::int64_t* counts) {
  for (std::int64_t i = 0; i < count; i++) counts[load_as<std::uint16_t>(codes + 2 * i)]++;
}

// Without tables of its own.
inline void count_few(const Pieces& values, std::int64_t piece, float* floats, std::uint16_t* codes,
                      std::int64_t* counts) {
  for (std::int64_t begin = 0; begin < values.length(); begin += kTile) {
    const std::int64_t left = values.length() - begin;
    const std::int64_t count = left < (std::int64_t)kTile ? left : (std::int64_t)kTile;
    count_into(load_codes(values, piece, begin, count, floats, codes), count, counts);
  }
}

struct CountsScratch {
  float* floats;
  std::uint16_t* codes;
  std::uint32_t* tables;
  CountsScratch(Arena& arena, const CountsJob&)
      : floats(arena.take<float>(kTile)), codes(arena.take<std::uint16_t>(kTile)),
        tables(arena.take<std::uint32_t>(kTables * kBins)) {}
};

inline void counts_task(const CountsJob& job, std::int64_t index, CountsScratch& scratch) {
  const Task task(job.cut, index, job.values.count(), job.values.length());
  const auto [floats, codes, tables] = scratch;
  const bool few = job.cut.chunks == 1 && job.values.length() <= kFew;
  for (std::int64_t piece = task.first; piece < task.end; piece++) {
    std::int64_t* counts = job.counts + piece * kBins;
    if (few) {
      count_few(job.values, piece, floats, codes, counts);
      continue;
    }
    std::memset(tables, 0, kTables * kBins * sizeof(std::uint32_t));
    for (std::int64_t begin = task.begin; begin < task.stop; begin += kTile) {
      const std::int64_t left = task.stop - begin;
      const std::int64_t count = left < (std::int64_t)kTile ? left : (std::int64_t)kTile;
      count_codes(load_codes(job.values, piece, begin, count, floats, codes), count, tables);
    }
    for (std::int64_t bin = 0; bin < kBins; bin++) {
      const std::int64_t found = (std::int64_t)tables[bin] + tables[kBins + bin];
      if (found) __atomic_fetch_add(counts + bin, found, __ATOMIC_RELAXED);
    }
  }
}

}  // namespace
}  // namespace calipers
