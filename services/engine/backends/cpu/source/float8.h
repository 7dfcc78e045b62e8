// Floating-point numbers of 8 bits, in which a KV cache can be stored: E4M3 (4 bits of exponent, 3 of mantissa) and
// E5M2.
//
// A number is clamped to the range of the type and rounded to the nearest one, of two equally near ones to the even
// one. NaN stays NaN; infinity is never stored. All numbers are bfloat16 numbers too, so reading them is exact.
#pragma once

#include "pair.h"

namespace antiphon {

struct E4m3 {
  static constexpr int kMantissa = 3, kBias = 7;
  static constexpr int32_t kNan = 0x7f;  // the first bits, without the sign, that are no finite number
  static constexpr float kLargest = 448;
  uint8_t bits;
};

struct E5m2 {
  static constexpr int kMantissa = 2, kBias = 15;
  static constexpr int32_t kNan = 0x7c;
  static constexpr float kLargest = 57344;
  uint8_t bits;
};

// Returns 2^exponent.
constexpr float power_of_two(int exponent) {
  float x = 1;
  for (; exponent > 0; exponent--) x *= 2;
  for (; exponent < 0; exponent++) x /= 2;
  return x;
}

// Returns the numbers with these bits; the upper 24 bits of each element are ignored.
template <class Eight>
Vec from_eight(IntVec bits) {
  constexpr int kShift = 23 - Eight::kMantissa;
  const WordVec size = (WordVec)bits & 0x7f;
  const Vec normal = (Vec)((size << kShift) + ((uint32_t)(127 - Eight::kBias) << 23));
  const Vec subnormal = convert<Vec>((IntVec)size) * power_of_two(1 - Eight::kBias - Eight::kMantissa);
  Vec v = select((IntVec)size < (1 << Eight::kMantissa), subnormal, normal);
  v = select((IntVec)size >= Eight::kNan, broadcast(__builtin_nanf("")), v);
  return (Vec)((WordVec)v | ((WordVec)bits & 0x80) << 24);
}

// Returns the bits of the nearest numbers.
template <class Eight>
IntVec to_eight(Vec v) {
  constexpr int kShift = 23 - Eight::kMantissa;
  const WordVec bits = (WordVec)v;
  const Vec size = min((Vec)(bits & 0x7fffffffu), broadcast(Eight::kLargest));
  const WordVec exact = (WordVec)size;
  const WordVec normal = ((exact + ((1u << (kShift - 1)) - 1) + ((exact >> kShift) & 1)) >> kShift) -
                         ((uint32_t)(127 - Eight::kBias) << Eight::kMantissa);
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Vec whole = (size * power_of_two(Eight::kBias - 1 + Eight::kMantissa) + magic) - magic;
  const IntVec small = size < power_of_two(1 - Eight::kBias);
  const Vec found = select(small, (Vec)convert<IntVec>(select(small, whole, Vec{})), (Vec)normal);
  const Vec kept = select(v != v, (Vec)(IntVec{} + 0x7f), found);
  return (IntVec)((WordVec)kept | ((bits >> 24) & 0x80));
}

inline void store(E4m3* to, Vec v) { put_any(to, convert<ByteVec>(to_eight<E4m3>(v))); }
inline void store(E5m2* to, Vec v) { put_any(to, convert<ByteVec>(to_eight<E5m2>(v))); }

// As for Bf16 in vec.h.
template <class Eight>
void store_alternate(Eight* to, Vec v, long which) {
  Eight rounded[kLanes];
  store(rounded, v);
  for (long i = 0; i < kLanes; i++) to[2 * i + which] = rounded[i];
}

// Converts numbers, `expand(from, count, to)`, in the order in which they are stored.
template <class Eight>
class Expander {
 public:
  Expander() {
    for (long first = 0; first < kCodes; first += kLanes) {
      const Vec some = from_eight<Eight>(lane_numbers() + (int32_t)first);
      store(floats_ + first, some);
      store(halves_ + first, some);
    }
  }

  void expand(const Eight* from, long count, float* to) const {
    long i = 0;
    for (; i + kLanes <= count; i += kLanes)
      store(to + i, from_eight<Eight>(convert<IntVec>(load_any<ByteVec>(from + i))));
    for (; i < count; i++) to[i] = floats_[from[i].bits];
  }

  void expand(const Eight* from, long count, Bf16* to) const {
    long i = 0;
#if defined(__AVX512BW__)
    const __m512i a = table(0), b = table(1), c = table(2), d = table(3);
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
      const __m512i codes = _mm512_cvtepi8_epi16(load_any<__m256i>(from + i));
      const __m512i low = _mm512_permutex2var_epi16(a, codes, b), high = _mm512_permutex2var_epi16(c, codes, d);
      const __m512i size = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x40)), high);
      const __m512i sign = _mm512_set1_epi16((short)0x8000);
      put_any(to + i, _mm512_ternarylogic_epi32(size, codes, sign, 0xf8));  // size | (codes & sign)
    }
#endif
    for (; i + kLanes <= count; i += kLanes)
      store(to + i, from_eight<Eight>(convert<IntVec>(load_any<ByteVec>(from + i))));
    for (; i < count; i++) to[i] = halves_[from[i].bits];
  }

 private:
  static constexpr long kCodes = 256;

#if defined(__AVX512BW__)
  __m512i table(long part) const { return load_any<__m512i>(halves_ + part * 2 * kLanes); }
#endif

  alignas(64) float floats_[kCodes];
  alignas(64) Bf16 halves_[kCodes];
};

template <class Eight>
const Expander<Eight>& expander() {
  static const Expander<Eight> only;
  return only;
}

}  // namespace antiphon
