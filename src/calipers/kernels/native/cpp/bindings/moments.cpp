// Σx² of channels, alone or with extrema and counts.
#include "common.h"

namespace calipers {
namespace {

constexpr std::int64_t kStrip = 1024;  // channels whose sums stay in the first cache
constexpr std::int64_t kBins = 65536;

std::int64_t sum_of_squares_chunks(std::int64_t tokens) {
  return divide_up(tokens, std::max<std::int64_t>(256, divide_up(tokens, 64)));
}

// What is told of sums over tokens: one matrix, and how it is cut.
template <class Job>
void set_tokens(Job& job, const Tensor& values, const Optional<const std::uint8_t>& mask,
                const Array<double>& sums) {
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

void sum_of_squares(const Tensor& values, const Optional<const std::uint8_t>& mask, Array<double> sums,
                    int threads) {
  MomentsJob job{};
  set_tokens(job, values, mask, sums);
  run(chosen().moments, job, threads, job.values.length());
}

// Returns whether all values that count are finite.
bool summarize_channels(const Tensor& values, const Optional<const std::uint8_t>& mask, Array<double> sums,
                        AnyArray ranges, const Optional<std::int64_t>& counts, int threads) {
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
  std::vector<std::int64_t> memory(others * kBins);
  std::vector<std::int64_t*> tables{data_or_null(counts, kBins, "counts")};
  for (std::int64_t i = 0; i < others; i++) tables.push_back(memory.data() + i * kBins);
  std::vector<std::uint8_t> in_use(tables.size());
  job.tables = tables.data();
  job.in_use = in_use.data();
  job.table_count = counts ? others + 1 : 0;
  run(chosen().channels, job, threads, length);
  for (std::int64_t i = 0; i < others * kBins; i++) tables[0][i % kBins] += memory[i];
  return std::all_of(finite.begin(), finite.end(), [](std::uint8_t one) { return one != 0; });
}

}  // namespace

void bind_moments(nb::module_& m) {
  m.def("sum_of_squares_chunks", &sum_of_squares_chunks, "tokens"_a);
  m.def("sum_of_squares", &sum_of_squares, nb::kw_only(), "values"_a, "mask"_a.noconvert().none(),
        "sums"_a.noconvert(), "threads"_a);
  m.def("summarize_channels", &summarize_channels, nb::kw_only(), "values"_a, "mask"_a.noconvert().none(),
        "sums"_a.noconvert(), "ranges"_a.noconvert(), "counts"_a.noconvert().none(), "threads"_a);
}

}  // namespace calipers
