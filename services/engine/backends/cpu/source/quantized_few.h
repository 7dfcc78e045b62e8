// Products of a few rows with weights of 8 or 4 bits. Numbers are unpacked into registers and multiplied there;
// quantized_weights.h unpacks them into the L1 cache, which is worth it only for more rows. The products and their
// order are the same, so are the results, bit for bit.
#pragma once

#include "quantized_unpack.h"

namespace antiphon {

// The maximum number of rows, from which on unpacking for all rows at once is faster; 0: none. Tiles add up in an order of
// their own, so rows of bfloat16 are always multiplied by tiles where there are some.
template <class Term, template <class> class Numbers>
constexpr long kFewRows = 2;
#if defined(__AVX512F__)
template <class Term>
constexpr long kFewRows<Term, LevelNumbers> = 4;
#endif
#if defined(__AMX_BF16__)
template <template <class> class Numbers>
constexpr long kFewRows<Bf16, Numbers> = 0;
template <>
constexpr long kFewRows<Bf16, LevelNumbers> = 0;
#elif defined(__AVX512BF16__)
template <>
constexpr long kFewRows<Bf16, LevelNumbers> = 12;
#endif
constexpr long kHeldRows = 4;       // the maximum number of rows whose terms are kept in registers
constexpr long kFewAway = 1 << 10;  // how many bytes ahead is prefetched

// Multiplies rows by a panel, each group of terms by itself. `finish(group, row, half, sums)` gets the sums of 16
// columns of each group, one group after the other. Not inlined: in a large caller not all sums get registers.
template <class Term, int kRows, class Numbers, class Finish>
[[gnu::noinline]] void multiply_packed(const Quantized& w, const Numbers& numbers, const Term* x, long stride, long p,
                                       Finish&& finish) {
  using P = Pair<Term>;
  constexpr long kSteps = Numbers::kTerms / P::kTerms;
  const uint8_t* words = w.panel(p, 0);
  for (long g = 0, k = 0; g < w.groups; g++) {
    Vec sums[kRows][2] = {};
    for (const long last = std::min(k + w.group, w.terms); k < last; k += Numbers::kTerms, words += kWordsBytes) {
      decltype(P::spread(x, 0)) terms[kRows][kSteps];
      for (int r = 0; r < kRows; r++)
        for (long i = 0; i < kSteps; i++) terms[r][i] = P::spread(x + r * stride + k + i * P::kTerms, 0);
      for (int half = 0; half < 2; half++) {
        const uint8_t* const from = words + half * (kWordsBytes / 2);
        __builtin_prefetch(from + kFewAway, 0, 2);
        each_number(numbers, load_any<WordVec>(from), [&](long term, auto some) {
          for (int r = 0; r < kRows; r++) sums[r][half] = P::add(sums[r][half], terms[r][term / P::kTerms], some);
        });
      }
    }
    for (int r = 0; r < kRows; r++)
      for (int half = 0; half < 2; half++) finish(g, r, half, sums[r][half]);
  }
}

// The same for more rows, whose terms do not fit into registers beside their sums: both halves of a panel are unpacked,
// a step at a time, and each term of a row is loaded once for both. The loop is unrolled by a pragma, because sums that
// are chosen by an index are not kept in registers.
template <class Term, int kRows, class Numbers, class Finish>
[[gnu::noinline]] void multiply_more_packed(const Quantized& w, const Numbers& numbers, const Term* x, long stride,
                                            long p, Finish&& finish) {
  using P = Pair<Term>;
  const uint8_t* words = w.panel(p, 0);
  for (long g = 0, k = 0; g < w.groups; g++) {
    Vec left[kRows] = {}, right[kRows] = {};
    for (const long last = std::min(k + w.group, w.terms); k < last; k += Numbers::kTerms, words += kWordsBytes) {
      __builtin_prefetch(words + kFewAway, 0, 2);
      __builtin_prefetch(words + kWordsBytes / 2 + kFewAway, 0, 2);
      const WordVec left_words = load_any<WordVec>(words), right_words = load_any<WordVec>(words + kWordsBytes / 2);
      each_step<Numbers>([&](long term, auto step) __attribute__((always_inline)) {
        const auto left_step = numbers.template step<step()>(left_words);
        const auto right_step = numbers.template step<step()>(right_words);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) {
          const auto spread = P::spread(x + r * stride + k + term, 0);
          left[r] = P::add(left[r], spread, left_step);
          right[r] = P::add(right[r], spread, right_step);
        }
      });
    }
    for (int r = 0; r < kRows; r++) {
      finish(g, r, 0, left[r]);
      finish(g, r, 1, right[r]);
    }
  }
}

// Calls `multiply_packed` for up to kRows rows.
template <class Term, long kRows, class Numbers, class Finish>
void multiply_few_packed(const Quantized& w, const Numbers& numbers, long rows, const Term* x, long stride, long p,
                         Finish&& finish) {
  if constexpr (kRows > 1)
    if (rows < kRows) return multiply_few_packed<Term, kRows - 1>(w, numbers, rows, x, stride, p, finish);
  if constexpr (kRows > kHeldRows)
    multiply_more_packed<Term, kRows>(w, numbers, x, stride, p, finish);
  else
    multiply_packed<Term, kRows>(w, numbers, x, stride, p, finish);
}

}  // namespace antiphon
