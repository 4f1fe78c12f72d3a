// Tasks over threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace calipers {

// Run every task once, on at most `threads` threads including this one. Each thread has scratch
// memory of its own, aligned to a cache line. `interrupted` is asked now and then on this thread;
// once it says so, no further task begins. Returns whether all ran. No thread works on a task after
// the call: threads look for more work for some microseconds, then sleep until they are needed again.
bool run_tasks(std::int64_t tasks, int threads, std::size_t scratch_bytes,
               const std::function<void(std::int64_t, std::byte*)>& task,
               const std::function<bool()>& interrupted);

}  // namespace calipers
