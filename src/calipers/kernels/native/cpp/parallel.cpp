#include "parallel.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace calipers {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::align_val_t kAlignment{64};
constexpr auto kPatience = std::chrono::milliseconds(50);
// How long a thread looks for work, or for the end of it, before it sleeps: about what waking takes.
constexpr auto kSpin = std::chrono::microseconds(30);

struct Release {
  void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
};
using Scratch = std::unique_ptr<std::byte, Release>;

Scratch claim(std::size_t bytes) {
  return Scratch(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
}

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Condition> bool spin_until(const Condition& condition) {
  for (const auto end = Clock::now() + kSpin; Clock::now() < end;)
    for (int i = 0; i < 16; i++, pause())
      if (condition()) return true;
  return condition();
}

// A thread that runs what it is given, and sleeps in between.
class Helper {
 public:
  using Work = std::function<void()>;

  Helper() { std::thread(&Helper::live, this).detach(); }

  void give(const Work& work) {
    work_ = &work;
    become(State::given);
  }
  // Returns when the work is done; what was not begun is taken back.
  void finish() {
    State given = State::given;
    if (state_.compare_exchange_strong(given, State::idle)) return;
    wait_for(State::idle);
  }

 private:
  enum class State { idle, given, running };

  void live() {
    for (;;) {
      wait_for(State::given);
      State given = State::given;
      if (!state_.compare_exchange_strong(given, State::running)) continue;
      (*work_)();
      become(State::idle);
    }
  }
  void become(State state) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      state_ = state;
    }
    changed_.notify_one();  // only one ever waits: the helper if it is idle, its caller if not
  }
  void wait_for(State state) {
    const auto is_so = [&] { return state_ == state; };
    if (spin_until(is_so)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, is_so);
  }

  std::atomic<State> state_{State::idle};
  const Work* work_ = nullptr;
  std::mutex mutex_;
  std::condition_variable changed_;
};

// Signals are for the threads of Python.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// All helpers of this process. They live as long as it does.
class Pool {
 public:
  // That of this process: a child that was forked has none of the threads of its parent.
  static Pool& here() {
    static std::atomic<Pool*> current{nullptr};
    Pool* pool = current;
    while (!pool || pool->process_ != getpid()) {
      Pool* made = new Pool;
      if (current.compare_exchange_strong(pool, made)) return *made;
      delete made;
    }
    return *pool;
  }

  std::vector<Helper*> take(std::int64_t threads) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::int64_t count = std::max<std::int64_t>(1, threads - running_) - 1;
    std::vector<Helper*> taken;
    taken.reserve(count);
    while (static_cast<std::int64_t>(taken.size()) < count && add_one(taken)) continue;
    running_ += 1 + taken.size();
    return taken;
  }
  void give_back(const std::vector<Helper*>& helpers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_ -= 1 + helpers.size();
    idle_.insert(idle_.end(), helpers.begin(), helpers.end());
  }

 private:
  // The one that worked last, which may still be awake, or a new one. False if the machine has no more
  // threads to give: those that run do all the work.
  bool add_one(std::vector<Helper*>& taken) {
    if (!idle_.empty()) {
      taken.push_back(idle_.back());
      idle_.pop_back();
      return true;
    }
    try {
      const SignalsBlocked blocked;
      idle_.reserve(++made_);  // for all of them, so that giving back never fails
      taken.push_back(new Helper);
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::int64_t running_ = 0;  // threads of all calls that run now
  std::size_t made_ = 0;
  std::vector<Helper*> idle_;
};

// Helpers for one call. Calls that come from several threads share what each of them may have: one
// that comes second gets what the first has left, and at least the thread it came in.
class Team {
 public:
  explicit Team(std::int64_t threads) : pool_(Pool::here()), helpers_(pool_.take(threads)) {}
  ~Team() {
    for (Helper* helper : helpers_) helper->finish();
    pool_.give_back(helpers_);
  }
  std::size_t size() const { return 1 + helpers_.size(); }
  void give(const Helper::Work& work) {
    for (Helper* helper : helpers_) helper->give(work);
  }

 private:
  Pool& pool_;
  const std::vector<Helper*> helpers_;
};

}  // namespace

bool run_tasks(std::int64_t tasks, int threads, std::size_t scratch_bytes,
               const std::function<void(std::int64_t, std::byte*)>& task,
               const std::function<bool()>& interrupted) {
  std::atomic<std::int64_t> next{0}, seat{0};
  std::atomic<bool> stopped{false};
  std::vector<Scratch> scratch;
  const auto work = [&](auto&& between) {
    std::byte* memory = scratch[seat++].get();
    for (std::int64_t i; !stopped && (i = next++) < tasks; between()) task(i, memory);
  };
  const Helper::Work help = [&] { work([] {}); };
  Team team(std::min<std::int64_t>(threads, tasks));  // finishes before what it works with is gone
  for (std::size_t i = 0; i < team.size(); i++) scratch.push_back(claim(scratch_bytes));
  team.give(help);
  auto asked = Clock::now();
  work([&] {
    const auto now = Clock::now();
    if (now - asked < kPatience) return;
    asked = now;
    if (interrupted()) stopped = true;
  });
  return !stopped;
}

}  // namespace calipers
