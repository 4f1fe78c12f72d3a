#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace calipers {
namespace {

constexpr std::align_val_t kAlignment{64};
constexpr auto kPatience = std::chrono::milliseconds(50);

struct Release {
  void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
};
using Scratch = std::unique_ptr<std::byte, Release>;

Scratch claim(std::size_t bytes) {
  return Scratch(static_cast<std::byte*>(::operator new(bytes + 64, kAlignment)));
}

}  // namespace

bool run_tasks(std::int64_t tasks, int threads, std::size_t scratch_bytes,
               const std::function<void(std::int64_t, std::byte*)>& task,
               const std::function<bool()>& interrupted) {
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> stopped{false};
  const auto work = [&](std::byte* scratch, auto&& between) {
    for (std::int64_t i; !stopped && (i = next++) < tasks; between()) task(i, scratch);
  };
  const std::int64_t helpers = std::max<std::int64_t>(0, std::min<std::int64_t>(threads, tasks) - 1);
  std::vector<Scratch> scratch;
  for (std::int64_t i = 0; i <= helpers; i++) scratch.push_back(claim(scratch_bytes));

  std::vector<std::thread> running;
  running.reserve(helpers);
  try {
    for (std::int64_t i = 1; i <= helpers; i++)
      running.emplace_back(work, scratch[i].get(), [] {});
  } catch (const std::system_error&) {
    // The machine has no more threads to give: those that run do all the work.
  }
  auto asked = std::chrono::steady_clock::now();
  work(scratch[0].get(), [&] {
    const auto now = std::chrono::steady_clock::now();
    if (now - asked < kPatience) return;
    asked = now;
    if (interrupted()) stopped = true;
  });
  for (std::thread& thread : running) thread.join();
  return !stopped;
}

}  // namespace calipers
