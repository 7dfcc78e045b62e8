// See pool.h.
#include "pool.h"

#include <sched.h>

#include <chrono>

namespace antiphon {

namespace {

constexpr int kSpins = 200;
// Covers the time between two requests of one client.
constexpr auto kAwake = std::chrono::milliseconds(50);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `done` returns true; after kSpins rounds it yields the core to any other thread that wants it.
template <class Done>
inline void wait_until(Done&& done) {
  for (int spin = 0; !done(); spin++) {
    if (spin < kSpins)
      pause();
    else
      sched_yield();
  }
}

}  // namespace

thread_local uint64_t Pool::phase_ = 0;

bool stay_awake(const std::function<bool()>& come) {
  const auto sleepy = std::chrono::steady_clock::now() + kAwake;
  wait_until([&] { return come() || std::chrono::steady_clock::now() > sleepy; });
  return come();
}

void take_turns_at_once() {
  const sched_param none = {};
  sched_setscheduler(0, SCHED_OTHER, &none);
}

Pool::Pool(int threads) {
  try {
    for (int number = 1; number < threads; number++) workers_.emplace_back([this, number] { work(number); });
  } catch (...) {
    stop();  // the system could not create all threads
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stopping_ = true;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    generation_++;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(const std::function<void(int)>& step) {
  step_ = &step;
  next_.store(0, std::memory_order_relaxed);
  running_.store((int)workers_.size(), std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  phase_ = 0;
  step(0);
  wait_until([this] { return running_.load(std::memory_order_acquire) == 0; });
}

void Pool::wait_for(uint64_t phase) {
  wait_until([this, phase] { return next_.load(std::memory_order_acquire) >> kItemBits != phase; });
}

void Pool::work(int number) {
  take_turns_at_once();
  for (unsigned long seen = 0; wait_for_step(seen); seen++) {
    phase_ = 0;
    (*step_)(number);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

// Waits for the step that follows the first `seen` steps. Returns false if the pool is stopping.
bool Pool::wait_for_step(unsigned long seen) {
  const auto come = [this, seen] { return generation_.load(std::memory_order_acquire) != seen; };
  if (!stay_awake(come)) {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, come);
  }
  return !stopping_;
}

}  // namespace antiphon
