// Scratch memory of a task. A layout takes its regions from an arena, one after the other, in its
// constructor; the same constructor says how much memory that is, hands it out, and checks afterwards
// that nothing was written beside it. So a size never has to be kept in step with a layout.
//
// Behind each region lie guard bytes. They are written when memory is handed out, compared when the task
// is over (a few nanoseconds for tasks of ten microseconds and more), and a fault in themselves to touch
// where the address sanitizer runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "jobs.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(start, bytes) ((void)0)
#define ASAN_UNPOISON_MEMORY_REGION(start, bytes) ((void)0)
#endif

namespace calipers {
namespace {

class Arena {
 public:
  enum class Mode { measure, carve, check };

  Arena() : Arena(Mode::measure, nullptr) {}
  Arena(Mode mode, std::byte* memory) : mode_(mode), memory_(memory) {}

  // Room for `count` values, aligned to the widest vector; null while measuring.
  template <class T> T* take(std::int64_t count) {
    std::byte* start = memory_ ? memory_ + size_ : nullptr;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    if (start) guard(start + bytes);
    size_ += (bytes + kGuard + kVectorBytes - 1) / kVectorBytes * kVectorBytes;
    return reinterpret_cast<T*>(start);
  }
  // Of all regions so far, with their guards.
  std::size_t size() const { return size_; }
  // Whether all guards are as they were, if this checks.
  bool is_intact() const { return intact_; }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr int kPattern = 0xa5;

  void guard(std::byte* at) {
    if (mode_ == Mode::carve) {
      std::memset(at, kPattern, kGuard);
      ASAN_POISON_MEMORY_REGION(at, kGuard);
      return;
    }
    ASAN_UNPOISON_MEMORY_REGION(at, kGuard);
    std::byte expected[kGuard];
    std::memset(expected, kPattern, kGuard);
    intact_ &= std::memcmp(at, expected, kGuard) == 0;
  }

  Mode mode_;
  std::byte* memory_;
  std::size_t size_ = 0;
  bool intact_ = true;
};

template <class Job, class Layout> std::size_t scratch_bytes(const Job& job) {
  Arena arena;
  Layout layout(arena, job);
  return arena.size();
}

template <class Job, class Layout, void (*task)(const Job&, std::int64_t, Layout&)>
bool run_in_arena(const Job& job, std::int64_t index, std::byte* memory) {
  Arena arena(Arena::Mode::carve, memory);
  Layout scratch(arena, job);
  task(job, index, scratch);
  Arena check(Arena::Mode::check, memory);
  Layout again(check, job);
  return check.is_intact();
}

// A kernel from its task, and from the layout of what that works in.
template <class Job, class Layout, void (*task)(const Job&, std::int64_t, Layout&)>
constexpr Kernel<Job> kernel_of() {
  return {scratch_bytes<Job, Layout>, run_in_arena<Job, Layout, task>};
}

}  // namespace
}  // namespace calipers
