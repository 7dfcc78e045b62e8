// A weight matrix packed for reading in one stream, and the product of rows with it.
//
//     y[m][n] = sum over k of x[m][k] * w[n][k]
//
// Columns lie in panels of 32, each [terms / kTerms][32][kTerms] (see pair.h), `terms` being the input's width padded
// with zeros. A sum runs over the terms in their order whatever the number of rows, however rows and terms are cut up:
// a row's result does not depend on the rows beside it.
#pragma once

#include <unistd.h>

#include <algorithm>

#include "ahead.h"
#include "pair.h"
#include "pool.h"
#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

namespace antiphon {

constexpr long kPanel = 32;
constexpr long kTermsMultiple = 32;
constexpr long kBlockRows = 32;
// A core's own cache; what is common where the system does not say.
inline long cache_bytes() {
  static const long found = sysconf(_SC_LEVEL2_CACHE_SIZE), bytes = found > 0 ? found : 1L << 20;
  return bytes;
}
// Rows that go through all panels together, and the bytes of them that stay in a core's own cache meanwhile.
constexpr long kPassRows = 288;
inline long pass_bytes() { return std::max(cache_bytes() / 4, 256L << 10); }
// The bytes of it that what a thread needs for its own rows may take.
inline long own_bytes() { return cache_bytes() / 10 * 9; }
// Bytes of rows that stay in a cache while panels go past them: in the innermost one, but tiles take them from the next
// one as fast, and reading panels in long stretches is worth more. And the terms of a panel that stay in the innermost
// cache while rows go past it (tiles can ask for rows not to be kept there).
#if defined(__AMX_BF16__)
constexpr long kFewBytes = 400 << 10, kPieceTerms = 448;
#else
constexpr long kFewBytes = 24 << 10, kPieceTerms = 256;
#endif
// Weights that a thread takes at a time.
constexpr long kPortionBytes = 256 << 10;
// Far enough ahead to hide the memory's latency.
constexpr long kPrefetchBytes = 8 << 10;

#if defined(__AVX512F__)
constexpr int kRegisterRows = 12;
#else
constexpr int kRegisterRows = 3;
#endif

inline long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

// What each of as few parts takes as there must be if none may take more than `most`, a multiple of 32: all alike but
// for the last one, and whole groups of 32.
inline long even_part(long count, long most) {
  const long parts = (count + most - 1) / most;
  return round_up((count + parts - 1) / parts, kTermsMultiple);
}

template <class T>
struct Matrix {
  long out = 0, in = 0, terms = 0, panels = 0;
  const T* data = nullptr;
  const float* bias = nullptr;  // as many as the panels have columns, or null

  const T* panel(long index) const { return data + index * terms * kPanel; }
  explicit operator bool() const { return data != nullptr; }
};

// Rows of an activation. `stride` counts elements and leaves room for the terms' padding, which is zero.
template <class T>
struct Rows {
  T* data = nullptr;
  long stride = 0;

