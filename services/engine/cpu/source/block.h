// The product that everything is made of: up to 32 rows of an activation times a panel, 32 columns of a matrix, of keys
// or of values. Vectors do it, or tiles where there are some.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "pair.h"
#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

namespace antiphon {

constexpr long kPanel = 32;
constexpr long kTermsMultiple = 32;
constexpr long kBlockRows = 32;

#if defined(__AVX512F__)
constexpr int kRegisterRows = 12;
#else
constexpr int kRegisterRows = 3;
#endif

// Which of the two stays in the innermost cache: what is loaded of the other makes no room for itself there.
enum class Stays { rows, panel };

// How the two times 16 columns of a panel lie: pair by pair, or those of 32 terms behind each other, which is how tiles
// are read in one stretch.
enum class Halves { beside, apart };

template <class T, Halves kHalves>
struct PanelOrder {
  static constexpr bool kApart = kHalves == Halves::apart;
  static constexpr long kTerm = kApart ? kLanes : kPanel;  // from a term's numbers to the next one's
  static constexpr long kRight = kLanes * (kApart ? kTermsMultiple : Pair<T>::kTerms);
};

template <class T, int kRows, Halves kHalves, class Asker>
inline void multiply_rows(const T* x, long stride, const T* panel, long terms, float* sums, bool resume, Asker& ahead) {
  using P = Pair<T>;
  Vec acc[kRows][2] = {};
  if (resume)
    for (int r = 0; r < kRows; r++)
      for (int half = 0; half < 2; half++) acc[r][half] = load(sums + r * kPanel + half * kLanes);
  for (long group = 0; group < terms; group += kTermsMultiple) {
    const T* words = panel + group * kPanel;
    for (long k = 0; k < kTermsMultiple; k += P::kTerms) {
      if (k % kAskEvery == 0) ahead.ask(words + k * kPanel);
      const T* w = words + k * PanelOrder<T, kHalves>::kTerm;
      const auto left = P::word(w), right = P::word(w + PanelOrder<T, kHalves>::kRight);
      for (int r = 0; r < kRows; r++) {
        const auto spread = P::spread(x + r * stride + group + k);
        acc[r][0] = P::add(acc[r][0], spread, left);
        acc[r][1] = P::add(acc[r][1], spread, right);
      }
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int half = 0; half < 2; half++) store(sums + r * kPanel + half * kLanes, acc[r][half]);
}

template <class T, Halves kHalves, int kRows = kRegisterRows, class Asker>
void multiply_some(long rows, const T* x, long stride, const T* panel, long terms, float* sums, bool resume,
                   Asker& ahead) {
  if (rows >= kRows) return multiply_rows<T, kRows, kHalves>(x, stride, panel, terms, sums, resume, ahead);
  if constexpr (kRows > 1) multiply_some<T, kHalves, kRows - 1>(rows, x, stride, panel, terms, sums, resume, ahead);
}

// Up to kBlockRows rows times a panel, or a part of its terms: sums [rows][32], continued where `resume` says so.
// `ahead` (see ahead.h) asks twice every 32 terms.
template <class T>
struct Block {
  template <Stays, Halves kHalves, class Asker>
  static void multiply(long rows, const T* x, long stride, const T* panel, long terms, float* sums, bool resume,
                       Asker& ahead) {
    // Even shares: eleven rows and one cost more than six and six.
    long first = 0;
    for (long left = (rows + kRegisterRows - 1) / kRegisterRows; left; left--) {
      const long count = (rows - first + left - 1) / left;
      multiply_some<T, kHalves>(count, x + first * stride, stride, panel, terms, sums + first * kPanel, resume, ahead);
      first += count;
    }
  }
};

#if defined(__AMX_BF16__)
// Loads a tile whose rows begin `bytes` apart. In words of its own, for with the compiler's a tile's number has to
// stand in the text.
template <int kNumber, bool kStays>
inline void load_tile(const Bf16* from, long bytes) {
  if constexpr (kStays)
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes), "i"(kNumber));
  else
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes), "i"(kNumber));
}

// Rows in tiles 4 and 5, pairs in 6 and 7.
template <Stays kStays, Halves kHalves, bool kBoth, class Asker>
inline void multiply_tiles(const Bf16* x, long stride, const Bf16* panel, long terms, Asker& ahead) {
  typedef PanelOrder<Bf16, kHalves> Panel;
  constexpr bool kRowsStay = kStays == Stays::rows;
  constexpr long kBytes = Panel::kTerm * 2 * (long)sizeof(Bf16);
  const long bytes = stride * (long)sizeof(Bf16);
  const Bf16* below = x + kTileRows * stride;
  for (long k = 0; k < terms; k += kTileTerms) {
    const Bf16* w = panel + k * kPanel;
    load_tile<4, kRowsStay>(x + k, bytes);
    load_tile<6, !kRowsStay>(w, kBytes);
    ahead.ask(w);
    _tile_dpbf16ps(0, 4, 6);
    load_tile<7, !kRowsStay>(w + Panel::kRight, kBytes);
    ahead.ask(w + kTileTerms * kLanes);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kBoth) {
      load_tile<5, kRowsStay>(below + k, bytes);
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
  template <Stays kStays, Halves kHalves, class Asker>
  static void multiply(long rows, const Bf16* x, long stride, const Bf16* panel, long terms, float* sums, bool resume,
                       Asker& ahead) {
    if (rows > kTileRows)
      pass<kStays, kHalves, true>(x, stride, panel, terms, sums, resume, ahead);
    else
      pass<kStays, kHalves, false>(x, stride, panel, terms, sums, resume, ahead);
  }

 private:
  template <Stays kStays, Halves kHalves, bool kBoth, class Asker>
  static void pass(const Bf16* x, long stride, const Bf16* panel, long terms, float* sums, bool resume, Asker& ahead) {
    publish_stores();
    load_sums<kBoth>(sums, resume);
    multiply_tiles<kStays, kHalves, kBoth>(x, stride, panel, terms, ahead);
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

}  // namespace antiphon
