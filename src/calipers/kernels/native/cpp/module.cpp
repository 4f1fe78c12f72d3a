// The door to Python: checks what comes in, cuts it into tasks and runs them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gram.h"
#include "jobs.h"
#include "parallel.h"
#include "power.h"
#include "sweep.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace calipers {

#if defined(CALIPERS_ARM)
extern const Kernels kernels_neon;
#else
extern const Kernels kernels_generic;
#endif
#if defined(CALIPERS_X86)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

namespace {

using Tensor = nb::ndarray<nb::ro, nb::device::cpu>;
template <class T> using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;

constexpr std::int64_t kTaskValues = 1 << 16;
constexpr std::int64_t kThreadValues = 1 << 19;   // what is worth another thread
constexpr std::int64_t kBytesLikeValue = 2;       // that extrema are looked for in, while others do a value
constexpr std::int64_t kCountedValues = 1 << 22;  // clearing and adding a table has its price
constexpr std::int64_t kStage = 256;              // candidates of pieces that are cut, at a time
constexpr std::int64_t kStrip = 1024;             // channels whose sums stay in the first cache

constexpr std::int64_t kRowsPerTask = 4 * kLanes;

// Which instruction set runs

std::vector<const Kernels*> usable_kernels() {
#if defined(CALIPERS_ARM)
  return {&kernels_neon};  // every processor of 64 bits has it
#else
  std::vector<const Kernels*> usable{&kernels_generic};
#if defined(CALIPERS_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c"))
    usable.push_back(&kernels_avx2);
  if (usable.size() == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    usable.push_back(&kernels_avx512);
#endif
  return usable;
#endif
}

const Kernels* chosen = usable_kernels().back();

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable_kernels()) names.emplace_back(kernels->name);
  return names;
}

void use(const std::string& name) {
  for (const Kernels* kernels : usable_kernels())
    if (kernels->name == name) {
      chosen = kernels;
      return;
    }
  throw std::invalid_argument("This machine cannot run the instruction set '" + name + "'.");
}

// What comes in

template <class AnyTensor> DType dtype_of(const AnyTensor& tensor) {
  const nb::dlpack::dtype dtype = tensor.dtype();
  const bool is_bfloat = dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat);
  const bool is_float = dtype.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float);
  if (is_float && dtype.bits == 32) return DType::f32;
  if (is_float && dtype.bits == 16) return DType::f16;
  if (is_bfloat && dtype.bits == 16) return DType::bf16;
  throw nb::type_error("The tensor must be float32, float16 or bfloat16.");
}

DType dtype_named(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "float16") return DType::f16;
  if (name == "bfloat16") return DType::bf16;
  throw nb::value_error("The dtype must be float32, float16 or bfloat16.");
}

// (observations, grid rows, grid columns, rows, columns)
Pieces pieces_of(const Tensor& tensor) {
  if (tensor.ndim() != 5) throw nb::value_error("The tensor must have five dimensions.");
  const auto size = [&](int i) { return static_cast<std::int64_t>(tensor.shape(i)); };
  const auto stride = [&](int i) { return tensor.stride(i); };
  if (!tensor.data() && tensor.size()) throw nb::value_error("The tensor has no memory of its own.");
  return {static_cast<const std::byte*>(tensor.data()), dtype_of(tensor),
          size(0), size(1), size(2), size(3), size(4),
          stride(0), stride(1), stride(2), stride(3), stride(4)};
}

Pieces weights_of(const Tensor& weights, const Tensor& values) {
  const Pieces pieces = pieces_of(weights);
  for (int i = 0; i < 5; i++)
    if (weights.shape(i) != values.shape(i)) throw nb::value_error("weights have the wrong shape.");
  return pieces;
}

void expect(std::size_t found, std::int64_t wanted, const char* what) {
  if (found != static_cast<std::size_t>(wanted))
    throw nb::value_error((std::string(what) + " has the wrong size.").c_str());
}

template <class T> T* data_or_null(std::optional<Array<T>>& array, std::int64_t wanted, const char* what) {
  if (!array) return nullptr;
  expect(array->size(), wanted, what);
  return array->data();
}

std::vector<std::string> grids() {
  std::vector<std::string> names;
  for (const GridRow& row : kGrids) names.emplace_back(row.name);
  return names;
}

std::size_t grid_of(const std::string& name, bool shifted = false) {
  for (std::size_t row = 0; row < kGridCount; row++) {
    if (kGrids[row].name != name) continue;
    if (shifted && !kGrids[row].has_zero_points)
      throw nb::value_error(("The grid " + name + " has no zero points.").c_str());
    return row;
  }
  throw nb::value_error(("There is no grid " + name + ".").c_str());
}

ScaleSource scale_source_of(const std::string& name) {
  if (name == "plain") return ScaleSource::plain;
  if (name == "power_of_two") return ScaleSource::power_of_two;
  if (name == "given") return ScaleSource::given;
  throw nb::value_error("The scale must be plain, power_of_two or given.");
}

// How work is cut

std::int64_t divide_up(std::int64_t count, std::int64_t unit) { return (count + unit - 1) / unit; }

