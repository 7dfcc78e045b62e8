// See runner.h.
#include "runner.h"

#include "pool.h"

namespace antiphon {

Runner::~Runner() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    called_ = true;
  }
  launched_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Runner::launch(std::function<void()> work) {
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(work));
    called_ = true;
  }
  launched_.notify_one();
}

void Runner::collect() {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [this] { return !results_.empty(); });
  const std::exception_ptr error = results_.front();
  results_.pop_front();
  if (error) std::rethrow_exception(error);
}

void Runner::run() {
  take_turns_at_once();
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (stays_awake_ && waiting_.empty() && !stopping_) {
      called_ = false;
      lock.unlock();
      stay_awake([this] { return called_.load(std::memory_order_acquire); });
      lock.lock();
    }
    launched_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
    if (stopping_) return;
    const std::function<void()> work = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    results_.push_back(error);
    ended_.notify_one();
  }
}

}  // namespace antiphon
