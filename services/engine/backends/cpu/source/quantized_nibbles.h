// Products of weights of 4 bits with rows in 8 bits. The terms of a row that belong to a group of the weights are scaled
// so that the largest absolute value becomes 127 and rounded to whole numbers, which are multiplied with the group's
// levels, whole numbers too. The sums of a group are exact; scales are applied to them in float32. A kernel as in
// quantized_weights.h.
//
//     y[n] = sum over groups g of row_scale[g] * scale[n][g] * sum over k in g of i[k] * level[q[n][k]]
//            less row_scale[g] * offset[n][g] * sum over k in g of i[k]
//
// A piece of a panel is unpacked to bytes in the L1 cache, as quantized_bytes.h has them, and multiplied with all rows. An
// AMX processor uses AVX512-VNNI here: a tile's sums would have to leave it after every group.
#pragma once

#include "pool.h"
#include "quantized_bytes.h"
#include "quantized_round.h"
#include "quantized_unpack.h"

namespace antiphon {

#if defined(__AVX512VNNI__)
// The instruction takes an unsigned first factor, which is the weight here: its levels are stored with kShift added, and
// the excess, kShift times the sum of the row's numbers, is subtracted before the group's sums begin.
struct LevelBytes : Bytes {
  static constexpr int32_t kShift = 128;
  static constexpr long kFew = 10;  // the maximum number of rows for which weights are unpacked into registers
  static constexpr long kApart = 4;  // the maximum number of rows with separate sums for the two steps of a word
  static Sum begin(const int32_t* excess) { return _mm512_set1_epi32(*excess); }
  static Sum add(Sum acc, Spread x, Word w) { return _mm512_dpbusd_epi32(acc, w, x); }
  static IntVec numbers(Sum v) { return (IntVec)v; }
};
#else
struct LevelBytes : Bytes {
  static constexpr int32_t kShift = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
  static constexpr long kFew = 2;
#else
  static constexpr long kFew = 0;
#endif
  static constexpr long kApart = 0;
  static Sum begin(const int32_t*) { return Sum{}; }
  static IntVec numbers(const Sum& v) { return load_any<IntVec>(&v); }
};
#endif

// Maps the sixteen indices to bytes. A word has a column's eight terms: the first four in the lower halves of its bytes.
struct LevelTable {
  explicit LevelTable(const Quantized& w) {
    for (long i = 0; i < 4 * kLevels; i++) bytes[i] = (uint8_t)((int32_t)w.levels[i % kLevels] + LevelBytes::kShift);
  }

#if defined(__AVX512VNNI__)
  // Calls `use(step, half, word)` for the two steps of four terms of a row of words, [32] of them.
  template <class Use>
  void unpack(const uint8_t* from, Use&& use) const {
    const __m512i table = _mm512_load_si512(bytes), low = _mm512_set1_epi8(15);
    for (int half = 0; half < 2; half++) {
      const __m512i v = _mm512_loadu_si512(from + half * 64);
      use(0, half, _mm512_shuffle_epi8(table, _mm512_and_si512(v, low)));
      use(1, half, _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v, 4), low)));
    }
  }
#elif defined(__AVX2__) && !defined(__AVX512F__)
  template <class Use>
  void unpack(const uint8_t* from, Use&& use) const {
    const __m256i table = _mm256_load_si256((const __m256i*)bytes), low = _mm256_set1_epi8(15);
    for (int half = 0; half < 2; half++) {
      __m256i first[Bytes::kParts], second[Bytes::kParts];
      for (int i = 0; i < Bytes::kParts; i++) {
        const __m256i v = _mm256_loadu_si256((const __m256i*)(from + half * 64 + i * 32));
        first[i] = _mm256_shuffle_epi8(table, _mm256_and_si256(v, low));
        second[i] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), low));
      }
      use(0, half, Bytes::word(first));
      use(1, half, Bytes::word(second));
    }
  }
#endif

  // Unpacks a row of words to two steps of a panel of bytes, [2][32][4].
  void unpack(const uint8_t* from, uint8_t* to) const {
#if defined(__AVX512VNNI__)
    unpack(from, [to](int step, int half, __m512i v) { _mm512_store_si512(to + step * kWordsBytes + half * 64, v); });
#elif defined(__AVX2__)
    const __m256i table = _mm256_load_si256((const __m256i*)bytes), low = _mm256_set1_epi8(15);
    for (long part = 0; part < 4; part++) {
      const __m256i v = _mm256_loadu_si256((const __m256i*)(from + part * 32));
      _mm256_store_si256((__m256i*)(to + part * 32), _mm256_shuffle_epi8(table, _mm256_and_si256(v, low)));
      _mm256_store_si256((__m256i*)(to + part * 32 + kWordsBytes),
                         _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), low)));
    }
#else
    for (long i = 0; i < kWordsBytes; i++) to[i] = bytes[from[i] & 15], to[i + kWordsBytes] = bytes[from[i] >> 4];
#endif
  }

  alignas(64) uint8_t bytes[4 * kLevels];
};

