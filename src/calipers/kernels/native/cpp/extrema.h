// Smallest and largest finite value of each piece, in one pass over the memory.
//
// Floats are compared by their bits. Pieces that have a lane each: with the lower bits of negative ones
// turned over, bits as signed integers have the order of floats; these are keys. Values that lie side by
// side: as they are, bits of negative floats are above all others as unsigned integers, below as signed
// ones, and grow with the magnitude. So the largest signed bits are those of the largest value, and the
// largest unsigned ones those of the smallest, if there are values of both signs; if not, the one that
// is missing has the smallest unsigned bits. Three comparisons, and nothing else.
//
// Either way NaN and Inf lie beyond all finite values, so that the extrema tell of them.
#pragma once

#include "arena.h"
#include "tile.h"

namespace calipers {
namespace {

template <class T> T lesser(T a, T b) { return a < b ? a : b; }
template <class T> T greater(T a, T b) { return a > b ? a : b; }

// How the values of a dtype lie in vectors, N in each.
template <DType dtype> struct Order {
  using Signed = Short;
  using Unsigned = UShort;
  static constexpr int N = 2 * W;
  static constexpr std::int32_t magnitude = 0x7fff, infinity = dtype == DType::f16 ? 0x7c00 : 0x7f80;
};
template <> struct Order<DType::f32> {
  using Signed = I;
  using Unsigned = U32;
  static constexpr int N = W;
  static constexpr std::int32_t magnitude = 0x7fffffff, infinity = 0x7f800000;
};
template <DType dtype> using KeysOf = typename Order<dtype>::Signed;

template <DType dtype> KeysOf<dtype> load_bits(const std::byte* from) { return load_as<KeysOf<dtype>>(from); }

// Up to N values that need not lie side by side; free lanes repeat the first.
template <DType dtype>
KeysOf<dtype> gather_bits(const std::byte* from, std::int64_t stride, std::int64_t count) {
  constexpr std::int64_t size = element_size(dtype), N = Order<dtype>::N;
  std::byte gathered[N * size];
  for (std::int64_t i = 0; i < N; i++)
    std::memcpy(gathered + i * size, from + (i < count ? i * stride : 0) * size, size);
  return load_bits<dtype>(gathered);
}

template <DType dtype>
KeysOf<dtype> load_some(const std::byte* from, std::int64_t stride, std::int64_t count) {
  const bool side_by_side = stride == 1 && count >= Order<dtype>::N;
  return side_by_side ? load_bits<dtype>(from) : gather_bits<dtype>(from, stride, count);
}

// The same operation turns keys back.
template <DType dtype, class T> T keys_of(T bits) {
  return bits ^ ((bits >> (8 * element_size(dtype) - 1)) & Order<dtype>::magnitude);
}

// Values that lie side by side

template <class Signed, class Unsigned> struct Extremes {
  Signed high;
  Unsigned low, least;
  explicit Extremes(Signed bits) : high(bits), low((Unsigned)bits), least((Unsigned)bits) {}
  void include(Signed bits) {
    high = greater(high, bits);
    low = greater(low, (Unsigned)bits);
    least = lesser(least, (Unsigned)bits);
  }
};
template <DType dtype> using ExtremesOf = Extremes<KeysOf<dtype>, typename Order<dtype>::Unsigned>;

// In 32 bits, of which those of 16 are the upper half. What is in the lower one decides nothing.
inline Extremes<I, U32> in_32_bits(Extremes<I, U32> found) { return found; }
inline Extremes<I, U32> in_32_bits(Extremes<Short, UShort> found) {
  const auto even = [](auto x) { return (U32)x << 16; };
  Extremes<I, U32> wide{greater((I)found.high, (I)even(found.high))};
  wide.low = greater((U32)found.low, even(found.low));
  wide.least = lesser((U32)found.least, even(found.least));
  return wide;
}

// Vectors that lie side by side, four at a time: so the processor asks for more memory before it has some.
template <DType dtype>
void include_vectors(ExtremesOf<dtype>& found, const std::byte* from, std::int64_t vectors) {
  constexpr std::int64_t bytes = Order<dtype>::N * element_size(dtype);
  for (; vectors >= 4; vectors -= 4, from += 4 * bytes)
    for (int k = 0; k < 4; k++) found.include(load_bits<dtype>(from + k * bytes));
  for (; vectors > 0; vectors--, from += bytes) found.include(load_bits<dtype>(from));
}

// `count` values, `stride` elements apart.
template <DType dtype>
void include(ExtremesOf<dtype>& into, const std::byte* from, std::int64_t stride, std::int64_t count) {
  constexpr std::int64_t size = element_size(dtype), N = Order<dtype>::N;
  ExtremesOf<dtype> found = into;  // not in memory, which `from` might be
  if (stride == 1 && count >= N) {
    include_vectors<dtype>(found, from, count / N);
    found.include(load_bits<dtype>(from + (count - N) * size));  // some of them once more
  } else {
    for (std::int64_t i = 0; i < count; i += N)
      found.include(gather_bits<dtype>(from + i * stride * size, stride, count - i));
  }
  into = found;
}

// The extrema of up to 2 W pieces, from a vector of each, or from a vector of two (`two_in_one`).
class Folding {
 public:
  void put(int i, Extremes<I, U32> found) {
    high_[i] = found.high, low_[i] = (I)found.low, least_[i] = (I)found.least;
  }
  // Store so many results. Returns whether all are finite.
  template <DType dtype, bool two_in_one>
  bool store(const ExtremaJob& job, std::int64_t at, std::int64_t count) {
    constexpr std::int64_t size = element_size(dtype);
    constexpr std::int32_t infinity = Order<dtype>::infinity << (dtype == DType::f32 ? 0 : 16);
    fold_lanes<greater<I>, two_in_one>(high_);
    fold_lanes<greater_unsigned, two_in_one>(low_);
    fold_lanes<lesser_unsigned, two_in_one>(least_);
    I strange{};
    for (std::int64_t i = 0; i < count; i += W) {
      const std::int64_t part = count - i < W ? count - i : W;
      const I high = high_[i / W], low = low_[i / W], least = least_[i / W];
      strange |= (high >= infinity) | ((low & 0x7fffffff) >= infinity);
      store_bits<dtype>(low < 0 ? low : least, part, job.low + (at + i) * size);
      store_bits<dtype>(high < 0 ? least : high, part, job.high + (at + i) * size);
    }
    return !any(strange);
  }

