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
    CALIPERS_QUOTE(CALIPERS_ISA),
    kernel_of<ExtremaJob, ExtremaScratch, extrema_task>(),
    kernel_of<SearchJob, SearchScratch, search_task>(),
    kernel_of<OptimumJob, OptimumScratch, optimum_task>(),
    kernel_of<RangesJob, RangesScratch, ranges_task>(),
    kernel_of<MomentsJob, MomentsScratch, moments_task>(),
    kernel_of<CountsJob, CountsScratch, counts_task>(),
    kernel_of<ChannelsJob, ChannelsScratch, channels_task>(),
    kernel_of<QuantizeJob, QuantizeScratch, quantize_task>(),
    kernel_of<FeedbackJob, FeedbackScratch, feedback_task>(),
    kernel_of<DescentJob, Descent, descent_task>(),
    kernel_of<JointJob, JointScratch, joint_task>(),
    kernel_of<PackJob, PackScratch, pack_task>(),
    {load_piece, measure_values, set_ends, sweep_errors, sweep_changed},
};

}  // namespace calipers