// The number of rows that are multiplied at once. Not all of their sums over groups fit into registers beside those of a
// group; that costs less than reading the panel more often. On AVX2 see kByteRows.
#if defined(__AVX512F__)
constexpr int kNibbleRows = 8;
#elif defined(__AVX2__)
constexpr int kNibbleRows = kByteRows;
#else
constexpr int kNibbleRows = 2;
#endif

// Terms of a panel that are unpacked at once and stay in the L1 cache while all rows are multiplied with them.
constexpr long kNibbleTerms = 4 * kGroupMax;

template <class T>
class Int4DynamicKernel {
 public:
  struct Product {};
  static constexpr long kSize = 1;
  static constexpr long kFew = LevelBytes::kFew;
  static long prepared_floats(long rows, const Quantized& w) {
    return rows * numbers_size(w) + rows * stride(w) / 4;
  }

  Int4DynamicKernel(const Quantized& w, Inputs<T> x, float* prepared) : w_(&w), x_(x), prepared_(prepared) {}
  // Returns a kernel of the same rows and another matrix.
  Int4DynamicKernel of(const Quantized& w) const {
    Int4DynamicKernel other = *this;
    other.w_ = &w;
    return other;
  }

  // Stores for each row, in `prepared`, what `Row` has; after all rows, the rows' bytes.
  void prepare(Pool& pool, long rows) {
    rows_ = rows;
    pool.share(rows, std::max(1L, rows / (4 * pool.threads())), [&](long first, long last) {
      for (long r = first; r < last; r++)
        for (long g = 0; g < w_->groups; g++) round_group(r, g);
    });
  }

  // Adds a part, which is whole groups but for the last one, to the sums [rows][32] of the terms before it, if any.
  void add(Product&, const Part& part, float* sums) const {
    alignas(64) uint8_t panel[kNibbleTerms * kPanel];
    const LevelTable table(*w_);
    if (!part.k) std::memset(sums, 0, part.rows * kPanel * sizeof *sums);
    for (long at = 0; at < part.terms; at += kNibbleTerms) {
      const Part piece{part.first, part.rows, part.p, part.k + at, std::min(kNibbleTerms, part.terms - at)};
      unpack(table, piece, panel);
      long first = 0;
      for (long left = (part.rows + kNibbleRows - 1) / kNibbleRows; left; left--) {
        const long count = (part.rows - first + left - 1) / left;
        add_some(count, {piece.first + first, count, piece.p, piece.k, piece.terms}, panel, sums + first * kPanel);
        first += count;
      }
    }
  }

  // Multiplies up to kFew rows, from `first` on, by a whole panel: sums [rows][32].
  void add_few(long first, long rows, long p, float* sums) const {
    w_->offsets ? add_few_some<true>(first, rows, p, sums) : add_few_some<false>(first, rows, p, sums);
  }

  void complete(long, long, float*) const {}

 private:
  static constexpr long kWordTerms = 8;

  // What a row has of each group: the scale of its numbers, the scale times their sum, and what its sums begin with.
  struct Row {
    float *scales, *totals;
    int32_t* excess;
  };

  static long numbers_size(const Quantized& w) { return round_up(3 * w.groups, kLanes); }
  Row numbers_of(long row) const {
    float* const base = prepared_ + row * numbers_size(*w_);
    return {base, base + w_->groups, reinterpret_cast<int32_t*>(base + 2 * w_->groups)};
  }
  static long stride(const Quantized& w) { return w.terms + kByteTermsMultiple; }
  uint8_t* row(long row) const {
    return reinterpret_cast<uint8_t*>(prepared_ + rows_ * numbers_size(*w_)) + row * stride(*w_);
  }

  void unpack(const LevelTable& table, const Part& piece, uint8_t* to) const {
    const uint8_t* from = w_->panel(piece.p, piece.k);
    Ahead ahead(from + kPrefetchBytes, w_->bytes(piece.terms), kWordsBytes / 64);
    for (long i = 0; i < piece.terms; i += kWordTerms, from += kWordsBytes) {
      ahead.ask();
      table.unpack(from, to + i * kPanel);
    }
  }

  template <int kRows = kNibbleRows>
  void add_some(long rows, const Part& piece, const uint8_t* panel, float* sums) const {
    if (rows >= kRows)
      return w_->offsets ? add_rows<kRows, true>(piece, panel, sums) : add_rows<kRows, false>(piece, panel, sums);
    if constexpr (kRows > 1) add_some<kRows - 1>(rows, piece, panel, sums);
  }

  template <int kRows, bool kOffsets>
  void add_rows(const Part& piece, const uint8_t* panel, float* sums) const {
    if constexpr (kRows <= kBothHalves) return add_halves<kRows, kOffsets, 2>(piece, panel, 0, sums);
    for (int half = 0; half < 2; half++) add_halves<kRows, kOffsets, 1>(piece, panel, half, sums);
  }

