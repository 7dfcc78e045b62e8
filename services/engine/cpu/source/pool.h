// The threads of a model: they share out the numbered items of one phase after the other.
//
// Items are taken from a counter, so that a thread that the system has put aside holds up one item and not its share of
// all. Who computes an item never changes its result. Between phases threads spin for a moment, then offer their core
// to the other services on the machine; between steps they do so for a while, then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace antiphon {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return (int)workers_.size() + 1; }

  // Runs `step` on every thread with its number; returns when all have returned. Called by one thread at a time.
  void run(const std::function<void(int)>& step);

  // Inside a step: calls `work(first, last)` for portions of [0, items) until none is left anywhere, and waits until
  // all threads have got there. Every thread calls it with the same numbers in the same order.
  template <class Work>
  void share(long items, long portion, Work&& work) {
    if (workers_.empty()) {
      if (items > 0) work(0L, items);
      return;
    }
    for (long first; (first = next_.fetch_add(portion, std::memory_order_relaxed)) < items;)
      work(first, first + portion < items ? first + portion : items);
    meet();
  }

 private:
  void meet();
  void stop();
  void work(int number);
  bool wait_for_step(unsigned long seen);

  alignas(64) std::atomic<long> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> met_{0};
  alignas(64) std::atomic<unsigned long> generation_{0};
  std::atomic<int> running_{0};
  std::atomic<bool> stopping_{false};
  const std::function<void(int)>* step_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace antiphon
