// Σx² of each channel, in float64.
#pragma once

#include "arena.h"
#include "tile.h"

namespace calipers {
namespace {

constexpr int kTogether = 4;  // tokens for which a sum is fetched once

// sums += Σ x² of the rows
template <DType dtype, int count>
void add_squares(const std::byte* const* rows, std::int64_t stride,
                 std::int64_t channels, D* sums) {
  constexpr std::int64_t size = element_size(dtype);
  for (std::int64_t i = 0; i < channels; i += W) {
    D first = sums[2 * i / W], second = sums[2 * i / W + 1];
    for (int row = 0; row < count; row++) {
      V x{};
      if (stride == 1 && i + W <= channels)
        x = load_vector<dtype>(rows[row] + i * size);
      else
        load_values<dtype>(rows[row] + i * stride * size, stride, channels - i < W ? channels - i : W,
                           (float*)&x);
      const D low = lower_doubles(x), high = upper_doubles(x);
      first += low * low;
      second += high * high;
    }
    sums[2 * i / W] = first;
    sums[2 * i / W + 1] = second;
  }
}

// The next tokens that count, from `token` on, which moves behind them. Returns how many there are.
inline int next_rows(const Pieces& values, const std::uint8_t* mask, const Task& task,
                     std::int64_t& token, const std::byte** rows) {
  const std::int64_t size = element_size(values.dtype);
  int taken = 0;
  for (; token < task.stop && taken < kTogether; token++)
    if (!mask || mask[token])
      rows[taken++] =
          values.data + (token * values.row_stride + task.first * values.column_stride) * size;
  return taken;
}

template <DType dtype>
void add_squares_of(const std::byte* const* rows, int taken, std::int64_t stride,
                    std::int64_t channels, D* sums) {
  if (taken == kTogether) return add_squares<dtype, kTogether>(rows, stride, channels, sums);
  for (int row = 0; row < taken; row++) add_squares<dtype, 1>(rows + row, stride, channels, sums);
}

struct MomentsScratch {
  D* sums;  // of the channels of a task
  MomentsScratch(Arena& arena, const MomentsJob& job)
      : sums((D*)arena.take<double>(round_up(job.cut.pieces_per_run, W))) {}
};

template <DType dtype> void moments_task(const MomentsJob& job, const Task& task, D* sums) {
  const Pieces& values = job.values;
  const std::int64_t channels = task.end - task.first, padded = round_up(channels, W);
  std::memset(sums, 0, padded * sizeof(double));
  for (std::int64_t token = task.begin; token < task.stop;) {
    const std::byte* rows[kTogether];
    const int taken = next_rows(values, job.mask, task, token, rows);
    add_squares_of<dtype>(rows, taken, values.column_stride, channels, sums);
  }
  std::memcpy(job.sums + task.chunk * values.columns + task.first, sums, channels * sizeof(double));
}

inline void moments_task(const MomentsJob& job, std::int64_t index, MomentsScratch& scratch) {
  const Task task(job.cut, index, job.values.columns, job.values.rows);
  with_constant(job.values.dtype, [&](auto dtype) { moments_task<dtype()>(job, task, scratch.sums); });
}

}  // namespace
}  // namespace calipers
