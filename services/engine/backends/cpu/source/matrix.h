// A weight matrix, packed for reading in one stream, and the product of rows with it.
//
//     y[m][n] = sum over k of x[m][k] * w[n][k]
//
// A term is one k of this sum. Columns n are stored in panels of 32, each [terms / 32][2][32 / kTerms][16][kTerms] (see
// pair.h), where `terms` is the input's width padded with zeros. So what a tile loads is contiguous, and everything is
// read in the order in which it is stored. A sum runs over the terms in their order for any number of rows, however
// rows and terms are divided: a row's result does not depend on the rows beside it.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <type_traits>

#include "block.h"
#include "pool.h"

namespace antiphon {

// Returns the size of a core's L2 cache; 1 MiB where the system does not say.
inline long cache_bytes() {
  static const long found = sysconf(_SC_LEVEL2_CACHE_SIZE), bytes = found > 0 ? found : 1L << 20;
  return bytes;
}
// kPassRows: how many rows are multiplied with all panels together; pass_bytes: how many bytes of these rows stay in a
// core's L2 cache meanwhile. Without tiles and wide vectors, memory is fast enough for fewer rows at a time. kOwnRows:
// the maximum of a thread's own rows (see by_rows.h). It is larger, because what else these rows need is in the cache
// anyway, and weights are read less often.
constexpr long kPassRows = kRegisterHalves == 1 ? 96 : 288, kOwnRows = 320;
inline long pass_bytes() { return std::max(cache_bytes() / 4, 256L << 10); }
// How many rows are multiplied with a piece of a panel in one call. Tiles take no more than a block; without wide
// vectors, groups of a few rows are fuller if all rows are divided at once.
constexpr long kCallRows = kRegisterHalves == 1 ? kOwnRows : kBlockRows;
// What stays in the L1 cache. kFewBytes: bytes of few rows while panels are multiplied with them (tiles load rows from
// the L2 cache as fast, and reading panels in long stretches is worth more). kFewTerms: the terms of a panel that such
// rows take at a time if they form several groups, one after the other. kPieceTerms: the terms that more rows take at a
// time (tile loads can ask for rows not to be kept).
#if defined(__AMX_BF16__)
constexpr long kFewBytes = 400 << 10, kFewTerms = 1L << 40, kPieceTerms = 448;
#elif defined(__AVX512F__)
constexpr long kFewBytes = 24 << 10, kFewTerms = 1L << 40, kPieceTerms = 256;
#else
constexpr long kFewBytes = 16 << 10, kFewTerms = 128, kPieceTerms = 256;
#endif
// The maximum number of cache lines of a panel that are prefetched at once: enough if two groups of rows or two blocks
// of tiles are multiplied with the panel; with one, only part of the next panel is prefetched.
template <class T>
constexpr long kMostLines = 4 * (long)sizeof(T);
// Bytes of weights that a thread takes at a time.
constexpr long kPortionBytes = 256 << 10;

inline long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

// Returns the size of a part if `count` is divided into as few parts as possible of at most `most`, a multiple of 32:
// all parts are alike except for the last one, and whole groups of 32.
inline long even_part(long count, long most) {
  const long parts = (count + most - 1) / most;
  return round_up((count + parts - 1) / parts, kTermsMultiple);
}

template <class T>
struct Matrix {
  long out = 0, in = 0, terms = 0, panels = 0;
  const T* data = nullptr;
  const float* bias = nullptr;  // one for each column of the panels, or null

  const T* panel(long index) const { return data + index * terms * kPanel; }
  // Returns where in a panel the numbers of one half's 16 columns and kTerms terms from `k` on are.
  static long place(long k, long half) {
    return k / kTermsMultiple * kTermsMultiple * kPanel + half * kTermsMultiple * kLanes + k % kTermsMultiple * kLanes;
  }
  explicit operator bool() const { return data != nullptr; }
};

// Rows of an activation. `stride` counts elements and includes the padding of the terms, which is zero.
template <class T>
struct Rows {
  T* data = nullptr;
  long stride = 0;

