// The extrema of pieces. Small tensors are many, and taking one apart by DLPack costs more than reading
// it: so torch is asked where a tensor lies, and the sizes and strides that come beside it are checked
// against the memory that there is.
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "common.h"

namespace calipers {
namespace {

constexpr std::int64_t kBytesLikeValue = 2;  // that extrema are looked for in, while others do a value

using Five = std::array<std::int64_t, 5>;

// Where a tensor of torch lies in its storage.
class Memory {
 public:
  explicit Memory(nb::handle tensor) : data_(address(tensor)) {
    static PyObject* const untyped_storage = PyUnicode_InternFromString("untyped_storage");
    static PyObject* const nbytes = PyUnicode_InternFromString("nbytes");
    const nb::object storage = call(tensor, untyped_storage);
    begin_ = address(storage);
    end_ = begin_ + nb::cast<std::uintptr_t>(call(storage, nbytes));
  }
  std::byte* data() const { return reinterpret_cast<std::byte*>(data_); }
  // Refuse a view from which anything but its storage is reached.
  void expect(const Five& shape, const Five& strides, std::int64_t size, const char* what) const {
    constexpr __int128 kMost = std::numeric_limits<std::int64_t>::max();
    __int128 first = 0, last = 0, count = 1;
    for (int i = 0; i < 5; i++) {
      if (shape[i] < 1) throw nb::value_error((std::string(what) + " must not be empty.").c_str());
      const __int128 reach = static_cast<__int128>(shape[i] - 1) * strides[i];
      (reach < 0 ? first : last) += reach;
      if (count <= kMost) count *= shape[i];
    }
    const __int128 start = data_;
    if (start + first * size < begin_ || start + (last + 1) * size > end_)
      throw nb::value_error((std::string(what) + " reaches beyond its storage.").c_str());
    // Strides of zero stay where they are, however often they are taken.
    if (count > kMost)
      throw nb::value_error((std::string(what) + " has more values than can be counted.").c_str());
  }
  void expect(std::int64_t count, std::int64_t size, const char* what) const {
    expect({1, 1, 1, 1, count}, {1, 1, 1, 1, 1}, size, what);
  }

