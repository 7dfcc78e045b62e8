// The elementary product of matrices and attention: 16 columns, each with one (float) or two (bfloat16) consecutive
// terms, times the same one or two terms of a row.
//
//     acc[j] += sum over i < kTerms of x[i] * w[j * kTerms + i]
//
// Weights, keys and values are always stored as [terms / kTerms][16][kTerms]. AVX512-BF16 has the product of pairs as
// an instruction, and an AMX tile holds 16 pairs in the same order. Elsewhere the product takes kSteps steps of one
// term each, and rows stay in float32: this avoids rounding them, and a plain load copies a term to all lanes.
#pragma once

#include "vec.h"

namespace antiphon {

template <class T>
struct Pair;

template <>
struct Pair<float> {
  static constexpr long kTerms = 1, kSteps = 1;
  typedef float Term;  // the type of a row's numbers

  static inline Vec word(const float* w, long) { return load(w); }
  static inline Vec spread(const float* x, long) { return broadcast(*x); }
  static inline Vec add(Vec acc, Vec x, Vec w) { return acc + x * w; }
};

template <>
struct Pair<Bf16> {
  static constexpr long kTerms = 2;

#if defined(__AVX512BF16__)
  static constexpr long kSteps = 1;
  typedef Bf16 Term;

  static inline __m512bh word(const Bf16* w, long) { return (__m512bh)_mm512_loadu_si512(w); }
  static inline __m512bh spread(const Bf16* x, long) {
    int32_t both;
    std::memcpy(&both, x, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
  }
  static inline Vec add(Vec acc, __m512bh x, __m512bh w) { return (Vec)_mm512_dpbf16_ps((__m512)acc, x, w); }
#else
  static constexpr long kSteps = 2;
  typedef float Term;

  static inline Vec word(const Bf16* w, long step) {
    const WordVec both = load_any<WordVec>(w);
    return step ? (Vec)(both & 0xffff0000u) : (Vec)(both << 16);
  }
  static inline Vec spread(const float* x, long step) { return broadcast(x[step]); }
  static inline Vec add(Vec acc, Vec x, Vec w) { return acc + x * w; }
#endif
};

// The type of the numbers of rows that are multiplied with a matrix of T.
template <class T>
using TermOf = typename Pair<T>::Term;

}  // namespace antiphon
