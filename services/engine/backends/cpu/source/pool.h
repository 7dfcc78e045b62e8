// The threads of a model. A step consists of phases; in each phase the threads share numbered items.
//
// A phase ends when all of its items are done, not when all threads have arrived. A thread that was descheduled between
// two items therefore delays no other thread and catches up later; one that was descheduled within an item delays only
// that item. An item's result does not depend on the thread that computes it. Between phases, threads yield their core
// to the other services on the machine; between steps they spin for a while, then sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace antiphon {

// Puts the calling thread into the normal scheduling class, whatever the class of the process is (see
// antiphon/supervision/child.py).
void take_turns_at_once();

// Waits until `come` returns true, for a limited time and without sleeping. The thread yields the core to any other
// thread, but a core with nothing else to do does not rest: the host of a virtual machine places cores that rest now
// and then side by side, where they share one path to memory (docs/adr/0009-cpu-backend.md). Returns whether `come`
// returned true.
bool stay_awake(const std::function<bool()>& come);

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return (int)workers_.size() + 1; }

  // Runs `step` on every thread with the thread's number; returns when all have returned. Called by one thread at a
  // time.
  void run(const std::function<void(int)>& step);

  // Called by every thread within a step. Calls `work(first, last)` for parts of [0, items) until no part is left for
  // any thread, and waits until all are done. The first parts are large, because a thread is faster in one stretch;
  // later parts are smaller, down to `portion`, so that the threads end together. While there is enough for all
  // threads, parts are multiples of `together`. Every thread must call it in the same order and with the same numbers,
  // unless it arrives after the end of the phase: what it then reads of later phases may still be changing, so `items`
  // may depend only on atomics and on data that is constant throughout the step.
  template <class Work>
  void share(long items, long portion, long together, Work&& work) {
    if (workers_.empty()) {
      if (items > 0) work(0L, items);
      return;
    }
    const uint64_t phase = phase_++;
    uint64_t next = next_.load(std::memory_order_acquire);
    while (next >> kItemBits == phase) {
      const long first = (long)(next & kItemMask);
      if (first >= items) {
        if (items <= 0) finish(phase, next);
        return wait_for(phase);
      }
      const long last = first + part(items - first, portion, together);
      if (!next_.compare_exchange_weak(next, phase << kItemBits | (uint64_t)last, std::memory_order_acquire)) continue;
      work(first, last);
      if (done_.fetch_add(last - first, std::memory_order_acq_rel) + last - first == items) return finish(phase);
      next = next_.load(std::memory_order_acquire);
    }
  }

  template <class Work>
  void share(long items, long portion, Work&& work) {
    share(items, portion, 1, work);
  }

  // Calls `work(item)` for each item.
  template <class Work>
  void each(long items, Work&& work) {
    share(items, std::max(1L, items / (8 * threads())), [&](long first, long last) {
      for (long i = first; i < last; i++) work(i);
    });
  }

 private:
  // Returns how many of the remaining items a thread takes at once.
  long part(long left, long portion, long together) const {
    const long some = std::max(left / (4 * threads()), portion);
    if (left < threads() * together) return std::min(std::max(some, left / threads()), left);
    return std::min((some + together - 1) / together * together, left);
  }

  // A phase and its first free item are one number, so that a thread cannot take an item of another phase.
  static constexpr int kItemBits = 32;
  static constexpr uint64_t kItemMask = (1ull << kItemBits) - 1;

  // Opens the next phase. Called by one thread when all items of this phase are done.
  void finish(uint64_t phase) {
    done_.store(0, std::memory_order_relaxed);
    next_.store((phase + 1) << kItemBits, std::memory_order_release);
  }
  // The same for a phase without items; called by several threads, of which the first one opens the next phase.
  void finish(uint64_t phase, uint64_t next) {
    next_.compare_exchange_strong(next, (phase + 1) << kItemBits, std::memory_order_acq_rel);
  }
  void wait_for(uint64_t phase);
  void stop();
  void work(int number);
  bool wait_for_step(unsigned long seen);

  // The phase that the calling thread has reached in its step.
  static thread_local uint64_t phase_;

  alignas(64) std::atomic<uint64_t> next_{0};
  alignas(64) std::atomic<long> done_{0};
  alignas(64) std::atomic<unsigned long> generation_{0};
  std::atomic<int> running_{0};
  std::atomic<bool> stopping_{false};
  const std::function<void(int)>* step_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace antiphon
