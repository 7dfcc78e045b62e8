// A weight matrix packed for reading in one stream, and the product of rows with it.
//
//     y[m][n] = sum over k of x[m][k] * w[n][k]
//
// Columns lie in panels of 32, each [terms / kTerms][32][kTerms] (see pair.h), `terms` being the input's width padded
// with zeros. A sum runs over the terms in their order whatever the number of rows, however rows and terms are cut up:
// a row's result does not depend on the rows beside it.
#pragma once

#include <algorithm>

#include "pair.h"
#include "pool.h"
#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

namespace antiphon {

constexpr long kPanel = 32;
constexpr long kTermsMultiple = 32;
constexpr long kBlockRows = 32;
// Rows that go through all panels together, and the bytes of them that stay in a core's own cache meanwhile.
constexpr long kPassRows = 512;
constexpr long kPassBytes = 1 << 20;
// Weights that a thread takes at a time.
constexpr long kPortionBytes = 128 << 10;
// Far enough ahead to hide the memory's latency.
constexpr long kPrefetchBytes = 8 << 10;

#if defined(__AVX512F__)
constexpr int kRegisterRows = 12;
#else
constexpr int kRegisterRows = 3;
#endif

inline long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

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
};

// A stride that does not put one row's bytes into the cache lines of the next.
template <class T>
long row_stride(long width) {
  return round_up(width, kTermsMultiple) + kTermsMultiple;
}

