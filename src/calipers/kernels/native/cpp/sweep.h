// The best of all scales whatsoever, for squared errors.
#pragma once

#include "jobs.h"

namespace calipers {

struct SweepJob {
  const SweepKernels* kernels;
  Pieces values;
  Pieces weights;               // data is null where all values count alike
  Cut cut;                      // pieces are never cut
  const float *low, *high;      // [pieces]
  const Window* windows;
  std::int64_t window_count;
  const float* magnitudes;      // the grid without its signs, ascending from zero
  std::int64_t magnitude_count;
  std::int64_t kept;
  float* best;                  // [pieces][kept], the best first
  std::int32_t* window;         // [pieces][kept]
  double* errors;               // [pieces][kept]
};

void sweep_task(const SweepJob& job, std::int64_t index);

}  // namespace calipers
