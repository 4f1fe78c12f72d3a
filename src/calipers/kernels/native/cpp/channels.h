// Counts of values, extrema and Σx² of a matrix of tokens and channels, in one pass over the memory.
//
// A few rows at a time come from memory; then each of the three has them in the first cache. Sums
// are made in the order in which moments.h makes them, and are the same to the bit.
#pragma once

#include "counts.h"
#include "extrema.h"
#include "moments.h"

namespace calipers {
namespace {

// A table of counts that no other task counts into meanwhile; null if nobody asks for counts.
class BorrowedTable {
 public:
  explicit BorrowedTable(const ChannelsJob& job) : job_(job) {
    if (!job.table_count) return;
    while (__atomic_exchange_n(job.in_use + index_, 1, __ATOMIC_ACQUIRE))
      index_ = (index_ + 1) % job.table_count;
  }
  ~BorrowedTable() {
    if (job_.table_count) __atomic_store_n(job_.in_use + index_, 0, __ATOMIC_RELEASE);
  }
  std::int64_t* counts() const { return job_.table_count ? job_.tables[index_] : nullptr; }

 private:
  const ChannelsJob& job_;
  std::int64_t index_ = 0;
};

template <DType dtype>
void count_row(const std::byte* row, std::int64_t stride, std::int64_t count, float* floats,
               std::uint16_t* codes, std::int64_t* counts) {
  if constexpr (dtype == DType::f32) {
    load_values<dtype>(row, stride, count, floats);
    round_to_codes(floats, count, codes);
  } else if (stride == 1) {
    return count_into(row, count, counts);
  } else {
    gather_codes(row, stride, count, codes);
  }
  count_into((const std::byte*)codes, count, counts);
}

// Of the channels of a task.
struct ChannelsScratch {
  D* sums;
  std::byte* ranges;  // for any dtype: those of 16 bits take half of it
  float* floats;
  std::uint16_t* codes;
  ChannelsScratch(Arena& arena, const ChannelsJob& job) {
    const std::int64_t channels = round_up(job.cut.pieces_per_run, kLanes);
    sums = (D*)arena.take<double>(channels);
    ranges = (std::byte*)arena.take<Range<I>>(channels / W);
    floats = arena.take<float>(channels);
    codes = arena.take<std::uint16_t>(channels);
  }
};

template <DType dtype>
bool channels_task(const ChannelsJob& job, const Task& task, ChannelsScratch& scratch) {
  constexpr std::int64_t size = element_size(dtype);
  const Pieces& values = job.values;
  const std::int64_t channels = task.end - task.first;
  const std::int64_t stride = values.column_stride;
  D* sums = scratch.sums;
  auto* ranges = (Range<KeysOf<dtype>>*)scratch.ranges;
  const BorrowedTable table(job);
  std::int64_t* counts = table.counts();
  std::memset(sums, 0, round_up(channels, W) * sizeof(double));
  clear_ranges<dtype>(channels, ranges);
  for (std::int64_t token = task.begin; token < task.stop;) {
    const std::byte* rows[kTogether];
    const int taken = next_rows(values, job.mask, task, token, rows);
    add_squares_of<dtype>(rows, taken, stride, channels, sums);
    for (int row = 0; row < taken; row++) {
      include_row<dtype>(rows[row], stride, channels, ranges);
      if (counts) count_row<dtype>(rows[row], stride, channels, scratch.floats, scratch.codes, counts);
    }
  }
  const std::int64_t at = task.chunk * values.columns + task.first;
  std::memcpy(job.sums + at, sums, channels * sizeof(double));
  return store_ranges<dtype>(ranges, channels, job.low + at * size, job.high + at * size);
}

inline void channels_task(const ChannelsJob& job, std::int64_t index, ChannelsScratch& scratch) {
  const Task task(job.cut, index, job.values.columns, job.values.rows);
  with_constant(job.values.dtype, [&](auto dtype) {
    job.finite[index] = channels_task<dtype()>(job, task, scratch);
  });
}

}  // namespace
}  // namespace calipers