// `kStream`: the panel comes from memory, once; otherwise a cache has it.
template <class T, bool kStream, int kRows>
inline void multiply_rows(const T* x, long stride, const T* panel, long terms, float* sums, bool resume) {
  using P = Pair<T>;
  Vec acc[kRows][2] = {};
  if (resume)
    for (int r = 0; r < kRows; r++)
      for (int half = 0; half < 2; half++) acc[r][half] = load(sums + r * kPanel + half * kLanes);
  for (long k = 0; k < terms; k += P::kTerms) {
    const T* w = panel + k * kPanel;
    if constexpr (kStream) {
      __builtin_prefetch((const char*)w + kPrefetchBytes);
      __builtin_prefetch((const char*)w + kPrefetchBytes + 64);
    }
    const auto left = P::word(w), right = P::word(w + kLanes * P::kTerms);
    for (int r = 0; r < kRows; r++) {
      const auto spread = P::spread(x + r * stride + k);
      acc[r][0] = P::add(acc[r][0], spread, left);
      acc[r][1] = P::add(acc[r][1], spread, right);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int half = 0; half < 2; half++) store(sums + r * kPanel + half * kLanes, acc[r][half]);
}

template <class T, bool kStream, int kRows = kRegisterRows>
void multiply_some(long rows, const T* x, long stride, const T* panel, long terms, float* sums, bool resume) {
  if (rows >= kRows) return multiply_rows<T, kStream, kRows>(x, stride, panel, terms, sums, resume);
  if constexpr (kRows > 1) multiply_some<T, kStream, kRows - 1>(rows, x, stride, panel, terms, sums, resume);
}

// Up to kBlockRows rows times a panel, or a part of its terms: sums [rows][32], continued where `resume` says so.
template <class T, bool kStream>
struct Block {
  static void multiply(long rows, const T* x, long stride, const T* panel, long terms, float* sums, bool resume) {
    // Even shares: eleven rows and one cost more than six and six.
    long first = 0;
    for (long left = (rows + kRegisterRows - 1) / kRegisterRows; left; left--) {
      const long count = (rows - first + left - 1) / left;
      multiply_some<T, kStream>(count, x + first * stride, stride, panel, terms, sums + first * kPanel, resume);
      first += count;
    }
  }
};

#if defined(__AMX_BF16__)
template <bool kStream, bool kBoth>
inline void multiply_tiles(const Bf16* x, long stride, const Bf16* panel, long terms) {
  const long bytes = stride * (long)sizeof(Bf16);
  const Bf16* below = x + kTileRows * stride;
  for (long k = 0; k < terms; k += kTileTerms) {
    const Bf16* w = panel + k * kPanel;
    if constexpr (kStream)
      for (long line = 0; line < 32; line++) __builtin_prefetch((const char*)w + kPrefetchBytes + line * 64);
    _tile_loadd(4, x + k, bytes);
    _tile_loadd(6, w, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + 32, 128);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kBoth) {
      _tile_loadd(5, below + k, bytes);
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
template <bool kStream>
struct Block<Bf16, kStream> {
  static void multiply(long rows, const Bf16* x, long stride, const Bf16* panel, long terms, float* sums, bool resume) {
    if (rows > kTileRows)
      pass<true>(x, stride, panel, terms, sums, resume);
    else
      pass<false>(x, stride, panel, terms, sums, resume);
  }

 private:
  template <bool kBoth>
  static void pass(const Bf16* x, long stride, const Bf16* panel, long terms, float* sums, bool resume) {
    load_sums<kBoth>(sums, resume);
    multiply_tiles<kStream, kBoth>(x, stride, panel, terms);
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

// Up to kPassRows rows times a panel, or a part of its terms. `finish(row, sums)` takes each row's 32 sums where these
// are the `last` terms; otherwise `kept` [rows][32] keeps them for the next part.
template <class T, class Finish>
void multiply_panel(long rows, const T* x, long stride, const T* panel, long terms, float* kept, bool resume,
                    bool last, Finish&& finish) {
  alignas(64) float block[kBlockRows * kPanel];
  long shaped = 0;
  for (long first = 0; first < rows; first += kBlockRows) {
    const long count = std::min(kBlockRows, rows - first);
    if (count != shaped) BlockShape<T>(count).use();
    shaped = count;
    float* sums = kept ? kept + first * kPanel : block;
    if (first == 0)
      Block<T, true>::multiply(count, x, stride, panel, terms, sums, resume);
    else
      Block<T, false>::multiply(count, x + first * stride, stride, panel, terms, sums, resume);
    if (last)
      for (long r = 0; r < count; r++) finish(first + r, sums + r * kPanel);
  }
}

// The terms that go through all panels at once: as many as let the rows stay in a core's cache.
inline long terms_at_once(long rows, long terms, long size) {
  const long affordable = std::max(kPassBytes / (rows * size), kTermsMultiple);
  const long passes = (terms + affordable - 1) / affordable;
  return round_up((terms + passes - 1) / passes, kTermsMultiple);
}

// Floats that `multiply` needs to keep sums of parts in.
template <class T>
long kept_size(long rows, const Matrix<T>& w) {
  if (!rows) return 0;
  const long count = std::min(rows, kPassRows);
  return terms_at_once(count, w.terms, sizeof(T)) < w.terms ? w.panels * kPassRows * kPanel : 0;
}

// All rows times all panels, shared out. `finish(row, panel, sums)` gets 32 sums without bias, for each row and panel
// once, on any thread. `kept`: see `kept_size`.
template <class T, class Finish>
void multiply(Pool& pool, const Matrix<T>& w, Rows<T> x, long rows, float* kept, Finish&& finish) {
  for (long start = 0; start < rows; start += kPassRows) {
    const long count = std::min(kPassRows, rows - start), step = terms_at_once(count, w.terms, sizeof(T));
    for (long k = 0; k < w.terms; k += step) {
      const long terms = std::min(step, w.terms - k);
      const long bytes = terms * kPanel * (long)sizeof(T);
      const long portion = std::max(1L, std::min(kPortionBytes / bytes, w.panels / (4 * pool.threads())));
      pool.share(w.panels, portion, [&](long first, long end) {
        for (long p = first; p < end; p++)
          multiply_panel<T>(count, x.row(start) + k, x.stride, w.panel(p) + k * kPanel, terms,
                            step < w.terms ? kept + p * kPassRows * kPanel : nullptr, k > 0, k + terms == w.terms,
                            [&](long row, const float* sums) { finish(start + row, p, sums); });
      });
    }
  }
}

}  // namespace antiphon
