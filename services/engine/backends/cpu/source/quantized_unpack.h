// Unpacks weights of 8 or 4 bits into the numbers that rows are multiplied with, [terms / kTerms][32][kTerms] (see
// pair.h), which stay in a core's cache.
#pragma once

#include <utility>

#include "quantized.h"

namespace antiphon {

// Calls `use(term, step)` for each step of a word: kTerms terms of the product, from `term` of the word on. `step` is a
// constant, an integral_constant.
template <class Numbers, int... kStep, class Use>
inline void each_step(std::integer_sequence<int, kStep...>, Use&& use) {
  (use(kStep * Numbers::kStepTerms, std::integral_constant<int, kStep>()), ...);
}
template <class Numbers, class Use>
inline void each_step(Use&& use) {
  each_step<Numbers>(std::make_integer_sequence<int, Numbers::kTerms / Numbers::kStepTerms>(), use);
}

// Unpacks four terms of 16 columns from the bytes in `v`. The results are kTimes too large. `step` returns the numbers
// of one step of the product.
template <class Term>
struct FourTerms;

template <>
struct FourTerms<float> {
  static constexpr float kTimes = 1;

  template <int kStep>
  static Vec step(WordVec v) {
    return convert<Vec>((IntVec)(v << (24 - 8 * kStep)) >> 24);
  }
};

#if defined(__AVX512BF16__)
// One shuffle puts a byte at the top of its word, where it needs no sign extension; one more forms pairs.
template <>
struct FourTerms<Bf16> {
  static constexpr float kTimes = 1 << 24;

  static __m512i top(WordVec v, int index) {
    if (index == 3) return _mm512_castps_si512(_mm512_cvtepi32_ps((__m512i)(v & 0xff000000u)));
    const __m512i from = _mm512_set4_epi32(12 + index, 8 + index, 4 + index, index);
    const __m512i alone = _mm512_maskz_shuffle_epi8(0x8888888888888888, (__m512i)v, _mm512_slli_epi32(from, 24));
    return _mm512_castps_si512(_mm512_cvtepi32_ps(alone));
  }
  static __m512i pair(__m512i first, __m512i second) {
    const __m512i upper = _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302);
    return _mm512_mask_shuffle_epi8(second, 0x3333333333333333, first, upper);
  }
  template <int kStep>
  static __m512bh step(WordVec v) {
    return (__m512bh)pair(top(v, 2 * kStep), top(v, 2 * kStep + 1));
  }
};
#endif

// Maps level indices to the numbers that the product takes.
template <class Term>
struct Levels;

template <>
struct Levels<float> {
  explicit Levels(const Quantized& w) : levels(w.levels), whole(w.whole_levels) {}

  Vec at(WordVec places) const {
    if (whole) return convert<Vec>((IntVec)places - 8);
#if defined(__AVX512F__)
    return (Vec)_mm512_permutexvar_ps((__m512i)places, _mm512_loadu_ps(levels));
#elif defined(__AVX2__)
    return {found((__m256i)places.low), found((__m256i)places.high)};
#else
    float found[kLanes];
    for (long i = 0; i < kLanes; i++) found[i] = levels[places[i]];
    return load(found);
#endif
  }

  // Unpacks a step of the eight terms of 16 columns in the words in `v`; see FourTerms.
  template <int kStep>
  inline Vec step(WordVec v) const {
    return at((v >> (16 * (kStep % 2) + 4 * (kStep / 2))) & 15);
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  Register found(__m256i places) const {
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels), places);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels + 8), places);
    return (Register)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(places, 28)));
  }
#endif

  const float* levels;
  const bool whole;
};

#if defined(__AVX512BF16__)
template <>
struct Levels<Bf16> {
  explicit Levels(const Quantized& w) : table(_mm512_load_si512(w.table)) {}

  // The instruction uses five bits of an index: the table is stored twice, so that the bit above the four has no
  // effect.
  template <int kStep>
  inline __m512bh step(WordVec v) const {
    const __m512i places = kStep ? _mm512_srli_epi16((__m512i)v, 4 * kStep) : (__m512i)v;
    return (__m512bh)_mm512_permutexvar_epi16(places, table);
  }

  const __m512i table;
};
#endif

// How the weights of a kind are unpacked: kTerms terms of a column are in a word, kStepTerms of them are in a step; the
// numbers are kTimes too large.
template <class Term>
struct ByteNumbers {
  static constexpr long kTerms = 4, kStepTerms = Pair<Term>::kTerms;
  static constexpr float kTimes = FourTerms<Term>::kTimes;
  explicit ByteNumbers(const Quantized&) {}
  template <int kStep>
  inline auto step(WordVec v) const {
    return FourTerms<Term>::template step<kStep>(v);
  }
};

template <class Term>
struct LevelNumbers : Levels<Term> {
  static constexpr long kTerms = 8, kStepTerms = Pair<Term>::kTerms;
  static constexpr float kTimes = 1;
  explicit LevelNumbers(const Quantized& w) : Levels<Term>(w) {}
};

// Calls `use(term, numbers)` for each step of the words in `v`.
template <class Numbers, class Use>
inline void each_number(const Numbers& numbers, WordVec v, Use&& use) {
  each_step<Numbers>([&](long term, auto step) { use(term, numbers.template step<step()>(v)); });
}

// The bytes of a row of words: a word of each of a panel's 32 columns.
constexpr long kWordsBytes = kPanel * (long)sizeof(uint32_t);

// Unpacks terms of a panel, rows of words.
template <class Term, class Numbers>
void unpack(const Numbers& numbers, const uint8_t* from, long terms, Term* to, Ahead& ahead) {
  constexpr long kHalf = kLanes * Pair<Term>::kTerms;
  for (long step = 0; step < terms; step += kTermsMultiple) {
    ahead.ask();
    for (long k = step; k < step + kTermsMultiple; k += Numbers::kTerms, from += kWordsBytes) {
      Term* const place = to + k * kPanel;
      each_number(numbers, load_any<WordVec>(from),
                  [&](long term, auto some) { put_any(place + term * kPanel, some); });
      each_number(numbers, load_any<WordVec>(from + kWordsBytes / 2),
                  [&](long term, auto some) { put_any(place + term * kPanel + kHalf, some); });
    }
  }
}

}  // namespace antiphon
