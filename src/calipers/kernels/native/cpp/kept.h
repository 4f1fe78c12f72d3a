// The best candidates of one piece.
#pragma once

#include "jobs.h"

namespace calipers {

struct Kept {
  float* scales;
  std::int32_t* windows;
  double* errors;               // ascending
  std::int64_t size, count;

  // What an error must be below to be kept.
  CALIPERS_INLINE double worst() const { return count < size ? 1e300 : errors[size - 1]; }
  CALIPERS_INLINE void take(float scale, std::int32_t window, double error) {
    if (!(error < worst())) return;
    if (count < size) count++;
    std::int64_t at = count - 1;
    for (; at > 0 && error < errors[at - 1]; at--) {
      scales[at] = scales[at - 1];
      windows[at] = windows[at - 1];
      errors[at] = errors[at - 1];
    }
    scales[at] = scale, windows[at] = window, errors[at] = error;
  }
  // Where there are fewer candidates than places, the last one is repeated; where there are none,
  // the scale is zero.
  CALIPERS_INLINE void fill_up() {
    if (!count) scales[0] = 0, windows[0] = 0, errors[0] = 0, count = 1;
    for (; count < size; count++) {
      scales[count] = scales[count - 1];
      windows[count] = windows[count - 1];
      errors[count] = errors[count - 1];
    }
  }
};

}  // namespace calipers