 private:
  static I greater_unsigned(I a, I b) { return (I)greater((U32)a, (U32)b); }
  static I lesser_unsigned(I a, I b) { return (I)lesser((U32)a, (U32)b); }
  template <DType dtype> static void store_bits(I bits, std::int64_t count, std::byte* to) {
    if constexpr (dtype == DType::f32) {
      std::memcpy(to, &bits, count * 4);
    } else {
      const U16 upper = narrow((U32)bits >> 16);
      std::memcpy(to, &upper, count * 2);
    }
  }
  I high_[W], low_[W], least_[W];
};

// W vectors' worth of pieces that fill one stretch of memory, either a whole number of vectors for
// each piece, or two pieces in a vector. Returns whether all values were finite.
template <DType dtype, bool two_in_one>
bool packed_extrema(const ExtremaJob& job, std::int64_t first) {
  constexpr std::int64_t bytes = Order<dtype>::N * element_size(dtype);
  const std::int64_t length = job.values.length();
  const std::int64_t vectors = two_in_one ? 1 : length / Order<dtype>::N;
  const std::byte* from = job.values.data + first * length * element_size(dtype);
  Folding pieces;
  for (int i = 0; i < W; i++) {
    ExtremesOf<dtype> found(load_bits<dtype>(from));
    include_vectors<dtype>(found, from + bytes, vectors - 1);
    from += vectors * bytes;
    pieces.put(i, in_32_bits(found));
  }
  return pieces.store<dtype, two_in_one>(job, first, two_in_one ? 2 * W : W);
}

// Any pieces, which advance together, row by row. Returns whether all values were finite.
template <DType dtype>
bool strided_extrema(const ExtremaJob& job, const Task& task, std::int64_t first,
                     std::int64_t pieces, ExtremesOf<dtype>* found) {
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
        found[piece] = ExtremesOf<dtype>(load_some<dtype>(from, values.column_stride, count));
      include<dtype>(found[piece], from, values.column_stride, count);
      if (++column == values.grid_columns) column = 0, line++;
    }
    begin += count;
  }
  bool finite = true;
  for (std::int64_t piece = 0; piece < pieces; piece += W) {
    const std::int64_t lanes = pieces - piece < W ? pieces - piece : W;
    Folding folding;
    for (int i = 0; i < W; i++) folding.put(i, in_32_bits(found[i < lanes ? piece + i : piece]));
    finite &= folding.store<dtype, false>(job, task.chunk * values.count() + first + piece, lanes);
  }
  return finite;
}