  T* row(long index) const { return data + index * stride; }
  Rows from(long first) const { return {row(first), stride}; }
};
// Rows that are multiplied with a matrix of such numbers.
template <class T>
using Inputs = Rows<TermOf<T>>;

// Returns a stride with which a row's bytes do not fall into the same cache lines as those of the next row.
template <class T>
long row_stride(long width) {
  return round_up(width, kTermsMultiple) + kTermsMultiple;
}

// Returns the maximum number of panels that are multiplied side by side with so many rows.
constexpr long beside_max(long rows) { return std::max(std::min(kSideBySide, kSumsBeside / rows), 1L); }

// Calls `work` with `number`, at most kMost, as a compile-time constant.
template <long kMost, class Work>
void with_number(long number, Work&& work) {
  if constexpr (kMost > 1)
    if (number < kMost) return with_number<kMost - 1>(number, work);
  work(std::integral_constant<long, kMost>());
}

// Multiplies some terms of rows by `kPanels` panels; see `multiply_side_by_side`.
template <class T, long kPanels>
void multiply_beside(long rows, const TermOf<T>* x, long stride, const T* panel, const T* next, long distance,
                     long terms, float* sums, bool resume) {
  with_number<kSumsBeside / kPanels>(rows, [&](auto count) {
    multiply_side_by_side<T, count, kPanels>(x, stride, panel, next, distance, terms, sums, resume);
  });
}

// Multiplies some terms of up to kBlockRows rows by one panel; `next` is what is read after it.
template <class T, class Task>
void multiply_lone(long rows, const TermOf<T>* x, long stride, const T* panel, const T* next, long terms, float* sums,
                   bool resume, Task& task) {
  constexpr long kSize = (long)sizeof(T) * kPanel;
  const auto multiply = [&](auto ahead) {
    Block<T>::template multiply<Stays::rows, Halves::apart>(rows, x, stride, panel, terms, sums, resume, ahead, task);
  };
  if (Block<T>::once(rows))
    multiply(Onward<kTermsMultiple * kSize / kOnwardAsks>(panel + terms * kPanel, next));
  else
    ask_in_calls<kMostLines<T>>(Block<T>::asks(rows, terms), next, terms * kSize, multiply);
}

// Returns how many terms up to kBlockRows rows take at a time, of a few panels in turn.
template <class T>
long few_terms(long rows) {
  const long held = kFewBytes / (rows * (long)sizeof(TermOf<T>));
  const long most = Block<T>::once(rows) ? held : std::min(held, kFewTerms);
  return std::max(most / kTermsMultiple, 1L) * kTermsMultiple;
}

// Multiplies up to kBlockRows rows by panels [first, end), each of which is read from memory once. If not all of the
// rows' terms fit into the L1 cache, a few panels take turns with each piece of the terms.
template <class T, class Finish, class Background = NoBackground>
void multiply_few(long rows, const TermOf<T>* x, long stride, const Matrix<T>& w, long first, long end,
                  Finish&& finish, const Background& background = {}) {
  constexpr long kTogether = 4;
  static_assert(kTogether >= kSideBySide, "panels that go side by side are in one group");
  alignas(64) float sums[kTogether][kBlockRows * kPanel];
  const long piece = few_terms<T>(rows);
  BlockShape<T>(rows).use();
  const long pieces = (w.terms + piece - 1) / piece;
  for (long group = first; group < end; group += kTogether) {
    const long last = std::min(group + kTogether, end);
    auto task = background.begin(0, rows, group, last, Block<T>::groups(rows) * pieces * (last - group));
    for (long k = 0; k < w.terms; k += piece) {
      const long count = std::min(piece, w.terms - k);
      const bool ends = k + count == w.terms;
      for (long p = group, some; p < last; p += some) {
        some = std::min(beside_max(rows), last - p);
        const T* panel = w.panel(p) + k * kPanel;
        const T* next = p + some < last ? panel + some * w.terms * kPanel
                        : ends          ? w.panel(last)
                                        : w.panel(group) + (k + count) * kPanel;
        float* own = sums[p - group];
        with_number<kSideBySide>(some, [&](auto panels) {
          if constexpr (panels > 1)
            multiply_beside<T, panels>(rows, x + k, stride, panel, next, w.terms * kPanel, count, own, k > 0);
          else
            multiply_lone(rows, x + k, stride, panel, next, count, own, k > 0, task);
        });
        for (long i = p; ends && i < p + some; i++)
          for (long r = 0; r < rows; r++) finish(r, i, sums[i - group] + r * kPanel);
      }
    }
  }
}

// A part of a panel's terms, and what is read after it.
template <class T>
struct PanelPart {
  const T* data;
  long terms, panel;
  const T* next;
  bool resume, last;  // resume: continue the kept sums; last: the sums are complete after this part
};

// Multiplies up to kOwnRows rows by panels, one after the other. A panel is read into the L1 cache in pieces, each of
// which is multiplied with all rows. `finish(row, panel, sums)` gets each row's 32 sums when they are complete.
template <class T, class Finish>
class Pass {
 public:
  Pass(long rows, const TermOf<T>* x, long stride, Finish& finish)
      : rows_(rows), stride_(stride), x_(x), blocks_((rows + kCallRows - 1) / kCallRows), whole_(kCallRows),
        odd_(rows - (blocks_ - 1) * kCallRows), finish_(finish) {}

  // Returns the number of steps of `multiply` with so many terms of a panel.
  long steps(long terms) const {
    const long piece = even_part(terms, kPieceTerms), last = rows_ - (blocks_ - 1) * kCallRows;
    return ((blocks_ - 1) * Block<T>::groups(kCallRows) + Block<T>::groups(last)) * ((terms + piece - 1) / piece);
  }

