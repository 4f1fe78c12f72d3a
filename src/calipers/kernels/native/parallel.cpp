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

// Threads of all calls that run now. Calls that come from several threads share what each of them may
// have: one that comes second gets what the first has left, and at least the thread it came in.
class Claimed {
 public:
  explicit Claimed(std::int64_t wanted) {
    std::int64_t running = running_.load();
    do count_ = std::max<std::int64_t>(1, wanted - running);
    while (!running_.compare_exchange_weak(running, running + count_));
  }
  ~Claimed() { running_ -= count_; }
  std::int64_t helpers() const { return count_ - 1; }

 private:
  static std::atomic<std::int64_t> running_;
  std::int64_t count_;
};
std::atomic<std::int64_t> Claimed::running_{0};

}  // namespace

bool run_tasks(std::int64_t tasks, int threads, std::size_t scratch_bytes,
               const std::function<void(std::int64_t, std::byte*)>& task,
               const std::function<bool()>& interrupted) {
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> stopped{false};
  const auto work = [&](std::byte* scratch, auto&& between) {
    for (std::int64_t i; !stopped && (i = next++) < tasks; between()) task(i, scratch);
  };
  const Claimed claimed(std::min<std::int64_t>(threads, tasks));
  const std::int64_t helpers = claimed.helpers();
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