Cut cut_of(const Pieces& pieces, std::int64_t per_task = kTaskValues) {
  const std::int64_t length = pieces.length(), count = pieces.count();
  Cut cut{};
  if (length > 2 * per_task) {
    cut.pieces_per_run = 1;
    cut.positions_per_chunk = per_task;
  } else {
    cut.pieces_per_run = std::max<std::int64_t>(1, per_task / length);
    // Short ones are worked on by whole vectors.
    if (pieces.is_short()) cut.pieces_per_run = divide_up(cut.pieces_per_run, kLanes) * kLanes;
    cut.positions_per_chunk = length;
  }
  cut.runs = divide_up(count, cut.pieces_per_run);
  cut.chunks = divide_up(length, cut.positions_per_chunk);
  return cut;
}

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

Cut cut_of_whole(const Pieces& pieces, std::int64_t per_task) {
  Cut cut{};
  cut.pieces_per_run = std::max<std::int64_t>(1, per_task / pieces.length());
  cut.positions_per_chunk = pieces.length();
  cut.runs = divide_up(pieces.count(), cut.pieces_per_run);
  cut.chunks = 1;
  return cut;
}

bool signals_pending() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// `work` is about how many values are looked at; a thread is only started for enough of them.
int useful_threads(int threads, std::int64_t work) {
  const int useful = static_cast<int>(std::clamp<std::int64_t>(work / kThreadValues, 1, 1 << 16));
  return std::clamp(threads, 1, useful);
}

template <class Job>
void run(void (*kernel)(const Job&, std::int64_t, std::byte*), const Job& job, int threads,
         std::int64_t work, std::size_t scratch) {
  bool finished;
  {
    nb::gil_scoped_release released;
    finished = run_tasks(
        job.cut.tasks(), useful_threads(threads, work), scratch,
        [&](std::int64_t task, std::byte* memory) { kernel(job, task, memory); }, signals_pending);
  }
  if (!finished) throw nb::python_error();
}

// Operations

// Tensors come as numbers here, because small ones are many, and taking one apart by DLPack costs more
// than reading it.
template <class T> T* memory_at(std::uintptr_t address) { return reinterpret_cast<T*>(address); }

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
  run(chosen->extrema, job, threads, bytes / kBytesLikeValue,
      (std::min(job.cut.pieces_per_run, job.values.count()) + 2 * kLanes) * 3 * kVectorBytes);
  return std::accumulate(nonfinite.begin(), nonfinite.end(), std::int64_t{0});
}

// The extrema of each piece, for one place in `low` and `high` each; returns how many values are not
// finite. If there are some, `missing` is needed: it marks pieces that have nothing else, and whose
// range is zero.
std::int64_t extrema(std::uintptr_t values, const std::string& dtype, std::array<std::int64_t, 5> shape,
                     std::array<std::int64_t, 5> strides, std::uintptr_t low, std::uintptr_t high,
                     std::uintptr_t missing, int threads) {
  ExtremaJob job{};
  job.values = {memory_at<const std::byte>(values), dtype_named(dtype), shape[0], shape[1], shape[2],
                shape[3], shape[4], strides[0], strides[1], strides[2], strides[3], strides[4]};
  join_rows(job.values);
  job.interleaved = are_interleaved(job.values);
  job.cut = cut_of_extrema(job.values);
  job.low = memory_at<std::byte>(low);
  job.high = memory_at<std::byte>(high);
  if (job.cut.chunks == 1 && !missing) return run_extrema(job, threads);
  ChunkExtrema chunks(job);
  job.low = chunks.low.data();
  job.high = chunks.high.data();
  job.any_finite = missing ? chunks.any_finite.data() : nullptr;
  const std::int64_t nonfinite = run_extrema(job, threads);
  if (nonfinite && !missing) return nonfinite;
  const auto join = job.values.dtype == DType::f32 ? join_chunks<std::int32_t> : join_chunks<std::int16_t>;
  join(job, chunks, memory_at<std::byte>(low), memory_at<std::byte>(high), memory_at<std::uint8_t>(missing));
  return nonfinite;
}

// Add up the chunks of each piece in their order, and choose.
void choose_from_chunks(const SearchJob& job) {
  const std::int64_t pieces = job.values.count(), tried = job.end - job.begin;
  for (std::int64_t piece = 0; piece < pieces; piece++) {
    double* sums = job.errors + piece * tried;
    for (std::int64_t chunk = 1; chunk < job.cut.chunks; chunk++)
      for (std::int64_t c = 0; c < tried; c++) sums[c] += sums[chunk * pieces * tried + c];
    choose(job, piece, sums, job.begin, job.end);
  }
}

// Try candidates until every piece has been through all that patience reaches. A piece that came
// early may not know how far that is, and goes on in another round.
void search_until_done(SearchJob& job, int threads) {
  const std::int64_t pieces = job.values.count();
  const auto done = [&] { return job.done ? *std::min_element(job.done, job.done + pieces) : 0; };
  for (job.begin = done(); job.begin < reach(job); job.begin = job.done ? done() : job.end) {
    job.end = job.errors ? std::min(reach(job), job.begin + kStage) : reach(job);
    run(chosen->search, job, threads, pieces * job.values.length() * (job.end - job.begin),
        search_scratch_bytes(job.candidates));
    if (job.errors) choose_from_chunks(job);
  }
}

