// Asking for memory before it is needed, evenly on the way through something else: many lines at once have to wait for
// each other, and with them everything behind. Where `kElsewhere`, what is asked for does not depend on what the reader
// reads meanwhile, and in which order.
#pragma once

#include <algorithm>

namespace antiphon {

// What is read next, wherever that is: `lines` cache lines at a time, first those from `from` on, then `parts`
// stretches of which one begins `distance` bytes after the other.
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

// One stretch, `kLines` of it at a time and the last ones again where more is asked for than there is: nothing is
// decided on the way, for that costs products of few rows more than asking does.
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

// Calls `work` with what asks for a stretch in that many calls: at least two lines at a time, and at most `kMost`.
template <long kMost, class Work>
void ask_in_calls(long calls, const void* from, long bytes, Work&& work) {
  if constexpr (kMost > 2)
    if (bytes / 64 <= calls * (kMost / 2)) return ask_in_calls<kMost / 2>(calls, from, bytes, work);
  work(Steady<kMost>(from, bytes));
}

// What is read next on the reader's own way: stretches one after the other, or two of them side by side. Asked for as
// fast as they are read, `kStep` bytes of each at a time.
class Along {
 public:
  static constexpr long kStep = 256;
  static constexpr long kParts = 12;

  // A stretch, one of at most `kParts`; with `between`, another one so many bytes after it is read beside it.
  void add(const void* first, long bytes, long between = 0) { parts_[count_++] = {(const char*)first, bytes, between}; }
  // So much of the first stretch has been asked for.
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

// The stretch that is being read, `kBytes` of it at a time, a little ahead of where the reader is: the processor's own
// fetching goes on from there, and stops where only some of the lines are asked for. What is read after `end` begins at
// `next`.
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