  T* row(long index) const { return data + index * stride; }
  Rows from(long first) const { return {row(first), stride}; }
};

// A stride that does not put one row's bytes into the cache lines of the next.
template <class T>
long row_stride(long width) {
  return round_up(width, kTermsMultiple) + kTermsMultiple;
}

// Which of the two stays in the innermost cache: what is loaded of the other makes no room for itself there.
enum class Stays { rows, panel };

template <class T, int kRows>
inline void multiply_rows(const T* x, long stride, const T* panel, long terms, float* sums, bool resume, Ahead& ahead) {
  using P = Pair<T>;
  Vec acc[kRows][2] = {};
  if (resume)
    for (int r = 0; r < kRows; r++)
      for (int half = 0; half < 2; half++) acc[r][half] = load(sums + r * kPanel + half * kLanes);
  for (long group = 0; group < terms; group += kTermsMultiple) {
    ahead.ask();
    for (long k = group; k < group + kTermsMultiple; k += P::kTerms) {
      const T* w = panel + k * kPanel;
      const auto left = P::word(w), right = P::word(w + kLanes * P::kTerms);
      for (int r = 0; r < kRows; r++) {
        const auto spread = P::spread(x + r * stride + k);
        acc[r][0] = P::add(acc[r][0], spread, left);
        acc[r][1] = P::add(acc[r][1], spread, right);
      }
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int half = 0; half < 2; half++) store(sums + r * kPanel + half * kLanes, acc[r][half]);
}

template <class T, int kRows = kRegisterRows>
void multiply_some(long rows, const T* x, long stride, const T* panel, long terms, float* sums, bool resume,
                   Ahead& ahead) {
  if (rows >= kRows) return multiply_rows<T, kRows>(x, stride, panel, terms, sums, resume, ahead);
  if constexpr (kRows > 1) multiply_some<T, kRows - 1>(rows, x, stride, panel, terms, sums, resume, ahead);
}

// Up to kBlockRows rows times a panel, or a part of its terms: sums [rows][32], continued where `resume` says so.
template <class T>
struct Block {
  template <Stays>
  static void multiply(long rows, const T* x, long stride, const T* panel, long terms, float* sums, bool resume,
                       Ahead& ahead) {
    // Even shares: eleven rows and one cost more than six and six.
    long first = 0;
    for (long left = (rows + kRegisterRows - 1) / kRegisterRows; left; left--) {
      const long count = (rows - first + left - 1) / left;
      multiply_some<T>(count, x + first * stride, stride, panel, terms, sums + first * kPanel, resume, ahead);
      first += count;
    }
  }
};

#if defined(__AMX_BF16__)
// Loads of rows (tiles 4 and 5) and of pairs (6 and 7). A tile's number has to stand in the text.
template <bool kStays>
inline void load_rows(const Bf16* from, long bytes) {
  if constexpr (kStays)
    _tile_loadd(4, from, bytes);
  else
    _tile_stream_loadd(4, from, bytes);
}

template <bool kStays>
inline void load_rows_below(const Bf16* from, long bytes) {
  if constexpr (kStays)
    _tile_loadd(5, from, bytes);
  else
    _tile_stream_loadd(5, from, bytes);
}

template <bool kStays>
inline void load_left(const Bf16* panel) {
  if constexpr (kStays)
    _tile_loadd(6, panel, 128);
  else
    _tile_stream_loadd(6, panel, 128);
}

template <bool kStays>
inline void load_right(const Bf16* panel) {
  if constexpr (kStays)
    _tile_loadd(7, panel + kTileTerms, 128);
  else
    _tile_stream_loadd(7, panel + kTileTerms, 128);
}

template <Stays kStays, bool kBoth>
inline void multiply_tiles(const Bf16* x, long stride, const Bf16* panel, long terms, Ahead& ahead) {
  constexpr bool kRowsStay = kStays == Stays::rows;
  const long bytes = stride * (long)sizeof(Bf16);
  const Bf16* below = x + kTileRows * stride;
  for (long k = 0; k < terms; k += kTileTerms) {
    const Bf16* w = panel + k * kPanel;
    ahead.ask();
    load_rows<kRowsStay>(x + k, bytes);
    load_left<!kRowsStay>(w);
    _tile_dpbf16ps(0, 4, 6);
    load_right<!kRowsStay>(w);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kBoth) {
      load_rows_below<kRowsStay>(below + k, bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

template <bool kBoth>
inline void load_sums(const float* sums, bool resume) {
  if (!resume) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  _tile_loadd(0, sums, kPanel * 4);
  _tile_loadd(1, sums + kLanes, kPanel * 4);
  if constexpr (kBoth) {
    _tile_loadd(2, sums + kTileRows * kPanel, kPanel * 4);
    _tile_loadd(3, sums + kTileRows * kPanel + kLanes, kPanel * 4);
  }
}

template <bool kBoth>
inline void store_sums(float* sums) {
  _tile_stored(0, sums, kPanel * 4);
  _tile_stored(1, sums + kLanes, kPanel * 4);
  if constexpr (kBoth) {
    _tile_stored(2, sums + kTileRows * kPanel, kPanel * 4);
    _tile_stored(3, sums + kTileRows * kPanel + kLanes, kPanel * 4);
  }
}

// The configuration of the tiles must be that of the rows.
template <>
struct Block<Bf16> {
  template <Stays kStays>
  static void multiply(long rows, const Bf16* x, long stride, const Bf16* panel, long terms, float* sums, bool resume,
                       Ahead& ahead) {
    if (rows > kTileRows)
      pass<kStays, true>(x, stride, panel, terms, sums, resume, ahead);
    else
      pass<kStays, false>(x, stride, panel, terms, sums, resume, ahead);
  }

 private:
  template <Stays kStays, bool kBoth>
  static void pass(const Bf16* x, long stride, const Bf16* panel, long terms, float* sums, bool resume, Ahead& ahead) {
    publish_stores();
    load_sums<kBoth>(sums, resume);
    multiply_tiles<kStays, kBoth>(x, stride, panel, terms, ahead);
    store_sums<kBoth>(sums);
  }
};
#endif

// Sets the tiles up for blocks of so many rows, where there are tiles.
template <class T>
struct BlockShape {
  explicit BlockShape(long rows) : rows_(rows) {}
  void use() const {
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) == sizeof(Bf16))
      TileShape(std::min(rows_, kTileRows), std::max(rows_ - kTileRows, 0L)).use();
#endif
  }

 private:
  long rows_;
};

// Up to kBlockRows rows times panels [first, end), which come from memory once. Where not all of the rows' terms stay
// in the innermost cache, a few panels take turns with each piece of them.
template <class T, class Finish>
void multiply_few(long rows, const T* x, long stride, const Matrix<T>& w, long first, long end, Finish&& finish) {
  constexpr long kTogether = 4, kSize = (long)sizeof(T) * kPanel;
  alignas(64) float sums[kTogether][kBlockRows * kPanel];
  const long piece = std::max(kFewBytes / (rows * (long)sizeof(T)) / kTermsMultiple * kTermsMultiple, kTermsMultiple);
  BlockShape<T>(rows).use();
  for (long group = first; group < end; group += kTogether)
    for (long k = 0; k < w.terms; k += piece) {
      const long count = std::min(piece, w.terms - k), last = std::min(group + kTogether, end);
      for (long p = group; p < last; p++) {
        const T* panel = w.panel(p) + k * kPanel;
        const T* next = p + 1 < last          ? panel + w.terms * kPanel
                        : k + count < w.terms ? w.panel(group) + (k + count) * kPanel
                                              : w.panel(last);
        Ahead ahead((const char*)panel + kPrefetchBytes, count * kSize - kPrefetchBytes, kTermsMultiple * kSize / 64,
                    next, std::min(kPrefetchBytes, count * kSize));
        float* own = sums[p - group];
        Block<T>::template multiply<Stays::rows>(rows, x + k, stride, panel, count, own, k > 0, ahead);
        if (k + count == w.terms)
          for (long r = 0; r < rows; r++) finish(r, p, own + r * kPanel);
      }
    }
}

// A part of a panel's terms, and what is read after it.
template <class T>
struct PanelPart {
  const T* data;
  long terms, panel;
  const T* next;
  bool resume, last;  // sums go on from what was kept; they are complete after this
};

// Up to kPassRows rows times panels, one after the other. A panel goes through the innermost cache in pieces, each past
// all rows. `finish(row, panel, sums)` takes each row's 32 sums where they are complete.
template <class T, class Finish>
class Pass {
 public:
  Pass(long rows, const T* x, long stride, Finish& finish)
      : rows_(rows), stride_(stride), x_(x), blocks_((rows + kBlockRows - 1) / kBlockRows), whole_(kBlockRows),
        odd_(rows - (blocks_ - 1) * kBlockRows), finish_(finish) {}

  // `kept` [rows][32] has the sums that are not complete, or is null.
  void multiply(const PanelPart<T>& part, float* kept) {
    const long piece = even_part(part.terms, kPieceTerms);
    for (long k = 0; k < part.terms; k += piece) {
      const long count = std::min(piece, part.terms - k), bytes = piece * kPanel * (long)sizeof(T);
      const bool ends = k + count == part.terms;
      Ahead ahead(ends ? part.next : part.data + (k + count) * kPanel, bytes,
                  bytes / 64 / (blocks_ * (count / kTermsMultiple)) + 1);
      for (long first = 0; first < rows_; first += kBlockRows) {
        const long some = std::min(kBlockRows, rows_ - first);
        shape(some == kBlockRows);
        float* sums = (kept ? kept : sums_) + first * kPanel;
        Block<T>::template multiply<Stays::panel>(some, x_ + first * stride_ + k, stride_, part.data + k * kPanel,
                                                  count, sums, part.resume || k > 0, ahead);
        if (ends && part.last)
          for (long r = 0; r < some; r++) finish_(first + r, part.panel, sums + r * kPanel);
      }
    }
  }

 private:
  // Setting tiles up takes as long as several products.
  void shape(bool whole) {
    if (shaped_ && whole == shaped_whole_) return;
    (whole ? whole_ : odd_).use();
    shaped_ = true, shaped_whole_ = whole;
  }

  const long rows_, stride_;
  const T* const x_;
  const long blocks_;
  const BlockShape<T> whole_, odd_;
  Finish& finish_;
  bool shaped_ = false, shaped_whole_ = false;
  alignas(64) float sums_[kPassRows * kPanel];
};

// The terms that go through all panels at once: as many as let the rows stay in a core's cache.
inline long terms_at_once(long rows, long terms, long size) {
  return even_part(terms, std::max(pass_bytes() / (rows * size) / kTermsMultiple, 1L) * kTermsMultiple);
}

// Floats that `multiply` needs to keep sums of parts in.
template <class T>
long kept_size(long rows, const Matrix<T>& w) {
  if (rows <= kBlockRows) return 0;
  return terms_at_once(even_part(rows, kPassRows), w.terms, sizeof(T)) < w.terms ? w.panels * kPassRows * kPanel : 0;
}

// All rows times all panels, shared out. `finish(row, panel, sums)` gets 32 sums without bias, for each row and panel
// once, on any thread. `kept`: see `kept_size`.
template <class T, class Finish>
void multiply(Pool& pool, const Matrix<T>& w, Rows<T> x, long rows, float* kept, Finish&& finish) {
  if (rows <= kBlockRows) {
    const long portion =
        std::max(1L, std::min(kPortionBytes / (w.terms * kPanel * (long)sizeof(T)), w.panels / (4 * pool.threads())));
    return pool.share(w.panels, portion,
                      [&](long first, long end) { multiply_few(rows, x.data, x.stride, w, first, end, finish); });
  }
  const long most = even_part(rows, kPassRows);
  for (long start = 0; start < rows; start += most) {
    const long count = std::min(most, rows - start), step = terms_at_once(most, w.terms, sizeof(T));
    const auto finish_row = [&](long row, long panel, const float* sums) { finish(start + row, panel, sums); };
    for (long k = 0; k < w.terms; k += step) {
      const long terms = std::min(step, w.terms - k), bytes = terms * kPanel * (long)sizeof(T);
      const long portion = std::max(1L, std::min(kPortionBytes / bytes, w.panels / (4 * pool.threads())));
      pool.share(w.panels, portion, [&](long first, long end) {
        Pass<T, decltype(finish_row)> pass(count, x.row(start) + k, x.stride, finish_row);
        for (long p = first; p < end; p++)
          pass.multiply({w.panel(p) + k * kPanel, terms, p, w.panel(p + 1) + k * kPanel, k > 0, k + terms == w.terms},
                        step < w.terms ? kept + p * kPassRows * kPanel : nullptr);
      });
    }
  }
}

}  // namespace antiphon