void search(const Tensor& values, Array<const float> low, Array<const float> high,
            Array<const float> factors, const std::string& grid, float lowest, float highest,
            double norm, std::optional<Tensor> weights, const std::string& scale, bool shifted,
            std::optional<Array<const float>> scales,
            std::optional<Array<const float>> zero_points, std::int64_t patience,
            Array<std::int32_t> best, std::optional<Array<std::int32_t>> done,
            std::optional<Array<double>> least,
            Array<std::uint8_t> improved, int threads) {
  SearchJob job{};
  job.values = pieces_of(values);
  const std::int64_t pieces = job.values.count();
  job.candidates = static_cast<std::int64_t>(factors.size());
  expect(low.size(), pieces, "low");
  expect(high.size(), pieces, "high");
  expect(best.size(), pieces, "best");
  expect(improved.size(), job.candidates, "improved");
  if (weights) job.weights = weights_of(*weights, values);
  // A task takes a few milliseconds, however many candidates there are, so that Ctrl-C is heard.
  const std::int64_t many = std::max<std::int64_t>(64, job.candidates);
  job.cut = cut_of(job.values, std::max<std::int64_t>(kTile, 64 * kTaskValues / many));
  job.low = low.data();
  job.high = high.data();
  job.factors = factors.data();
  job.scales = data_or_null(scales, job.candidates * pieces, "scales");
  job.zero_points = data_or_null(zero_points, job.candidates * pieces, "zero_points");
  job.scale = scale_source_of(scale);
  job.shifted = shifted;
  if (job.scale == ScaleSource::given && (!job.scales || (shifted && !job.zero_points)))
    throw nb::value_error("scales, and zero_points if codes are shifted, must be given.");
  job.grid = grid_of(grid, shifted);
  job.lowest = lowest;
  job.highest = highest;
  job.norm = static_cast<float>(norm);
  job.power = power_of(norm);
  job.patience = patience;
  job.best = best.data();
  job.done = data_or_null(done, pieces, "done");
  job.least = data_or_null(least, pieces, "least");
  if (job.patience && !(job.done && job.least)) throw nb::value_error("patience needs done and least.");
  job.improved = improved.data();
  std::vector<double> errors;
  if (job.cut.chunks > 1)
    errors.resize(job.cut.chunks * pieces * std::min(job.candidates, kStage));
  job.errors = errors.empty() ? nullptr : errors.data();
  search_until_done(job, threads);
}

// Each window is five numbers.
std::vector<Window> windows_of(const Array<const float>& windows) {
  if (windows.ndim() != 2 || windows.shape(1) != 5 || !windows.size())
    throw nb::value_error("Windows must be rows of five numbers.");
  std::vector<Window> made;
  for (std::size_t i = 0; i < windows.size(); i += 5) {
    const float* w = windows.data() + i;
    made.push_back({w[0], w[1], w[2], w[3], w[4]});
  }
  return made;
}

// What both searches of all scales are told.
template <class Job>
void set_pieces(Job& job, const Tensor& values, const std::optional<Tensor>& weights,
                const Array<const float>& low, const Array<const float>& high,
                const std::vector<Window>& windows, const Array<float>& best,
                const Array<std::int32_t>& window, const Array<double>& errors) {
  job.values = pieces_of(values);
  if (weights) job.weights = weights_of(*weights, values);
  const std::int64_t pieces = job.values.count();
  expect(low.size(), pieces, "low");
  expect(high.size(), pieces, "high");
  job.kept = static_cast<std::int64_t>(best.size()) / pieces;
  if (!job.kept) throw nb::value_error("best must have a place for each piece.");
  expect(best.size(), pieces * job.kept, "best");
  expect(window.size(), pieces * job.kept, "window");
  expect(errors.size(), pieces * job.kept, "errors");
  job.cut = cut_of_whole(job.values, kTaskValues / 4);
  job.low = low.data();
  job.high = high.data();
  job.windows = windows.data();
  job.window_count = static_cast<std::int64_t>(windows.size());
  job.best = best.data();
  job.window = window.data();
  job.errors = errors.data();
}

// Whether no octave has more scales than are tried one by one.
bool are_few(const std::vector<float>& ascending) {
  constexpr std::size_t most = 16;
  for (std::size_t i = 0; i + most < ascending.size(); i++)
    if (ascending[i + most] < 2 * ascending[i]) return false;
  return true;
}

