// Products of weights of 8 bits in groups of 16 terms with rows of the usual type. A piece of a panel is unpacked into
// the L1 cache as the numbers that the weights stand for, scales and zeros included, and multiplied with all rows like
// a panel that is not quantized: sums of so short groups would have to be scaled twice as often as the product, which
// takes 32 terms at a time, allows. In bfloat16 the numbers are rounded as those of a plain model are; in float32 they
// are exact but for one rounding. A kernel as in quantized_weights.h.
#pragma once

#include "quantized_weights.h"

namespace antiphon {

// Stores four terms of 16 columns, each scale * q - offset, as a panel has them; `half` is where the columns begin.
template <class Term>
struct ScaledTerms {
  static inline void put(WordVec v, Vec scale, Vec offset, Term* to, long half) {
    each_step<ByteNumbers<float>>([&](long term, auto step) {
      store(to + term * kPanel + half * kLanes, FourTerms<float>::template step<step()>(v) * scale - offset);
    });
  }
};

#if defined(__AVX512BF16__)
template <>
struct ScaledTerms<Bf16> {
  static inline void put(WordVec v, Vec scale, Vec offset, Bf16* to, long half) {
    each_step<ByteNumbers<Bf16>>([&](long term, auto pair) {
      const __m512i first = bits(FourTerms<float>::template step<2 * pair()>(v) * scale - offset),
                    second = bits(FourTerms<float>::template step<2 * pair() + 1>(v) * scale - offset);
      put_any(to + term * kPanel + half * kLanes * 2, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
    });
  }
  static inline __m512i bits(Vec v) {
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v));
  }
};
#endif

template <class T>
class ScaledKernel {
 public:
  typedef TermOf<T> Term;
  typedef BlockProduct<Term> Product;
  static constexpr long kSize = sizeof(Term);
  static constexpr long kFew = 0;
  static long prepared_floats(long, const Quantized&) { return 0; }

  ScaledKernel(const Quantized& w, Inputs<T> x, float*) : w_(&w), x_(x) {}
  // Returns a kernel of the same rows and another matrix.
  ScaledKernel of(const Quantized& w) const {
    ScaledKernel other = *this;
    other.w_ = &w;
    return other;
  }

  void prepare(Pool&, long) const {}

  // Adds a part to the sums [rows][32], which continue those of the terms before the part, if any.
  void add(Product& product, const Part& part, float* sums) const {
    const auto put = [this](const Part& piece, const uint8_t* from, Term* to, Ahead& ahead) {
      unpack_scaled(piece, from, to, ahead);
    };
    add_unpacked<T>(product, *w_, x_, part, sums, put);
  }

  void complete(long, long, float*) const {}

 private:
  void unpack_scaled(const Part& piece, const uint8_t* from, Term* to, Ahead& ahead) const {
    constexpr long kTerms = 4;
    for (long k = 0; k < piece.terms; k += w_->group) {
      if (k % kTermsMultiple == 0) ahead.ask();
      const long g = (piece.k + k) / w_->group;
      Vec scale[2], offset[2] = {};
      for (long half = 0; half < 2; half++) {
        scale[half] = load(w_->scale(piece.p, g) + half * kLanes);
        if (w_->offsets) offset[half] = load(w_->offset(piece.p, g) + half * kLanes);
      }
      for (long i = k; i < k + w_->group; i += kTerms, from += kWordsBytes)
        for (long half = 0; half < 2; half++)
          ScaledTerms<Term>::put(load_any<WordVec>(from + half * (kWordsBytes / 2)), scale[half], offset[half],
                                 to + i * kPanel, half);
    }
  }

  const Quantized* w_;
  Inputs<T> x_;
};

}  // namespace antiphon
