// The threads of a model: they share out the numbered items of one phase after the other.
//
// A phase has ended when all of its items are done, not when all threads have come: a thread that the system has put
// aside between items is missed by nobody and catches up later; inside one it holds up that item alone. Who computes
// an item never changes its result. Between phases threads offer their core to the other services on the machine;
// between steps they stay awake for a while, then sleep.
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

// The calling thread is scheduled like any program's from now on, whatever was asked for the process (see
// antiphon/child.py).
void take_turns_at_once();

// Waits until `come`, for a while, without going to sleep: whoever else wants the core gets it, but a core with nothing
// to do does not rest. A host puts a virtual machine's cores that rest now and then side by side, where they share one
// way to memory (docs/adr/0013-cores-and-turns.md). Returns whether it came.
bool stay_awake(const std::function<bool()>& come);

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return (int)workers_.size() + 1; }

  // Runs `step` on every thread with its number; returns when all have returned. Called by one thread at a time.
  void run(const std::function<void(int)>& step);

  // Inside a step: calls `work(first, last)` for parts of [0, items) until none is left anywhere, and waits until all
  // are done. The first parts are large, for a thread is faster in one stretch, and then they become smaller, down to
  // `portion`: the threads end together. While there is enough for all, parts are multiples of `together`. Every thread
  // calls it in the same order, and with the same numbers unless it comes too late for the phase: what it then reads of
  // later phases may still be changing, so `items` may depend on nothing but atomics and what stays as it is throughout
  // the step.
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

 private:
  // How many of the items that are left one thread takes.
  long part(long left, long portion, long together) const {
    const long some = std::max(left / (4 * threads()), portion);
    if (left < threads() * together) return std::min(std::max(some, left / threads()), left);
    return std::min((some + together - 1) / together * together, left);
  }

  // A phase and its first item that nobody has taken, in one number: an item is never taken for another phase's.
  static constexpr int kItemBits = 32;
  static constexpr uint64_t kItemMask = (1ull << kItemBits) - 1;

  // Opens the next phase; called when all items of this one are done, by one thread.
  void finish(uint64_t phase) {
    done_.store(0, std::memory_order_relaxed);
    next_.store((phase + 1) << kItemBits, std::memory_order_release);
  }
  // The same for a phase without items, by whoever is first.
  void finish(uint64_t phase, uint64_t next) {
    next_.compare_exchange_strong(next, (phase + 1) << kItemBits, std::memory_order_acq_rel);
  }
  void wait_for(uint64_t phase);
  void stop();
  void work(int number);
  bool wait_for_step(unsigned long seen);

  // The calling thread's place in the step that it runs.
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
