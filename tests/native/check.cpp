// Runs every kernel of one instruction set on small random jobs, and compares with plain loops in double.
// Where those would be the kernel once more, what must be true of its result is checked. CALIPERS_ISA names
// the kernels that this is linked with.
#include "harness.h"
#include "rounding.h"
#include "scales.h"
#include "summaries.h"

int main() {
  using namespace check;
  const struct {
    const char* kernel;
    void (*check)();
    int cases;
  } checks[] = {
      {"extrema", check_extrema, 100},  {"counts", check_counts, 12},   {"moments", check_moments, 30},
      {"channels", check_channels, 30}, {"search", check_search, 120},  {"ranges", check_ranges, 10},
      {"optimum", check_optimum, 40},   {"sweep", check_sweep, 20},     {"quantize", check_quantize, 100},
      {"feedback", check_feedback, 20}, {"descent", check_descent, 20}, {"joint", check_joint, 5},
      {"pack", check_pack, 100},
  };
  for (const auto& [kernel, check, cases] : checks) {
    checked = kernel;
    for (int i = 0; i < cases; i++) check();
    std::printf("%s %s: %s\n", kernels.name, kernel, failures[checked] ? "WRONG" : "right");
    std::fflush(stdout);
  }
  for (const auto& [kernel, count] : failures)
    if (count) return 1;
  return 0;
}