  // `kept` [rows][32] holds the sums that are not complete, or is null.
  template <class Task = NoBackground::Task>
  void multiply(const PanelPart<T>& part, float* kept, Task&& task = {}) {
    const long piece = even_part(part.terms, kPieceTerms);
    for (long k = 0; k < part.terms; k += piece) {
      const long count = std::min(piece, part.terms - k), bytes = piece * kPanel * (long)sizeof(T);
      const bool ends = k + count == part.terms;
      ask_in_calls<kMostLines<T>>(Block<T>::asks(rows_, count), ends ? part.next : part.data + (k + count) * kPanel,
                                  bytes, [&](auto ahead) { multiply_piece(part, k, count, kept, ahead, task); });
    }
  }

 private:
  // Multiplies terms [k, k + count) of a part.
  template <class Asker, class Task>
  void multiply_piece(const PanelPart<T>& part, long k, long count, float* kept, Asker& ahead, Task& task) {
    for (long first = 0; first < rows_; first += kCallRows) {
      const long some = std::min(kCallRows, rows_ - first);
      shape(some == kCallRows);
      float* sums = (kept ? kept : sums_) + first * kPanel;
      Block<T>::template multiply<Stays::panel, Halves::apart>(
          some, x_ + first * stride_ + k, stride_, part.data + k * kPanel, count, sums, part.resume || k > 0, ahead,
          task);
      if (part.last && k + count == part.terms)
        for (long r = 0; r < some; r++) finish_(first + r, part.panel, sums + r * kPanel);
    }
  }

  // Configures the tiles only if their rows change: that takes as long as several products.
  void shape(bool whole) {
    if (shaped_ && whole == shaped_whole_) return;
    (whole ? whole_ : odd_).use();
    shaped_ = true, shaped_whole_ = whole;
  }

  const long rows_, stride_;
  const TermOf<T>* const x_;
  const long blocks_;
  const BlockShape<T> whole_, odd_;
  Finish& finish_;
  bool shaped_ = false, shaped_whole_ = false;
  alignas(64) float sums_[kOwnRows * kPanel];
};

// Returns how many terms are multiplied with all panels at once: as many as let the rows stay in a core's L2 cache.
inline long terms_at_once(long rows, long terms, long size) {
  return even_part(terms, std::max(pass_bytes() / (rows * size) / kTermsMultiple, 1L) * kTermsMultiple);
}

// Returns the number of floats that `multiply` needs for partial sums.
template <class T>
long kept_size(long rows, const Matrix<T>& w) {
  if (rows <= kBlockRows) return 0;
  return terms_at_once(even_part(rows, kPassRows), w.terms, sizeof(TermOf<T>)) < w.terms ? w.panels * kPassRows * kPanel
                                                                                         : 0;
}

// Multiplies all rows by all panels, shared among the threads. `finish(row, panel, sums)` gets 32 sums without bias,
// once for each row and panel, on any thread. `kept` has `kept_size` floats.
template <class T, class Finish, class Background = NoBackground>
void multiply(Pool& pool, const Matrix<T>& w, Inputs<T> x, long rows, float* kept, Finish&& finish,
              const Background& background = {}) {
  if (rows <= kBlockRows) {
    const long portion =
        std::max(1L, std::min(kPortionBytes / (w.terms * kPanel * (long)sizeof(T)), w.panels / (4 * pool.threads())));
    return pool.share(w.panels, portion, beside_max(rows), [&](long first, long end) {
      multiply_few(rows, x.data, x.stride, w, first, end, finish, background);
    });
  }
  const long most = even_part(rows, kPassRows);
  for (long start = 0; start < rows; start += most) {
    const long count = std::min(most, rows - start), step = terms_at_once(most, w.terms, sizeof(TermOf<T>));
    const auto finish_row = [&](long row, long panel, const float* sums) { finish(start + row, panel, sums); };
    for (long k = 0; k < w.terms; k += step) {
      const long terms = std::min(step, w.terms - k), bytes = terms * kPanel * (long)sizeof(T);
      const long portion = std::max(1L, std::min(kPortionBytes / bytes, w.panels / (4 * pool.threads())));
      pool.share(w.panels, portion, [&](long first, long end) {
        Pass<T, decltype(finish_row)> pass(count, x.row(start) + k, x.stride, finish_row);
        for (long p = first; p < end; p++) {
          auto task = background.begin(start, start + count, p, k + terms == w.terms ? p + 1 : p, pass.steps(terms));
          pass.multiply({w.panel(p) + k * kPanel, terms, p, w.panel(p + 1) + k * kPanel, k > 0, k + terms == w.terms},
                        step < w.terms ? kept + p * kPassRows * kPanel : nullptr, task);
        }
      });
    }
  }
}

}  // namespace antiphon