 private:
  static nb::object call(nb::handle of, PyObject* name) {
    PyObject* found = PyObject_CallMethodNoArgs(of.ptr(), name);
    if (!found) throw nb::python_error();
    return nb::steal(found);
  }
  static std::uintptr_t address(nb::handle of) {
    static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
    return nb::cast<std::uintptr_t>(call(of, data_ptr));
  }
  std::uintptr_t data_, begin_, end_;
};

// Pieces that lie side by side in memory, row by row, are best read a row of the grid at a time.
bool are_interleaved(const Pieces& pieces) {
  return pieces.observations * pieces.rows > 1 && pieces.grid_columns > 1;
}

Cut cut_of_extrema(const Pieces& pieces) {
  if (!are_interleaved(pieces)) return cut_of(pieces);
  const std::int64_t row = pieces.grid_columns * pieces.columns;
  const std::int64_t rows = std::max<std::int64_t>(1, 4 * kTaskValues / row);
  Cut cut{};
  cut.pieces_per_run = pieces.grid_columns;
  cut.positions_per_chunk = std::min(pieces.length(), rows * pieces.columns);
  cut.runs = pieces.grid_rows;
  cut.chunks = divide_up(pieces.length(), cut.positions_per_chunk);
  return cut;
}

struct ChunkExtrema {
  std::vector<std::byte> low, high;
  std::vector<std::uint8_t> any_finite;
  ChunkExtrema(const ExtremaJob& job)
      : low(job.cut.chunks * job.values.count() * element_size(job.values.dtype)), high(low.size()),
        any_finite(job.cut.chunks * job.values.count(), 1) {}
};

// Floats as integers in the order of floats; the same operation turns them back.
template <class Key> Key in_order(Key bits) {
  return bits ^ ((bits >> (8 * sizeof(Key) - 1)) & std::numeric_limits<Key>::max());
}

// The extrema of pieces from those of their chunks. `missing` marks those without a finite value.
template <class Key>
void join_chunks(const ExtremaJob& job, const ChunkExtrema& chunks, std::byte* low, std::byte* high,
                 std::uint8_t* missing) {
  const std::int64_t count = job.values.count();
  const auto* lows = reinterpret_cast<const Key*>(chunks.low.data());
  const auto* highs = reinterpret_cast<const Key*>(chunks.high.data());
  std::vector<Key> least(count, std::numeric_limits<Key>::max()), most(count, std::numeric_limits<Key>::min());
  for (std::int64_t chunk = 0; chunk < job.cut.chunks; chunk++)
    for (std::int64_t i = 0, at = chunk * count; i < count; i++, at++) {
      const Key lower = in_order(lows[at]), upper = in_order(highs[at]);
      const bool there = chunks.any_finite[at];
      least[i] = there && lower < least[i] ? lower : least[i];
      most[i] = there && upper > most[i] ? upper : most[i];
    }
  for (std::int64_t i = 0; i < count; i++) {
    const bool found = least[i] <= most[i];
    const Key lower = found ? in_order(least[i]) : 0, upper = found ? in_order(most[i]) : 0;
    std::memcpy(low + i * sizeof(Key), &lower, sizeof(Key));
    std::memcpy(high + i * sizeof(Key), &upper, sizeof(Key));
    if (missing) missing[i] = !found;
  }
}

// Rows that follow each other in memory are one long row; so are observations of one row.
void join_rows(Pieces& pieces) {
  if (pieces.columns == 1) pieces.column_stride = 1;
  if (pieces.column_stride != 1) return;
  if (pieces.row_stride == pieces.columns) pieces.columns *= std::exchange(pieces.rows, 1);
  if (pieces.rows == 1 && pieces.observation_stride == pieces.columns)
    pieces.columns *= std::exchange(pieces.observations, 1);
}

std::int64_t run_extrema(ExtremaJob& job, int threads) {
  std::vector<std::int64_t> nonfinite(job.cut.tasks());
  job.nonfinite = nonfinite.data();
  const std::int64_t bytes = job.values.count() * job.values.length() * element_size(job.values.dtype);
  run(chosen().extrema, job, threads, bytes / kBytesLikeValue);
  return std::accumulate(nonfinite.begin(), nonfinite.end(), std::int64_t{0});
}

// The extrema of each piece, for one place in `low` and `high` each; returns how many values are not
// finite. If there are some, `missing` is needed: it marks pieces that have nothing else, and whose
// range is zero.
std::int64_t extrema(nb::handle values, const std::string& dtype, const Five& shape, const Five& strides,
                     nb::handle low, nb::handle high, nb::handle missing, int threads) {
  ExtremaJob job{};
  const Memory from(values), lower(low), upper(high);
  job.values = {from.data(), dtype_named(dtype), shape[0], shape[1], shape[2],
                shape[3], shape[4], strides[0], strides[1], strides[2], strides[3], strides[4]};
  const std::int64_t size = element_size(job.values.dtype);
  from.expect(shape, strides, size, "values");
  const std::int64_t pieces = job.values.count();
  lower.expect(pieces, size, "low");
  upper.expect(pieces, size, "high");
  std::uint8_t* marks = nullptr;
  if (!missing.is_none()) {
    const Memory marked(missing);
    marked.expect(pieces, 1, "missing");
    marks = reinterpret_cast<std::uint8_t*>(marked.data());
  }
  join_rows(job.values);
  job.interleaved = are_interleaved(job.values);
  job.cut = cut_of_extrema(job.values);
  job.low = lower.data();
  job.high = upper.data();
  if (job.cut.chunks == 1 && !marks) return run_extrema(job, threads);
  ChunkExtrema chunks(job);
  job.low = chunks.low.data();
  job.high = chunks.high.data();
  job.any_finite = marks ? chunks.any_finite.data() : nullptr;
  const std::int64_t nonfinite = run_extrema(job, threads);
  if (nonfinite && !marks) return nonfinite;
  const auto join = job.values.dtype == DType::f32 ? join_chunks<std::int32_t> : join_chunks<std::int16_t>;
  join(job, chunks, lower.data(), upper.data(), marks);
  return nonfinite;
}

}  // namespace

void bind_extrema(nb::module_& m) {
  m.def("extrema", &extrema, "values"_a, "dtype"_a, "shape"_a, "strides"_a, "low"_a, "high"_a,
        "missing"_a.none(), "threads"_a);
}

}  // namespace calipers
