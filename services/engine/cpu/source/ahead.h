// Asking for memory before it is needed, evenly on the way through something else.
#pragma once

#include <algorithm>

namespace antiphon {

// Memory that is asked for on the way through something else: `lines` cache lines for every 32 terms, first those from
// `from` on, then `parts` stretches of which one begins `distance` bytes after the other.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const void* from, long bytes, long lines, const void* then = nullptr, long then_bytes = 0, long parts = 1,
        long distance = 0)
      : next_((const char*)from), then_((const char*)then), left_(in_lines(bytes)), then_lines_(in_lines(then_bytes)),
        lines_(lines), parts_(then_bytes > 0 ? parts : 0), distance_(distance) {}

  inline void ask() {
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

}  // namespace antiphon
