// Steps one after the other on a thread of its own, so that the next one begins when the last one ends, whatever the
// caller is doing then.
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
  // Whether the thread stays awake for a while when it has nothing to do (see pool.h).
  explicit Runner(bool stays_awake) : stays_awake_(stays_awake) {}
  // Ends the thread after what it is running; what waits is dropped.
  ~Runner();

  // Puts something behind what is under way.
  void launch(std::function<void()> work);

  // Waits for the oldest that is under way; throws what it threw. There must be one.
  void collect();

 private:
  void run();

  const bool stays_awake_;
  std::mutex mutex_;
  std::condition_variable launched_, ended_;
  std::deque<std::function<void()>> waiting_;
  std::deque<std::exception_ptr> results_;
  bool stopping_ = false;
  std::atomic<bool> called_{false};  // there may be something to do; read without the lock
  std::thread thread_;               // starts with the first work
};

}  // namespace antiphon
