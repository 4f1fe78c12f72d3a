// Smallest and largest finite value of each piece, in one pass over the memory.
//
// Floats are compared as integers: with the lower bits of negative ones turned over, they have the
// same order. NaN and Inf then lie beyond all finite values, so that the extrema tell of them.
#pragma once

#include "tile.h"

namespace calipers {
namespace {

template <class T> T lesser(T a, T b) { return a < b ? a : b; }
template <class T> T greater(T a, T b) { return a > b ? a : b; }

// How the values of a dtype become keys, N of them in a vector.
template <DType dtype> struct Order {
  using Vector = Short;
  static constexpr int N = 2 * W;
  static constexpr std::int32_t magnitude = 0x7fff, infinity = dtype == DType::f16 ? 0x7c00 : 0x7f80;
};
template <> struct Order<DType::f32> {
  using Vector = I;
  static constexpr int N = W;
  static constexpr std::int32_t magnitude = 0x7fffffff, infinity = 0x7f800000;
};
template <DType dtype> using KeysOf = typename Order<dtype>::Vector;

template <DType dtype> KeysOf<dtype> load_keys(const std::byte* from) {
  const auto bits = load_as<KeysOf<dtype>>(from);
  return bits ^ ((bits >> (8 * element_size(dtype) - 1)) & Order<dtype>::magnitude);
}

// The same from a stream of which the next page, which the processor does not foresee, is needed too.
template <DType dtype> KeysOf<dtype> stream_keys(const std::byte* from) {
  prefetch(from, 4096);
  return load_keys<dtype>(from);
}

template <DType dtype> void store_keys(I keys, std::int64_t count, std::byte* to) {
  const I bits = keys ^ ((keys >> 31) & Order<dtype>::magnitude);
  if constexpr (dtype == DType::f32) {
    std::memcpy(to, &bits, count * 4);
  } else {
    const U16 lower = narrow((U32)bits & 0xffff);
    std::memcpy(to, &lower, count * 2);
  }
}

// The keys of one piece; its extrema are those of all lanes.
template <class Keys> struct Range {
  Keys low, high;
  void include(Keys keys) {
    low = lesser(low, keys);
    high = greater(high, keys);
  }
};

// As vectors of 32 bits: neighbours of 16 bits are folded into one.
inline Range<I> in_32_bits(Range<I> range) { return range; }
inline Range<I> in_32_bits(Range<Short> range) {
  const auto odd = [](Short x) { return (I)x >> 16; };
  const auto even = [](Short x) { return (I)((U32)x << 16) >> 16; };
  return {lesser(even(range.low), odd(range.low)), greater(even(range.high), odd(range.high))};
}

// Up to N values that need not lie side by side; free lanes repeat the first.
template <DType dtype>
KeysOf<dtype> gather_keys(const std::byte* from, std::int64_t stride, std::int64_t count) {
  constexpr std::int64_t size = element_size(dtype), N = Order<dtype>::N;
  std::byte gathered[N * size];
  for (std::int64_t i = 0; i < N; i++)
    std::memcpy(gathered + i * size, from + (i < count ? i * stride : 0) * size, size);
  return load_keys<dtype>(gathered);
}

template <DType dtype>
KeysOf<dtype> first_keys(const std::byte* from, std::int64_t stride, std::int64_t count) {
  const bool whole = stride == 1 && count >= Order<dtype>::N;
  return whole ? load_keys<dtype>(from) : gather_keys<dtype>(from, 0, 1);
}

// `count` values, `stride` elements apart.
template <DType dtype>
void include(Range<KeysOf<dtype>>& range, const std::byte* from, std::int64_t stride,
             std::int64_t count) {
  constexpr std::int64_t size = element_size(dtype), N = Order<dtype>::N;
  std::int64_t i = 0;
  if (stride == 1) {
    Range<KeysOf<dtype>> other = range;
    for (; i + 2 * N <= count; i += 2 * N) {
      range.include(stream_keys<dtype>(from + i * size));
      other.include(stream_keys<dtype>(from + (i + N) * size));
    }
    for (; i + N <= count; i += N) range.include(stream_keys<dtype>(from + i * size));
    range = {lesser(range.low, other.low), greater(range.high, other.high)};
  }
  for (; i < count; i += N)
    range.include(gather_keys<dtype>(from + i * stride * size, stride, count - i < N ? count - i : N));
}

// Fold `lanes` neighbours each, and store `count` of the results. Returns whether all are finite.
template <DType dtype, int lanes>
bool store_extrema(const ExtremaJob& job, std::int64_t at, std::int64_t count, I (&low)[W],
                   I (&high)[W]) {
  constexpr std::int64_t size = element_size(dtype), infinity = Order<dtype>::infinity;
  fold_lanes<lesser<I>, lanes>(low);
  fold_lanes<greater<I>, lanes>(high);
  I strange{};
  for (std::int64_t i = 0; i < count; i += W) {
    const std::int64_t part = count - i < W ? count - i : W;
    strange |= (high[i / W] >= (std::int32_t)infinity) | (~low[i / W] >= (std::int32_t)infinity);
    store_keys<dtype>(low[i / W], part, job.low + (at + i) * size);
    store_keys<dtype>(high[i / W], part, job.high + (at + i) * size);
  }
  return !any(strange);
}

// W vectors' worth of pieces that fill one stretch of memory, either a whole number of vectors for
// each piece, or two pieces in a vector. Returns whether all values were finite.
template <DType dtype, bool two_in_one>
bool packed_extrema(const ExtremaJob& job, std::int64_t first) {
  constexpr std::int64_t bytes = Order<dtype>::N * element_size(dtype);
  const std::int64_t length = job.values.length();
  const std::int64_t vectors = two_in_one ? 1 : length / Order<dtype>::N;
  const std::byte* from = job.values.data + first * length * element_size(dtype);
  I low[W], high[W];
  for (int i = 0; i < W; i++) {
    const auto keys = stream_keys<dtype>(from);
    Range<KeysOf<dtype>> range{keys, keys};
    from += bytes;
    for (std::int64_t k = 1; k < vectors; k++, from += bytes) range.include(stream_keys<dtype>(from));
    const Range<I> wide = in_32_bits(range);
    low[i] = wide.low, high[i] = wide.high;
  }
  return store_extrema<dtype, two_in_one ? W / 2 : W>(job, first, two_in_one ? 2 * W : W, low, high);
}

// One value each of `count` pieces, N of them in a range: each lane has its own.
template <DType dtype>
void include_row(const std::byte* row, std::int64_t stride, std::int64_t count,
                 Range<KeysOf<dtype>>* ranges) {
  constexpr std::int64_t size = element_size(dtype), N = Order<dtype>::N;
  for (std::int64_t i = 0; i < count; i += N) {
    const std::int64_t left = count - i;
    const bool whole = stride == 1 && left >= N;
    ranges[i / N].include(whole ? stream_keys<dtype>(row + i * size)
                                : gather_keys<dtype>(row + i * stride * size, stride, left));
  }
}

// The ranges of no rows: from Inf to −Inf.
template <DType dtype> void clear_ranges(std::int64_t count, Range<KeysOf<dtype>>* ranges) {
  const KeysOf<dtype> high = KeysOf<dtype>{} + Order<dtype>::infinity;
  for (std::int64_t i = 0; i < count; i += Order<dtype>::N) ranges[i / Order<dtype>::N] = {high, ~high};
}

// Returns whether all values were finite.
template <DType dtype>
bool store_ranges(const Range<KeysOf<dtype>>* ranges, std::int64_t count, std::byte* low_to,
                  std::byte* high_to) {
  constexpr std::int64_t size = element_size(dtype), N = Order<dtype>::N;
  constexpr auto infinity = Order<dtype>::infinity, magnitude = Order<dtype>::magnitude;
  KeysOf<dtype> strange{};
  for (std::int64_t i = 0; i < count; i += N) {
    const auto [low, high] = ranges[i / N];
    strange |= (high >= infinity) | (~low >= infinity);
    const auto low_bits = low ^ ((low >> (8 * size - 1)) & magnitude);
    const auto high_bits = high ^ ((high >> (8 * size - 1)) & magnitude);
    std::memcpy(low_to + i * size, &low_bits, (count - i < N ? count - i : N) * size);
    std::memcpy(high_to + i * size, &high_bits, (count - i < N ? count - i : N) * size);
  }
  return !any((I)strange);
}

// Pieces of one value per row, which lie side by side, as in a transposed matrix. Returns whether
// all values were finite.
template <DType dtype>
bool adjacent_extrema(const ExtremaJob& job, const Task& task, Range<KeysOf<dtype>>* ranges) {
  constexpr std::int64_t size = element_size(dtype);
  const Pieces& values = job.values;
  const std::int64_t pieces = task.end - task.first;
  const std::byte* start = values.data + values.offset(task.first) * size;
  clear_ranges<dtype>(pieces, ranges);
  for (std::int64_t position = task.begin; position < task.stop; position++)
    include_row<dtype>(start + values.offset_within(position) * size, 1, pieces, ranges);
  const std::int64_t at = (task.chunk * values.count() + task.first) * size;
  return store_ranges<dtype>(ranges, pieces, job.low + at, job.high + at);
}

// Any pieces, which advance together, row by row. Returns whether all values were finite.
template <DType dtype>
bool strided_extrema(const ExtremaJob& job, const Task& task, std::int64_t first,
                     std::int64_t pieces, Range<KeysOf<dtype>>* ranges) {
  constexpr std::int64_t size = element_size(dtype);
  const Pieces& values = job.values;
  for (std::int64_t begin = task.begin; begin < task.stop;) {
    const std::int64_t left = task.stop - begin, run = values.run(begin);
    const std::int64_t count = run < left ? run : left;
    const std::byte* row = values.data + values.offset_within(begin) * size;
    std::int64_t line = first / values.grid_columns, column = first % values.grid_columns;
    for (std::int64_t piece = 0; piece < pieces; piece++) {
      const std::int64_t at = line * values.grid_row_stride + column * values.grid_column_stride;
      const std::byte* from = row + at * size;
      if (begin == task.begin)
        ranges[piece].low = ranges[piece].high = first_keys<dtype>(from, values.column_stride, count);
      include<dtype>(ranges[piece], from, values.column_stride, count);
      if (++column == values.grid_columns) column = 0, line++;
    }
    begin += count;
  }
  bool finite = true;
  for (std::int64_t piece = 0; piece < pieces; piece += W) {
    const std::int64_t lanes = pieces - piece < W ? pieces - piece : W;
    I low[W], high[W];
    for (int i = 0; i < W; i++) {
      const Range<I> wide = in_32_bits(ranges[i < lanes ? piece + i : piece]);
      low[i] = wide.low, high[i] = wide.high;
    }
    const std::int64_t at = task.chunk * values.count() + first + piece;
    finite &= store_extrema<dtype, W>(job, at, lanes, low, high);
  }
  return finite;
}

// Where there are NaN and Inf to leave out and to count.
template <DType dtype>
void careful_extrema(const ExtremaJob& job, const Task& task, std::int64_t index) {
  constexpr std::int64_t size = element_size(dtype), infinity = Order<dtype>::infinity;
  const Pieces& values = job.values;
  job.nonfinite[index] = 0;
  for (std::int64_t piece = task.first; piece < task.end; piece++) {
    const std::byte* start = values.data + values.offset(piece) * size;
    std::int32_t low = 0, high = 0;
    bool found = false;
    for (std::int64_t position = task.begin; position < task.stop; position++) {
      const std::byte* from = start + values.offset_within(position) * size;
      const std::int32_t key = gather_keys<dtype>(from, 0, 1)[0];
      if (key >= infinity || ~key >= infinity) {
        job.nonfinite[index]++;
        continue;
      }
      low = found ? lesser(low, key) : key;
      high = found ? greater(high, key) : key;
      found = true;
    }
    const std::int64_t at = task.chunk * values.count() + piece;
    if (job.any_finite) job.any_finite[at] = found;
    store_keys<dtype>(all_bits(low), 1, job.low + at * size);
    store_keys<dtype>(all_bits(high), 1, job.high + at * size);
  }
}

template <DType dtype>
void extrema_task(const ExtremaJob& job, std::int64_t index, std::byte* scratch) {
  constexpr std::int64_t N = Order<dtype>::N;
  const Task task(job.cut, index, job.values.count(), job.values.length());
  const bool packed = job.cut.chunks == 1 && job.values.packed();
  const bool whole = packed && job.values.length() % N == 0;
  const bool two_in_one = packed && job.values.length() * 2 == N && N == 2 * W;
  const std::int64_t together = job.interleaved ? task.end - task.first : two_in_one ? 2 * W : W;
  auto* ranges = (Range<KeysOf<dtype>>*)scratch;
  const bool adjacent =
      job.interleaved && job.values.columns == 1 && job.values.grid_column_stride == 1;
  bool finite = !adjacent || adjacent_extrema<dtype>(job, task, ranges);
  for (std::int64_t first = task.first; !adjacent && first < task.end; first += together) {
    const std::int64_t left = task.end - first, pieces = left < together ? left : together;
    if (two_in_one && pieces == 2 * W)
      finite &= packed_extrema<dtype, true>(job, first);
    else if (whole && pieces == W)
      finite &= packed_extrema<dtype, false>(job, first);
    else
      finite &= strided_extrema<dtype>(job, task, first, pieces, ranges);
  }
  if (!finite) careful_extrema<dtype>(job, task, index);
}

inline void extrema_task(const ExtremaJob& job, std::int64_t index, std::byte* scratch) {
  with_constant(job.values.dtype,
                [&](auto dtype) { extrema_task<dtype()>(job, index, scratch); });
}

}  // namespace
}  // namespace calipers
