// The one product that matrices and attention are made of: 16 columns, each with one (float) or two (bfloat16)
// consecutive terms, times the same one or two numbers of a row.
//
//     acc[j] += sum over i < kTerms of x[i] * w[j * kTerms + i]
//
// Storage everywhere is [terms / kTerms][16][kTerms]: what a product reads is 64 consecutive bytes. AVX512-BF16 has it
// as an instruction, and AMX tiles of the same storage hold 16 of them.
#pragma once

#include "vec.h"

namespace antiphon {

template <class T>
struct Pair;

template <>
struct Pair<float> {
  static constexpr long kTerms = 1;
  typedef Vec Word;
  typedef Vec Spread;

  static inline Word word(const float* w) { return load(w); }
  static inline Spread spread(const float* x) { return splat(*x); }
  static inline Vec add(Vec acc, Spread x, Word w) { return acc + x * w; }
};

template <>
struct Pair<Bf16> {
  static constexpr long kTerms = 2;

#if defined(__AVX512BF16__)
  typedef __m512bh Word;
  typedef __m512bh Spread;

  static inline Word word(const Bf16* w) { return (__m512bh)_mm512_loadu_si512(w); }
  static inline Spread spread(const Bf16* x) {
    int32_t both;
    std::memcpy(&both, x, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
  }
  static inline Vec add(Vec acc, Spread x, Word w) { return (Vec)_mm512_dpbf16_ps((__m512)acc, x, w); }
#else
  struct Halves {
    Vec first, second;
  };
  typedef Halves Word;
  typedef Halves Spread;

  static inline Halves halves(WordVec both) { return {(Vec)(both << 16), (Vec)(both & 0xffff0000u)}; }
  static inline Word word(const Bf16* w) { return halves(load_any<WordVec>(w)); }
  static inline Spread spread(const Bf16* x) { return {splat(to_float(x[0])), splat(to_float(x[1]))}; }
  static inline Vec add(Vec acc, Spread x, Word w) { return acc + x.first * w.first + x.second * w.second; }
#endif
};

}  // namespace antiphon
