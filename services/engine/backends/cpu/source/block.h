// The product that matrices and attention consist of: rows of an activation times a panel. A panel is 32 columns of a
// weight matrix, of keys or of values; a term is one index of the sum of products. Computed with vectors, or with AMX
// tiles, 32 rows at a time, where there are some.
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

// The number of rows whose sums fit into registers, and the number of halves of a panel (16 columns) for which they do.
#if defined(__AVX512F__)
constexpr int kRegisterRows = 12, kRegisterHalves = 2;
#else
constexpr int kRegisterRows = 5, kRegisterHalves = 1;
#endif

// How often `ask`, which prefetches (see ahead.h), is called for every 32 terms of a panel, by a group of rows or a
// block of tiles: for data elsewhere in memory (kAsks), for the panel that is being read (kOnwardAsks), and for a unit
// of the KV cache (kUnitAsks). A unit is read faster the more evenly it is prefetched, but between tile instructions
// there is little room.
constexpr long kAsks = 2, kOnwardAsks = 4 / kRegisterHalves;
#if defined(__AMX_BF16__)
constexpr long kUnitAsks = kAsks;
#else
constexpr long kUnitAsks = 16;
#endif
template <class Asker>
constexpr long kAsksOf = Asker::kElsewhere ? kAsks : kOnwardAsks;
template <>
constexpr long kAsksOf<Ahead> = kUnitAsks;

// From this many rows on, and if what is prefetched is elsewhere in memory, all terms of one half of a panel are
// processed before the other half. Fewer rows alternate between the halves every 32 terms, as they lie in memory,
// because the additions to the sums of a single half would wait for each other.
constexpr int kLongRows = 4;

// kSideBySide: the maximum number of panels that rows are multiplied with side by side, a cache line of each in turn. A
// processor that prefetches in several stretches of memory reads them faster than one stretch. kSumsBeside: the number
// of sums of a half, rows times panels, that fit into registers. beside_away: how many bytes ahead is prefetched by
// software, where that is faster still: the more rows are computed meanwhile, the further.
#if defined(__AMX_BF16__)
constexpr long kSideBySide = 1, kSumsBeside = 1;
constexpr long beside_away(long) { return 0; }
#elif defined(__AVX512F__)
constexpr long kSideBySide = 4, kSumsBeside = 16;
constexpr long beside_away(long rows) { return rows <= kLongRows ? 1 << 10 : 3 << 10; }
#else
constexpr long kSideBySide = 4, kSumsBeside = 4;
constexpr long beside_away(long) { return 0; }
#endif

// Which operand stays in the L1 cache: the other one is loaded without displacing it.
enum class Stays { rows, panel };

// How the two halves of a panel, 16 columns each, are stored: alternating pair by pair (beside), or 32 terms of one
// half and then those of the other (apart), which lets a tile be read in one stretch.
enum class Halves { beside, apart };

template <class T, Halves kHalves>
struct PanelOrder {
  static constexpr bool kApart = kHalves == Halves::apart;
  static constexpr long kTerm = kApart ? kLanes : kPanel;  // from a term's numbers to those of the next term
  static constexpr long kRight = kLanes * (kApart ? kTermsMultiple : Pair<T>::kTerms);
};

