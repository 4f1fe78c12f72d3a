#include "common.h"

namespace calipers {

constexpr std::int64_t kThreadValues = 1 << 19;  // what is worth another thread

DType dtype_of(const nb::dlpack::dtype& dtype) {
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

Pieces pieces_of(const Tensor& tensor) {
  if (tensor.ndim() != 5) throw nb::value_error("The tensor must have five dimensions.");
  if (!tensor.size()) throw nb::value_error("The tensor must not be empty.");
  if (!tensor.data()) throw nb::value_error("The tensor has no memory of its own.");
  const auto size = [&](int i) { return static_cast<std::int64_t>(tensor.shape(i)); };
  const auto stride = [&](int i) { return tensor.stride(i); };
  return {static_cast<const std::byte*>(tensor.data()), dtype_of(tensor.dtype()),
          size(0), size(1), size(2), size(3), size(4),
          stride(0), stride(1), stride(2), stride(3), stride(4)};
}

Pieces weights_of(const std::optional<Tensor>& weights, const Tensor& values) {
  if (!weights) return {};
  const Pieces pieces = pieces_of(*weights);
  for (int i = 0; i < 5; i++)
    if (weights->shape(i) != values.shape(i)) throw nb::value_error("weights have the wrong shape.");
  return pieces;
}

void expect(std::size_t found, std::int64_t wanted, const char* what) {
  if (found != static_cast<std::size_t>(wanted))
    throw nb::value_error((std::string(what) + " has the wrong size.").c_str());
}

std::size_t grid_of(const std::string& name, bool shifted) {
  for (std::size_t row = 0; row < kGridCount; row++) {
    if (kGrids[row].name != name) continue;
    if (shifted && !kGrids[row].has_zero_points)
      throw nb::value_error(("The grid " + name + " has no zero points.").c_str());
    return row;
  }
  throw nb::value_error(("There is no grid " + name + ".").c_str());
}

Numbers::Numbers(const std::string& name, float lowest, float highest)
    : grid(grid_of(name)), lowest(lowest), highest(highest) {}

Cut cut_of(const Pieces& pieces, std::int64_t per_task) {
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

int useful_threads(int threads, std::int64_t work) {
  const int useful = static_cast<int>(std::clamp<std::int64_t>(work / kThreadValues, 1, 1 << 16));
  return std::clamp(threads, 1, useful);
}

}  // namespace calipers
