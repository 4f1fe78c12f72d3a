// Compiled once per instruction set. No function here may be shared between these objects: the
// linker would keep one, perhaps for the wrong machine. Hence the anonymous namespaces, and nothing
// of the standard library that is not inlined away.
#include "channels.h"
#include "counts.h"
#include "extrema.h"
#include "feedback.h"
#include "joint.h"
#include "moments.h"
#include "optimum_lanes.h"
#include "packing.h"
#include "quantize.h"
#include "search.h"
#include "sweep_values.h"

#define CALIPERS_JOIN_(a, b) a##b
#define CALIPERS_JOIN(a, b) CALIPERS_JOIN_(a, b)
#define CALIPERS_QUOTE_(a) #a
#define CALIPERS_QUOTE(a) CALIPERS_QUOTE_(a)

namespace calipers {

extern const Kernels CALIPERS_JOIN(kernels_, CALIPERS_ISA);
const Kernels CALIPERS_JOIN(kernels_, CALIPERS_ISA) = {
    CALIPERS_QUOTE(CALIPERS_ISA), extrema_task, search_task, optimum_task, ranges_task, moments_task,
    counts_task, channels_task, quantize_task, feedback_task, descent_task, joint_task, pack_task,
    {load_piece, measure_values, set_ends, sweep_errors, sweep_changed},
};

}  // namespace calipers