void optimum(const Tensor& values, std::optional<Tensor> weights, Array<const float> low,
             Array<const float> high, Array<const float> storable, float halvable,
             Array<const float> windows, bool shifted, const std::string& grid, double norm,
             float most, Array<float> best, Array<std::int32_t> window, Array<double> errors,
             int threads) {
  OptimumJob job{};
  job.most = most;
  const std::vector<Window> made = windows_of(windows);
  set_pieces(job, values, weights, low, high, made, best, window, errors);
  // Vectors are loaded from any scale on.
  std::vector<float> padded(storable.data(), storable.data() + storable.size());
  const bool few = are_few(padded);
  padded.insert(padded.end(), kLanes, 0.f);
  job.storable = padded.data();
  job.scales = static_cast<std::int64_t>(storable.size());
  if (!job.scales) throw nb::value_error("There must be a scale to choose.");
  job.halvable = halvable;
  job.shifted = shifted;
  job.grid = grid_of(grid, shifted);
  if (shifted && kGrids[job.grid].rounding == Rounding::to_integers)
    throw nb::value_error("The zero points of integers move their windows.");
  job.windows_have_floor = made.size() > 1 && !shifted;
  job.in_lanes = few && !shifted && made.size() <= 2 && job.kept <= kMostKeptLanes && job.values.is_short();
  job.norm = static_cast<float>(norm);
  job.power = power_of(norm);
  run(chosen->optimum, job, threads, 256 * job.values.count() * job.values.length(),
      optimum_scratch_bytes(job.scales));
}

void sweep(const Tensor& values, std::optional<Tensor> weights, Array<const float> low,
           Array<const float> high, Array<const float> windows, Array<const float> magnitudes,
           Array<float> best, Array<std::int32_t> window, Array<double> errors, int threads) {
  SweepJob job{};
  job.kernels = &chosen->sweep;
  const std::vector<Window> made = windows_of(windows);
  set_pieces(job, values, weights, low, high, made, best, window, errors);
  job.magnitudes = magnitudes.data();
  job.magnitude_count = static_cast<std::int64_t>(magnitudes.size());
  run(sweep_task, job, threads, 256 * job.values.count() * job.values.length(), 64);
}

// Multiply each range by the factor chosen for it, and round that to the dtype of `start` and `end`.
void scale_ranges(Array<const float> low, Array<const float> high, Array<const float> factors,
                  Array<const std::int32_t> best, const nb::ndarray<nb::c_contig, nb::device::cpu>& start,
                  const nb::ndarray<nb::c_contig, nb::device::cpu>& end, int threads) {
  RangesJob job{};
  job.pieces = static_cast<std::int64_t>(best.size());
  expect(low.size(), job.pieces, "low");
  expect(high.size(), job.pieces, "high");
  expect(start.size(), job.pieces, "start");
  expect(end.size(), job.pieces, "end");
  if (start.dtype() != end.dtype()) throw nb::type_error("start and end must have the same dtype.");
  for (std::int64_t i = 0; i < job.pieces; i++)
    if (best.data()[i] < 0 || best.data()[i] >= static_cast<std::int64_t>(factors.size()))
      throw nb::value_error("best must number the factors.");
  job.dtype = dtype_of(start);
  job.cut = {1 << 13, 1, divide_up(job.pieces, 1 << 13), 1};
  job.low = low.data();
  job.high = high.data();
  job.factors = factors.data();
  job.best = best.data();
  job.start = static_cast<std::byte*>(start.data());
  job.end = static_cast<std::byte*>(end.data());
  run(chosen->ranges, job, threads, job.pieces, 2 * (1 << 13) * sizeof(float));
}

std::int64_t sum_of_squares_chunks(std::int64_t tokens) {
  return divide_up(tokens, std::max<std::int64_t>(256, divide_up(tokens, 64)));
}

// What is told of sums over tokens: one matrix, and how it is cut.
template <class Job>
void set_tokens(Job& job, const Tensor& values, std::optional<Array<const std::uint8_t>>& mask,
                Array<double>& sums) {
  job.values = pieces_of(values);
  const std::int64_t tokens = job.values.rows, channels = job.values.columns;
  if (job.values.count() != 1 || job.values.observations != 1)
    throw nb::value_error("The tensor must be one matrix.");
  job.cut.chunks = sum_of_squares_chunks(tokens);
  job.cut.positions_per_chunk = divide_up(tokens, job.cut.chunks);
  job.cut.pieces_per_run = kStrip;
  job.cut.runs = divide_up(channels, kStrip);
  expect(sums.size(), job.cut.chunks * channels, "sums");
  job.mask = data_or_null(mask, tokens, "mask");
  job.sums = sums.data();
}

void sum_of_squares(const Tensor& values, std::optional<Array<const std::uint8_t>> mask,
                    Array<double> sums, int threads) {
  MomentsJob job{};
  set_tokens(job, values, mask, sums);
  run(chosen->moments, job, threads, job.values.length(), kStrip * sizeof(double));
}

// A matrix of tokens in bfloat16 whose columns lie side by side.
GramSide gram_side(const Tensor& values, std::size_t tokens) {
  if (values.ndim() != 2 || dtype_of(values) != DType::bf16)
    throw nb::value_error("The values must be a matrix in bfloat16.");
  if (values.shape(0) != tokens) throw nb::value_error("Both sides must have the same tokens.");
  if (values.shape(1) > 1 && values.stride(1) != 1)
    throw nb::value_error("The columns must lie side by side.");
  return {static_cast<const std::uint16_t*>(values.data()),
          static_cast<std::int64_t>(values.shape(1)), values.stride(0)};
}

