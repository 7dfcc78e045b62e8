// Zeroed memory from the system. Pages that are never written take no memory; large allocations get huge pages if the
// system has some.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <new>
#include <utility>
#include <vector>

#include "matrix.h"

namespace antiphon {

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) : bytes_(bytes) {
    if (!bytes) return;
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    madvise(data_, bytes, MADV_HUGEPAGE);
    live_ += (long)bytes;
  }
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Memory() {
    if (!data_) return;
    munmap(data_, bytes_);
    live_ -= (long)bytes_;
  }

  // Returns the bytes of all allocations that this process holds.
  static long live() { return live_; }

  size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void swap(Memory& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  static inline std::atomic<long> live_{0};

  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// An arena: what it allocates lasts as long as the arena. Large allocations lie one after the other, so that nearly all
// of them are in huge pages.
class Stock {
 public:
  // Returns zeroed memory that begins at a cache line.
  void* take(size_t bytes) {
    if (bytes < kLarge) return pieces_.emplace_back(bytes).as<void>();
    if (bytes > left_) {
      left_ = std::max(bytes, kStretch);
      next_ = pieces_.emplace_back(left_).as<char>();
    }
    void* const taken = next_;
    const size_t used = std::min((bytes + 63) / 64 * 64, left_);
    next_ += used, left_ -= used;
    return taken;
  }

 private:
  static constexpr size_t kLarge = 256 << 10, kStretch = 64 << 20;

  std::vector<Memory> pieces_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

// A buffer for rows of an activation. `rows` grows it if necessary, which zeroes it; only one thread may call that.
template <class T>
class RowBuffer {
 public:
  Rows<T> get() const { return {memory_.as<T>(), stride_}; }

  Rows<T> rows(long count, long width) {
    const long stride = row_stride<T>(width);
    const size_t bytes = (size_t)(count * stride) * sizeof(T);
    if (bytes > memory_.bytes() || stride != stride_) memory_ = Memory(bytes);
    stride_ = stride;
    return get();
  }

 private:
  Memory memory_;
  long stride_ = 0;
};

}  // namespace antiphon