// Multiplies rows by `kCount` halves of a panel, from `panel` on; `terms` is a multiple of 32. Prefetches what lies as
// far after `from` as the data being read lies after `panel`, in all `kCount` halves of the lines.
template <class T, int kRows, int kCount, Halves kHalves, class Asker>
inline void multiply_halves(const TermOf<T>* x, long stride, const T* panel, long terms, float* sums, bool resume,
                            const T* from, Asker& ahead) {
  using P = Pair<T>;
  using Order = PanelOrder<T, kHalves>;
  alignas(64) static constexpr float zeros[kPanel] = {};
  const float* const start = resume ? sums : zeros;
  const long next = resume ? kPanel : 0;
  Vec acc[kRows][kCount];
  for (int r = 0; r < kRows; r++)
    for (int half = 0; half < kCount; half++) acc[r][half] = load(start + r * next + half * kLanes);
  // If there is one prefetch per 32 terms, it is outside of the inner loop, which is faster with fewer branches.
  constexpr long kAskTerms = 2 * kTermsMultiple / (kAsksOf<Asker> * kCount);
  constexpr bool kOnce = kAskTerms == kTermsMultiple;
  for (long group = 0; group < terms; group += kTermsMultiple) {
    if (kOnce) ahead.ask(from + group * kPanel);
    for (long k = 0; k < kTermsMultiple; k += P::kTerms) {
      if (!kOnce && k % kAskTerms == 0) ahead.ask(from + group * kPanel + k * kLanes * kCount);
      const T* w = panel + group * kPanel + k * Order::kTerm;
      decltype(P::word(w, 0)) words[P::kSteps][kCount];
      for (long step = 0; step < P::kSteps; step++)
        for (int half = 0; half < kCount; half++) words[step][half] = P::word(w + half * Order::kRight, step);
      for (int r = 0; r < kRows; r++)
        for (long step = 0; step < P::kSteps; step++) {
          const auto spread = P::spread(x + r * stride + group + k, step);
          for (int half = 0; half < kCount; half++) acc[r][half] = P::add(acc[r][half], spread, words[step][half]);
        }
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int half = 0; half < kCount; half++) store(sums + r * kPanel + half * kLanes, acc[r][half]);
}

template <class T, int kRows, Halves kHalves, class Asker>
inline void multiply_rows(const TermOf<T>* x, long stride, const T* panel, long terms, float* sums, bool resume,
                          Asker& ahead) {
  if constexpr (kRegisterHalves == 2 || (kRows == 1 && kHalves == Halves::beside))
    return multiply_halves<T, kRows, 2, kHalves>(x, stride, panel, terms, sums, resume, panel, ahead);
  constexpr long kRight = PanelOrder<T, kHalves>::kRight;
  const long step = kRows >= kLongRows && Asker::kElsewhere ? terms : kTermsMultiple;
  for (long k = 0; k < terms; k += step, panel += step * kPanel)
    for (long half = 0; half < 2; half++)
      multiply_halves<T, kRows, 1, kHalves>(x + k, stride, panel + half * kRight, step, sums + half * kLanes,
                                            resume || k > 0, panel + half * kTermsMultiple * kLanes, ahead);
}

// Multiplies rows by `kPanels` panels with halves apart, `distance` numbers from one panel to the next, a line of each
// in turn. Sums [kPanels][kBlockRows][32] are continued if `resume`. `next` is what is read after the first panel. Not
// inlined: in a large caller not all sums get registers, and eight rows take twice as long.
template <class T, int kRows, int kPanels>
[[gnu::noinline]] void multiply_side_by_side(const TermOf<T>* x, long stride, const T* panel, const T* next,
                                             long distance, long terms, float* sums, bool resume) {
  using P = Pair<T>;
  constexpr long kHalf = kTermsMultiple * kLanes, kAway = beside_away(kRows) / (long)sizeof(T);
  const auto sum = [sums](int p, int r, long half) { return sums + (p * kBlockRows + r) * kPanel + half * kLanes; };
  const T* const end = panel + terms * kPanel;
  for (long group = 0; group < terms; group += kTermsMultiple)
    for (long half = 0; half < 2; half++, panel += kHalf) {
      const T* ahead = panel + kAway + (panel + kAway < end ? 0 : next - end);
      Vec acc[kPanels][kRows];
      for (int p = 0; p < kPanels; p++)
        for (int r = 0; r < kRows; r++) acc[p][r] = resume || group ? load(sum(p, r, half)) : Vec{};
      for (long k = 0; k < kTermsMultiple; k += P::kTerms)
        for (int p = 0; p < kPanels; p++) {
          const long place = p * distance + k * kLanes;
          if (kAway) __builtin_prefetch(ahead + place, 0, 2);
          for (long step = 0; step < P::kSteps; step++) {
            const auto word = P::word(panel + place, step);
            for (int r = 0; r < kRows; r++)
              acc[p][r] = P::add(acc[p][r], P::spread(x + r * stride + group + k, step), word);
          }
        }
      for (int p = 0; p < kPanels; p++)
        for (int r = 0; r < kRows; r++) store(sum(p, r, half), acc[p][r]);
    }
}

template <class T, Halves kHalves, int kRows = kRegisterRows, class Asker>
void multiply_some(long rows, const TermOf<T>* x, long stride, const T* panel, long terms, float* sums, bool resume,
                   Asker& ahead) {
  if (rows >= kRows) return multiply_rows<T, kRows, kHalves>(x, stride, panel, terms, sums, resume, ahead);
  if constexpr (kRows > 1) multiply_some<T, kHalves, kRows - 1>(rows, x, stride, panel, terms, sums, resume, ahead);
}

// Multiplies rows by a panel, or by a part of its terms: sums [rows][32], continued if `resume`. Tiles take up to
// kBlockRows rows.
template <class T>
struct Block {
  // Whether so many rows are multiplied in one group, so that the panel is read only once.
  static bool once(long rows) { return rows <= kRegisterRows; }
  // Returns how often `ask` is called for this many rows, in groups, and this many terms.
  static long asks(long rows, long terms) {
    return groups(rows) * (terms / kTermsMultiple) * kAsks;
  }
  // Returns in how many groups rows are multiplied.
  static long groups(long rows) { return (rows + kRegisterRows - 1) / kRegisterRows; }

  // Each group is a step of `task` (see NoBackground).
  template <Stays, Halves kHalves, class Asker, class Task = NoBackground::Task>
  static void multiply(long rows, const TermOf<T>* x, long stride, const T* panel, long terms, float* sums, bool resume,
                       Asker& ahead, Task&& task = {}) {
    // Groups are of even size: a row in a group of its own costs more than its share of a larger group.
    long first = 0;
    for (long left = groups(rows); left; left--) {
      const long count = (rows - first + left - 1) / left;
      task.step();
      multiply_some<T, kHalves>(count, x + first * stride, stride, panel, terms, sums + first * kPanel, resume, ahead);
      first += count;
    }
  }
};

#if defined(__AMX_BF16__)
// Loads a tile whose rows begin `bytes` apart. In assembly, because the compiler's intrinsics require the tile's number
// as a literal.
template <int kNumber, bool kStays>
inline void load_tile(const Bf16* from, long bytes) {
  if constexpr (kStays)
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes), "i"(kNumber));
  else
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes), "i"(kNumber));
}

// Adds products to the sums in tiles 0 to 3: rows are loaded into tiles 4 and 5, pairs of the panel into 6 and 7.
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

// The tiles must be configured for the number of rows (see BlockShape).
template <>
struct Block<Bf16> {
  static bool once(long) { return true; }
  static long groups(long rows) { return (rows + kBlockRows - 1) / kBlockRows; }
  static long asks(long rows, long terms) { return groups(rows) * (terms / kTermsMultiple) * kAsks; }

  template <Stays kStays, Halves kHalves, class Asker, class Task = NoBackground::Task>
  static void multiply(long rows, const Bf16* x, long stride, const Bf16* panel, long terms, float* sums, bool resume,
                       Asker& ahead, Task&& task = {}) {
    task.step();
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

// Configures the tiles for blocks of so many rows, where there are tiles.
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