// Run tasks without a job of their own.
void run_gram(std::int64_t tasks, int threads, std::int64_t work,
              const std::function<void(std::int64_t)>& task) {
  bool finished;
  {
    nb::gil_scoped_release released;
    finished = run_tasks(
        tasks, useful_threads(threads, work), 0,
        [&](std::int64_t index, std::byte*) { task(index); }, signals_pending);
  }
  if (!finished) throw nb::python_error();
}

// Dot products of bfloat16 belong to the widest instruction set.
bool can_add_products() { return has_gram() && std::string(chosen->name) == "avx512"; }

// total += leftᵀ right
void add_products(const Tensor& left, const Tensor& right, Array<double> total, bool symmetric,
                  int threads) {
  if (!can_add_products()) throw nb::value_error("This machine has no dot products of bfloat16.");
  GramJob job{};
  const std::int64_t tokens = static_cast<std::int64_t>(left.shape(0));
  job.left = gram_side(left, left.shape(0));
  job.right = gram_side(right, left.shape(0));
  job.symmetric = symmetric;
  job.total = total.data();
  expect(total.size(), job.left.columns * job.right.columns, "total");
  if (symmetric && job.left.columns != job.right.columns)
    throw nb::value_error("A symmetric product has one side.");
  const std::int64_t lefts = job.left.panels(), rights = job.right.panels();
  std::vector<std::pair<std::int64_t, std::int64_t>> blocks;
  for (std::int64_t i = 0; i < lefts; i++)
    for (std::int64_t j = symmetric ? i : 0; j < rights; j++) blocks.emplace_back(i, j);
  // Chunks of about the same size, each of whole pairs.
  const std::int64_t chunks = divide_up(tokens, kGramTokens);
  const std::int64_t each = chunks ? divide_up(divide_up(tokens, chunks), 2) * 2 : 0;
  const std::int64_t words = each / 2 * kGramPanel;
  std::unique_ptr<std::uint32_t[]> memory(
      new std::uint32_t[words * (lefts + (symmetric ? 0 : rights))]);
  job.left_packed = memory.get();
  job.right_packed = symmetric ? memory.get() : memory.get() + words * lefts;
  for (std::int64_t start = 0; start < tokens; start += each) {
    job.tokens = std::min(each, tokens - start);
    GramSide sides[] = {job.left, job.right};
    for (GramSide& side : sides) side.data += start * side.stride;
    run_gram(symmetric ? lefts : lefts + rights, threads, job.tokens * job.left.columns,
             [&](std::int64_t panel) {
               const bool is_left = panel < lefts;
               const std::int64_t at = is_left ? panel : panel - lefts;
               pack_gram_panel(sides[!is_left], job.tokens, at,
                               (is_left ? job.left_packed : job.right_packed) + at * job.panel_words());
             });
    // A thread takes neighbouring blocks, the same ones each time: handed out one by one, the lines of
    // `total` would travel from one core's cache to another's, which takes longer than the products.
    const std::int64_t count = static_cast<std::int64_t>(blocks.size());
    run_gram(threads, threads, job.tokens * job.left.columns * job.right.columns / 16,
             [&](std::int64_t part) {
               const std::int64_t end = (part + 1) * count / threads;
               for (std::int64_t at = part * count / threads; at < end; at++)
                 add_gram_block(job, blocks[at].first, blocks[at].second);
             });
  }
}

// Returns whether all values that count are finite.
bool summarize_channels(const Tensor& values, std::optional<Array<const std::uint8_t>> mask,
                        Array<double> sums, nb::ndarray<nb::c_contig, nb::device::cpu> ranges,
                        std::optional<Array<std::int64_t>> counts, int threads) {
  ChannelsJob job{};
  set_tokens(job, values, mask, sums);
  expect(ranges.size(), 2 * static_cast<std::int64_t>(sums.size()), "ranges");
  if (ranges.dtype() != values.dtype()) throw nb::type_error("ranges must have the values' dtype.");
  job.low = static_cast<std::byte*>(ranges.data());
  job.high = job.low + ranges.nbytes() / 2;
  std::vector<std::uint8_t> finite(job.cut.tasks());
  job.finite = finite.data();
  // The first thread counts where counts are wanted, each of the others into a table of its own.
  const std::int64_t length = job.values.length();
  const std::int64_t others = counts ? useful_threads(threads, length) - 1 : 0;
  std::vector<std::int64_t> memory(others * 65536);
  std::vector<std::int64_t*> tables{data_or_null(counts, 65536, "counts")};
  for (std::int64_t i = 0; i < others; i++) tables.push_back(memory.data() + i * 65536);
  std::vector<std::uint8_t> in_use(tables.size());
  job.tables = tables.data();
  job.in_use = in_use.data();
  job.table_count = counts ? others + 1 : 0;
  run(chosen->channels, job, threads, length, channels_scratch_bytes(kStrip));
  for (std::int64_t i = 0; i < others * 65536; i++) tables[0][i % 65536] += memory[i];
  return std::all_of(finite.begin(), finite.end(), [](std::uint8_t one) { return one != 0; });
}

