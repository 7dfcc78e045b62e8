// Prefetching by software, spread evenly over the processing of something else: many cache lines requested at once wait
// for each other and delay everything behind them. A stretch is a contiguous range of memory; the reader is the code
// that reads while memory is prefetched. `kElsewhere` means that what is prefetched does not depend on what the reader
// reads meanwhile, and in which order.
#pragma once

#include <algorithm>

namespace antiphon {

// Prefetches what is read next, anywhere in memory: `lines` cache lines per call, first those from `from` on, then
// `parts` stretches that begin `distance` bytes apart.
class Ahead {
 public:
  static constexpr bool kElsewhere = true;

  Ahead() = default;
  Ahead(const void* from, long bytes, long lines, const void* then = nullptr, long then_bytes = 0, long parts = 1,
        long distance = 0)
      : next_((const char*)from), then_((const char*)then), left_(in_lines(bytes)), then_lines_(in_lines(then_bytes)),
        lines_(lines), parts_(then_bytes > 0 ? parts : 0), distance_(distance) {}

  inline void ask(const void* = nullptr) {
    if (!left_ && parts_) next_ = then_, left_ = then_lines_, then_ += distance_, parts_--;
    const long count = std::min(lines_, left_);
    for (long line = 0; line < count; line++) __builtin_prefetch(next_ + line * 64, 0, 2);
    next_ += count * 64;
    left_ -= count;
  }

 private:
  static long in_lines(long bytes) { return bytes > 0 ? (bytes + 63) / 64 : 0; }

  const char *next_ = nullptr, *then_ = nullptr;
  long left_ = 0, then_lines_ = 0, lines_ = 0, parts_ = 0, distance_ = 0;
};

// Prefetches one stretch, `kLines` cache lines per call. At its end the last lines are repeated: nothing is decided,
// because a decision costs products of few rows more than a prefetch.
template <long kLines>
class Steady {
 public:
  static constexpr bool kElsewhere = true;

  Steady(const void* from, long bytes) : next_((const char*)from), last_(next_ + std::max(bytes - kLines * 64, 0L)) {}

  inline void ask(const void* = nullptr) {
    for (long line = 0; line < kLines; line++) __builtin_prefetch(next_ + line * 64, 0, 2);
    next_ = std::min(next_ + kLines * 64, last_);
  }

 private:
  const char *next_, *const last_;
};

// Calls `work` with an object that prefetches a stretch in so many calls: at least two lines per call, and at most
// `kMost`.
template <long kMost, class Work>
void ask_in_calls(long calls, const void* from, long bytes, Work&& work) {
  if constexpr (kMost > 2)
    if (bytes / 64 <= calls * (kMost / 2)) return ask_in_calls<kMost / 2>(calls, from, bytes, work);
  work(Steady<kMost>(from, bytes));
}

// Prefetches what the reader reads next: stretches one after the other, or two of them side by side, as fast as they
// are read, `kStep` bytes of each per call.
class Along {
 public:
  static constexpr long kStep = 256;
  static constexpr long kParts = 12;

  // Adds a stretch; there can be `kParts`. With `between`, another stretch that begins so many bytes after it is read
  // beside it.
  void add(const void* first, long bytes, long between = 0) { parts_[count_++] = {(const char*)first, bytes, between}; }
  // Marks so many bytes of the first stretch as prefetched.
  void skip(long bytes) { go_on(bytes); }

  inline void ask() {
    if (at_ == count_) return;
    const Part& part = parts_[at_];
    step(part.first + place_);
    if (part.between) step(part.first + part.between + place_);
    go_on(kStep);
  }

 private:
  struct Part {
    const char* first;
    long bytes, between;
  };

  static inline void step(const char* from) {
    for (long line = 0; line < kStep; line += 64) __builtin_prefetch(from + line, 0, 2);
  }

  void go_on(long bytes) {
    place_ += bytes;
    if (place_ >= parts_[at_].bytes) at_++, place_ = 0;
  }

  Part parts_[kParts];
  long count_ = 0, at_ = 0, place_ = 0;
};

// What a product prefetches in the background for operations that follow it: nothing. For something else see lora.h.
// `begin` is called before panels [first, end) are multiplied with rows [row, row_end), in so many steps, and `step` of
// what it returns in each of them.
struct NoBackground {
  struct Task {
    void step() {}
  };
  Task begin(long, long, long, long, long) const { return {}; }
};

// Prefetches the stretch that is being read, `kBytes` per call, a little ahead of the reader. The processor's own
// prefetching continues from there, and stops if only some of the lines are prefetched. What is read after `end` begins
// at `next`.
template <long kBytes>
class Onward {
 public:
  static constexpr bool kElsewhere = false;

  Onward(const void* end, const void* next) : end_((const char*)end), next_((const char*)next) {}

  inline void ask(const void* at) {
    const char* from = (const char*)at + kAway;
    if (from >= end_) from = next_ + (from - end_);
    for (long line = 0; line < kBytes; line += 64) __builtin_prefetch(from + line, 0, 2);
  }

 private:
#if defined(__AVX2__) && !defined(__AVX512F__)
  static constexpr long kAway = 2 << 10;
#else
  static constexpr long kAway = 3 << 10;
#endif

  const char *const end_, *const next_;
};

}  // namespace antiphon