  // Multiplies rows by kHalves halves of a panel, from `first` on. Not inlined: in a large caller not all sums get
  // registers.
  template <int kRows, bool kOffsets, int kHalves>
  [[gnu::noinline]] void add_halves(const Part& piece, const uint8_t* panel, int first, float* sums) const {
    const long step = stride(*w_), numbers = numbers_size(*w_);
    const uint8_t* x = row(piece.first) + piece.k;
    const Row has = numbers_of(piece.first);
    float* const to = sums + first * kLanes;
    Vec all[kRows][kHalves];
    for (int r = 0; r < kRows; r++)
      for (int half = 0; half < kHalves; half++) all[r][half] = load(to + r * kPanel + half * kLanes);
    for (long at = 0, g = piece.k / w_->group; at < piece.terms; at += w_->group, g++) {
      LevelBytes::Sum acc[kRows][kHalves];
      for (int r = 0; r < kRows; r++)
        for (int half = 0; half < kHalves; half++) acc[r][half] = LevelBytes::begin(has.excess + r * numbers + g);
      for (long k = at; k < std::min(at + w_->group, piece.terms); k += 4) {
        LevelBytes::Word w[kHalves];
        for (int half = 0; half < kHalves; half++) w[half] = LevelBytes::word(panel + k * kPanel + (first + half) * 64);
        for (int r = 0; r < kRows; r++) {
          const auto spread = LevelBytes::spread(x + r * step + k);
          for (int half = 0; half < kHalves; half++) acc[r][half] = LevelBytes::add(acc[r][half], spread, w[half]);
        }
      }
      for (int half = 0; half < kHalves; half++)
        for (int r = 0; r < kRows; r++)
          add_scaled<kOffsets>(all[r][half], piece.p, g, first + half, has, r * numbers,
                               LevelBytes::numbers(acc[r][half]));
    }
    for (int r = 0; r < kRows; r++)
      for (int half = 0; half < kHalves; half++) store(to + r * kPanel + half * kLanes, all[r][half]);
  }

  template <bool kOffsets, int kRows = kFew>
  void add_few_some(long first, long rows, long p, float* sums) const {
    if (rows >= kRows) return add_few_rows<kOffsets, kRows>(first, p, sums);
    if constexpr (kRows > 1) add_few_some<kOffsets, kRows - 1>(first, rows, p, sums);
  }

  // As `add_rows`, for whole columns. Where the two steps of a word have sums of their own, an instruction waits half as
  // long for the one before it.
  template <bool kOffsets, int kRows>
  [[gnu::noinline]] void add_few_rows(long first, long p, float* sums) const {
    constexpr int kParts = kRows <= LevelBytes::kApart ? 2 : 1;
    const LevelTable table(*w_);
    const long step = stride(*w_), numbers = numbers_size(*w_);
    const uint8_t *x = row(first), *from = w_->panel(p, 0);
    const Row has = numbers_of(first);
    Vec all[kRows][2] = {};
    for (long g = 0, k = 0; g < w_->groups; g++) {
      LevelBytes::Sum acc[kRows][2][kParts] = {};
      for (int r = 0; r < kRows; r++)
        acc[r][0][0] = acc[r][1][0] = LevelBytes::begin(has.excess + r * numbers + g);
      for (const long end = std::min(k + w_->group, w_->terms); k < end; k += kWordTerms, from += kWordsBytes) {
        __builtin_prefetch(from + kPrefetchBytes, 0, 2);
        __builtin_prefetch(from + kWordsBytes / 2 + kPrefetchBytes, 0, 2);
        table.unpack(from, [&](int part, int half, LevelBytes::Word v) {
          for (int r = 0; r < kRows; r++) {
            LevelBytes::Sum& sum = acc[r][half][part % kParts];
            sum = LevelBytes::add(sum, LevelBytes::spread(x + r * step + k + 4 * part), v);
          }
        });
      }
      for (int half = 0; half < 2; half++)
        for (int r = 0; r < kRows; r++) {
          IntVec whole = LevelBytes::numbers(acc[r][half][0]);
          if constexpr (kParts > 1) whole += LevelBytes::numbers(acc[r][half][1]);
          add_scaled<kOffsets>(all[r][half], p, g, half, has, r * numbers, whole);
        }
    }
    for (int r = 0; r < kRows; r++)
      for (int half = 0; half < 2; half++) store(sums + r * kPanel + half * kLanes, all[r][half]);
  }

  // Adds the sums of a group, of 16 columns and the row whose numbers begin at `at`, to those of the groups before it.
  template <bool kOffsets>
  void add_scaled(Vec& sum, long p, long g, long half, const Row& has, long at, IntVec whole) const {
    if constexpr (kOffsets) sum -= load(w_->offset(p, g) + half * kLanes) * has.totals[at + g];
    sum += convert<Vec>(whole) * (load(w_->scale(p, g) + half * kLanes) * has.scales[at + g]);
  }

  void round_group(long r, long g) const {
    const long begin = g * w_->group, terms = std::min(w_->group, w_->terms - begin);
    const Row has = numbers_of(r);
    const Rounded rounded = round_terms<0>(x_.row(r) + begin, terms, row(r) + begin);
    has.scales[g] = rounded.scale;
    has.totals[g] = rounded.scale * (float)rounded.total;
    has.excess[g] = -LevelBytes::kShift * rounded.total;
  }

  const Quantized* w_;
  Inputs<T> x_;
  float* prepared_;
  long rows_ = 0;
};

}  // namespace antiphon