void count_values(const Tensor& values, Array<std::int64_t> counts, int threads) {
  CountsJob job{};
  job.values = pieces_of(values);
  job.cut = cut_of(job.values, kCountedValues);
  expect(counts.size(), job.values.count() * 65536, "counts");
  job.counts = counts.data();
  run(chosen->counts, job, threads, job.values.count() * job.values.length(),
      2 * kTileBytes + 2 * 65536 * sizeof(std::uint32_t));
}

std::int64_t quantize_chunks(const Tensor& values) { return cut_of(pieces_of(values)).chunks; }

void quantize(const Tensor& values, std::optional<Tensor> weights, Array<const float> scales,
              std::optional<Array<const float>> zero_points, const std::string& working,
              const std::string& grid, float lowest, float highest, double norm,
              std::optional<nb::ndarray<nb::c_contig, nb::device::cpu>> output,
              Array<double> errors, int threads) {
  QuantizeJob job{};
  job.values = pieces_of(values);
  if (weights) job.weights = weights_of(*weights, values);
  const std::int64_t pieces = job.values.count();
  job.cut = cut_of(job.values);
  expect(scales.size(), pieces, "scales");
  expect(errors.size(), job.cut.chunks * pieces, "errors");
  job.scales = scales.data();
  job.zero_points = data_or_null(zero_points, pieces, "zero_points");
  job.working = dtype_named(working);
  job.grid = grid_of(grid);
  job.lowest = lowest;
  job.highest = highest;
  job.norm = static_cast<float>(norm);
  job.power = power_of(norm);
  if (output) {
    expect(output->size(), pieces * job.values.length(), "output");
    if (output->dtype() != values.dtype())
      throw nb::type_error("output must have the values' dtype.");
    job.output = static_cast<std::byte*>(output->data());
  }
  job.errors = errors.data();
  run(chosen->quantize, job, threads, pieces * job.values.length(), 3 * kTileBytes);
}

Scaling scaling_of(const Array<const float>& scales, const std::optional<Array<const float>>& zeros,
                   const Array<const std::int64_t>& groups, std::int64_t rows, std::int64_t columns,
                   const std::string& grid, float lowest, float highest) {
  if (scales.ndim() != 2 || (zeros && zeros->ndim() != 2))
    throw nb::value_error("Scales and zeros must be matrices.");
  const std::int64_t count = static_cast<std::int64_t>(scales.shape(1));
  const bool is_shared = scales.shape(0) == 1;
  expect(scales.size(), (is_shared ? 1 : rows) * count, "scales");
  if (zeros) expect(zeros->size(), scales.size(), "zeros");
  expect(groups.size(), columns, "groups");
  for (std::int64_t i = 0; i < columns; i++)
    if (groups.data()[i] < 0 || groups.data()[i] >= count)
      throw nb::value_error("groups must number the columns of scales.");
  return {scales.data(), zeros ? zeros->data() : nullptr, is_shared ? 0 : count, groups.data(),
          grid_of(grid), lowest, highest};
}

void feed_back(Array<float> adjusted, Array<const float> target, Array<const float> factor,
               Array<const float> scales, std::optional<Array<const float>> zeros,
               Array<const std::int64_t> groups, const std::string& grid, float lowest, float highest,
               std::int64_t begin, Array<float> result, Array<float> errors, int threads) {
  if (adjusted.ndim() != 2) throw nb::value_error("adjusted must be a matrix.");
  FeedbackJob job{};
  job.rows = static_cast<std::int64_t>(adjusted.shape(0));
  job.columns = static_cast<std::int64_t>(adjusted.shape(1));
  job.pitch = static_cast<std::int64_t>(groups.size());
  if (begin < 0 || begin + job.columns > job.pitch) throw nb::value_error("The block is out of reach.");
  expect(target.size(), job.rows * job.pitch, "target");
  expect(result.size(), job.rows * job.pitch, "result");
  expect(errors.size(), job.rows * job.pitch, "errors");
  expect(factor.size(), job.pitch * job.pitch, "factor");
  job.scaling = scaling_of(scales, zeros, groups, job.rows, job.pitch, grid, lowest, highest);
  job.scaling.groups += begin;
  job.adjusted = adjusted.data();
  job.target = target.data() + begin;
  job.factor = factor.data() + begin * (job.pitch + 1);
  job.result = result.data() + begin;
  job.errors = errors.data() + begin;
  job.cut = {kRowsPerTask, 1, divide_up(job.rows, kRowsPerTask), 1};
  run(chosen->feedback, job, threads, 8 * job.rows * job.columns,
      2 * job.columns * 4 * kVectorBytes);
}

