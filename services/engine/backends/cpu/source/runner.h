// Runs steps one after the other on its own thread, so that a step begins as soon as the previous one ends, whatever
// the caller is doing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace antiphon {

class Runner {
 public:
  // `stays_awake`: whether the thread spins for a while before it sleeps when there is no work (see `stay_awake` in
  // pool.h).
  explicit Runner(bool stays_awake) : stays_awake_(stays_awake) {}
  // Ends the thread after the work that it is running; queued work is dropped.
  ~Runner();

  // Queues work behind the work under way.
  void launch(std::function<void()> work);

  // Waits for the oldest work under way and rethrows its exception, if any. There must be work under way.
  void collect();

 private:
  void run();

  const bool stays_awake_;
  std::mutex mutex_;
  std::condition_variable launched_, ended_;
  std::deque<std::function<void()>> waiting_;
  std::deque<std::exception_ptr> results_;
  bool stopping_ = false;
  std::atomic<bool> called_{false};  // there may be new work; read without the lock
  std::thread thread_;               // starts with the first work
};

}  // namespace antiphon