// Pieces side by side, with a lane each

template <class Keys> struct Range {
  Keys low, high;
  void include(Keys keys) {
    low = lesser(low, keys);
    high = greater(high, keys);
  }
};

// One value each of `count` pieces, N of them in a range: each lane has its own.
template <DType dtype>
void include_row(const std::byte* row, std::int64_t stride, std::int64_t count,
                 Range<KeysOf<dtype>>* ranges) {
  constexpr std::int64_t size = element_size(dtype), N = Order<dtype>::N;
  for (std::int64_t i = 0; i < count; i += N) {
    const auto bits = load_some<dtype>(row + i * stride * size, stride, count - i);
    ranges[i / N].include(keys_of<dtype>(bits));
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
  constexpr auto infinity = Order<dtype>::infinity;
  KeysOf<dtype> strange{};
  for (std::int64_t i = 0; i < count; i += N) {
    const auto [low, high] = ranges[i / N];
    strange |= (high >= infinity) | (~low >= infinity);
    const auto low_bits = keys_of<dtype>(low), high_bits = keys_of<dtype>(high);
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

// Where there are NaN and Inf to leave out and to count.
template <DType dtype>
void careful_extrema(const ExtremaJob& job, const Task& task, std::int64_t index) {
  using Value = std::conditional_t<dtype == DType::f32, std::int32_t, std::int16_t>;
  constexpr std::int64_t size = element_size(dtype), infinity = Order<dtype>::infinity;
  const Pieces& values = job.values;
  job.nonfinite[index] = 0;
  for (std::int64_t piece = task.first; piece < task.end; piece++) {
    const std::byte* start = values.data + values.offset(piece) * size;
    Value low = 0, high = 0;
    bool found = false;
    for (std::int64_t position = task.begin; position < task.stop; position++) {
      const std::byte* from = start + values.offset_within(position) * size;
      const auto key = keys_of<dtype>(load_as<Value>(from));
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
    store(job.low + at * size, keys_of<dtype>(low));
    store(job.high + at * size, keys_of<dtype>(high));
  }
}

// The extremes so far of each piece that is worked on beside others, whatever the dtype; where they
// have a lane each, there are fewer vectors.
struct ExtremaScratch {
  std::byte* found;
  ExtremaScratch(Arena& arena, const ExtremaJob& job) {
    const std::int64_t run = job.interleaved ? job.cut.pieces_per_run : 0;
    found = (std::byte*)arena.take<Extremes<I, U32>>(run > 2 * W ? run : 2 * W);
  }
};

template <DType dtype>
void extrema_task(const ExtremaJob& job, std::int64_t index, std::byte* scratch) {
  constexpr std::int64_t N = Order<dtype>::N;
  const Task task(job.cut, index, job.values.count(), job.values.length());
  const bool packed = job.cut.chunks == 1 && job.values.packed();
  const bool whole = packed && job.values.length() % N == 0;
  const bool two_in_one = packed && job.values.length() * 2 == N && N == 2 * W;
  const std::int64_t together = job.interleaved ? task.end - task.first : two_in_one ? 2 * W : W;
  const bool adjacent =
      job.interleaved && job.values.columns == 1 && job.values.grid_column_stride == 1;
  bool finite = !adjacent || adjacent_extrema<dtype>(job, task, (Range<KeysOf<dtype>>*)scratch);
  for (std::int64_t first = task.first; !adjacent && first < task.end; first += together) {
    const std::int64_t left = task.end - first, pieces = left < together ? left : together;
    if (two_in_one && pieces == 2 * W)
      finite &= packed_extrema<dtype, true>(job, first);
    else if (whole && pieces == W)
      finite &= packed_extrema<dtype, false>(job, first);
    else
      finite &= strided_extrema<dtype>(job, task, first, pieces, (ExtremesOf<dtype>*)scratch);
  }
  if (!finite) careful_extrema<dtype>(job, task, index);
}

inline void extrema_task(const ExtremaJob& job, std::int64_t index, ExtremaScratch& scratch) {
  with_constant(job.values.dtype,
                [&](auto dtype) { extrema_task<dtype()>(job, index, scratch.found); });
}

}  // namespace
}  // namespace calipers