std::int64_t descend(Array<float> values, Array<float> pulls, Array<const float> hessian,
                     Array<const float> scales, std::optional<Array<const float>> zeros,
                     Array<const std::int64_t> groups, const std::string& grid, float lowest,
                     float highest, std::int64_t sweeps, std::int64_t block, float least_gain,
                     int threads) {
  if (values.ndim() != 2) throw nb::value_error("values must be a matrix.");
  DescentJob job{};
  job.rows = static_cast<std::int64_t>(values.shape(0));
  job.columns = static_cast<std::int64_t>(values.shape(1));
  expect(pulls.size(), job.rows * job.columns, "pulls");
  expect(hessian.size(), job.columns * job.columns, "hessian");
  job.scaling = scaling_of(scales, zeros, groups, job.rows, job.columns, grid, lowest, highest);
  job.sweeps = sweeps;
  job.block = std::clamp<std::int64_t>(block, 1, job.columns);
  job.least_gain = least_gain;
  job.hessian = hessian.data();
  job.values = values.data();
  job.pulls = pulls.data();
  // The more rows a task has, the less often the Hessian is read.
  const std::int64_t rows = std::clamp<std::int64_t>(job.rows / 16, 1, 256);
  job.cut.pieces_per_run = divide_up(rows, 4 * kLanes) * 4 * kLanes;
  job.cut.positions_per_chunk = job.cut.chunks = 1;
  job.cut.runs = divide_up(job.rows, job.cut.pieces_per_run);
  std::vector<std::int64_t> changed(job.cut.tasks());
  job.changed = changed.data();
  run(chosen->descent, job, threads, 16 * job.rows * job.columns,
      descent_scratch_bytes(job.cut.pieces_per_run, job.block));
  return std::accumulate(changed.begin(), changed.end(), std::int64_t{0});
}

void choose_together(const Tensor& values, Array<const float> scales,
                     std::optional<Array<const float>> zeros, Array<const float> own,
                     Array<const float> across, const std::string& grid, float lowest, float highest,
                     std::int64_t rounds, Array<std::int64_t> choice, int threads) {
  JointJob job{};
  job.values = pieces_of(values);
  const Pieces& pieces = job.values;
  if (pieces.observations != 1 || pieces.rows != 1)
    throw nb::value_error("The pieces must be of one row each.");
  if (own.ndim() != 5 || !own.shape(0) || !own.shape(1))
    throw nb::value_error("The Hessian must come in panels.");
  const std::int64_t blocks = static_cast<std::int64_t>(own.shape(0));
  job.places = static_cast<std::int64_t>(own.shape(1));
  job.panels = divide_up(pieces.columns, kPanel);
  expect(blocks * job.places, pieces.grid_columns, "Hessian");
  expect(own.size(), pieces.grid_columns * job.length() * job.length(), "own");
  expect(across.size(), pieces.grid_columns * job.length() * job.places * pieces.columns, "across");
  job.candidates = static_cast<std::int64_t>(scales.size()) / pieces.count();
  if (!job.candidates) throw nb::value_error("There must be a candidate to choose.");
  expect(scales.size(), pieces.count() * job.candidates, "scales");
  expect(choice.size(), pieces.count(), "chosen");
  job.scales = scales.data();
  job.zeros = data_or_null(zeros, pieces.count() * job.candidates, "zeros");
  job.own = own.data();
  job.across = across.data();
  job.grid = grid_of(grid);
  job.lowest = lowest;
  job.highest = highest;
  job.rounds = rounds;
  job.chosen = choice.data();
  job.cut = {kJointRows, 1, divide_up(pieces.grid_rows, kJointRows), blocks};
  run(chosen->joint, job, threads, 64 * pieces.count() * pieces.columns, joint_scratch_bytes(job));
}

// Returns whether a NaN came up. Then the codes are worth nothing.
bool pack(const Tensor& values, Array<const float> scales, Array<const float> zeros,
          std::int64_t height, std::int64_t width, const std::string& working,
          const std::string& grid, float lowest, float highest, float offset, int bits,
          Array<std::uint8_t> packed, int threads) {
  PackJob job{};
  job.values = pieces_of(values);
  const std::int64_t rows = job.values.rows, columns = job.values.columns;
  if (job.values.count() != 1 || job.values.observations != 1)
    throw nb::value_error("The tensor must be one matrix.");
  if (height < 1 || width < 1) throw nb::value_error("A scale must be that of some values.");
  if (bits < 1 || bits > 8) throw nb::value_error("Codes must have 1 to 8 bits.");
  job.height = height;
  job.width = width;
  job.scale_columns = divide_up(columns, width);
  expect(scales.size(), divide_up(rows, height) * job.scale_columns, "scales");
  job.zero_step = zeros.size() == 1 ? 0 : 1;
  if (job.zero_step) expect(zeros.size(), scales.size(), "zeros");
  job.scales = scales.data();
  job.zeros = zeros.data();
  job.working = dtype_named(working);
  job.grid = grid_of(grid);
  job.lowest = lowest;
  job.highest = highest;
  job.offset = offset;
  job.bits = bits;
  job.row_bytes = static_cast<std::int64_t>(packed.size()) / rows;
  expect(packed.size(), rows * job.row_bytes, "packed");
  if (job.row_bytes * 8 < columns * bits) throw nb::value_error("packed is too small.");
  job.packed = packed.data();
  const std::int64_t rows_per_task = std::max<std::int64_t>(1, kTaskValues / columns);
  job.cut = {rows_per_task, 1, divide_up(rows, rows_per_task), 1};
  std::vector<std::uint8_t> nans(job.cut.tasks());
  job.nans = nans.data();
  run(chosen->pack, job, threads, rows * columns, kPackScratchBytes);
  return std::any_of(nans.begin(), nans.end(), [](std::uint8_t one) { return one != 0; });
}

}  // namespace
}  // namespace calipers

NB_MODULE(_native, m) {
  using namespace calipers;
  m.def("instruction_sets", &instruction_sets);
  m.def("instruction_set", [] { return chosen->name; });
  m.def("use", &use, "name"_a);
  m.def("grids", &grids);
  m.def("extrema", &extrema, "values"_a, "dtype"_a, "shape"_a, "strides"_a, "low"_a, "high"_a, "missing"_a,
        "threads"_a);
  m.def("search", &search, "values"_a, "low"_a.noconvert(), "high"_a.noconvert(),
        "factors"_a.noconvert(), "grid"_a, "lowest"_a, "highest"_a, "norm"_a, "weights"_a.none(),
        "scale"_a, "shifted"_a, "scales"_a.noconvert().none(), "zero_points"_a.noconvert().none(), "patience"_a,
        "best"_a.noconvert(), "done"_a.noconvert().none(), "least"_a.noconvert().none(), "improved"_a.noconvert(),
        "threads"_a);
  m.def("optimum", &optimum, "values"_a, "weights"_a.none(), "low"_a.noconvert(), "high"_a.noconvert(),
        "storable"_a.noconvert(), "halvable"_a, "windows"_a.noconvert(), "shifted"_a, "grid"_a, "norm"_a,
        "most"_a, "best"_a.noconvert(), "window"_a.noconvert(), "errors"_a.noconvert(), "threads"_a);
  m.def("sweep", &sweep, "values"_a, "weights"_a.none(), "low"_a.noconvert(), "high"_a.noconvert(),
        "windows"_a.noconvert(), "magnitudes"_a.noconvert(), "best"_a.noconvert(),
        "window"_a.noconvert(), "errors"_a.noconvert(), "threads"_a);
  m.def("scale_ranges", &scale_ranges, "low"_a.noconvert(), "high"_a.noconvert(),
        "factors"_a.noconvert(), "best"_a.noconvert(), "start"_a.noconvert(), "end"_a.noconvert(),
        "threads"_a);
  m.def("sum_of_squares_chunks", &sum_of_squares_chunks, "tokens"_a);
  m.def("sum_of_squares", &sum_of_squares, "values"_a, "mask"_a.noconvert().none(),
        "sums"_a.noconvert(), "threads"_a);
  m.def("can_add_products", &can_add_products);
  m.def("add_products", &add_products, "left"_a, "right"_a, "total"_a.noconvert(), "symmetric"_a,
        "threads"_a);
  m.def("summarize_channels", &summarize_channels, "values"_a, "mask"_a.noconvert().none(),
        "sums"_a.noconvert(), "ranges"_a.noconvert(), "counts"_a.noconvert().none(), "threads"_a);
  m.def("count_values", &count_values, "values"_a, "counts"_a.noconvert(), "threads"_a);
  m.def("quantize_chunks", &quantize_chunks, "values"_a);
  m.def("quantize", &quantize, "values"_a, "weights"_a.none(), "scales"_a.noconvert(),
        "zero_points"_a.noconvert().none(), "working"_a, "grid"_a, "lowest"_a, "highest"_a, "norm"_a,
        "output"_a.noconvert().none(),
        "errors"_a.noconvert(), "threads"_a);
  m.def("feed_back", &feed_back, "adjusted"_a.noconvert(), "target"_a.noconvert(),
        "factor"_a.noconvert(), "scales"_a.noconvert(), "zeros"_a.noconvert().none(),
        "groups"_a.noconvert(), "grid"_a, "lowest"_a, "highest"_a, "begin"_a, "result"_a.noconvert(),
        "errors"_a.noconvert(), "threads"_a);
  m.def("descend", &descend, "values"_a.noconvert(), "pulls"_a.noconvert(), "hessian"_a.noconvert(),
        "scales"_a.noconvert(), "zeros"_a.noconvert().none(), "groups"_a.noconvert(), "grid"_a,
        "lowest"_a, "highest"_a, "sweeps"_a, "block"_a, "least_gain"_a, "threads"_a);
  m.def("choose_together", &choose_together, "values"_a, "scales"_a.noconvert(),
        "zeros"_a.noconvert().none(), "own"_a.noconvert(), "across"_a.noconvert(), "grid"_a, "lowest"_a,
        "highest"_a, "rounds"_a, "choice"_a.noconvert(), "threads"_a);
  m.def("pack", &pack, "values"_a, "scales"_a.noconvert(), "zeros"_a.noconvert(), "height"_a,
        "width"_a, "working"_a, "grid"_a, "lowest"_a, "highest"_a, "offset"_a, "bits"_a,
        "packed"_a.noconvert(), "threads"_a);
}
