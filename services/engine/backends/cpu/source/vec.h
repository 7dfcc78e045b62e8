// Vectors of 16 floats and the arithmetic that a decoder needs on them, for every instruction set.
//
// AVX-512 holds a vector in one register, AVX2 in two, NEON in four. Vectors of one register are the compiler's own
// types, others those of twice.h. Intrinsics are used only where the compiler does not generate the instruction by
// itself. Every sum over lanes has a fixed order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "twice.h"

namespace antiphon {

constexpr long kLanes = 16;
#if defined(__AVX512F__)
constexpr long kRegisterLanes = 16;
#elif defined(__AVX2__)
constexpr long kRegisterLanes = 8;
#else
constexpr long kRegisterLanes = 4;
#endif

template <class Element, long kCount>
struct Lanes {
  typedef Twice<typename Lanes<Element, kCount / 2>::Type> Type;
};
template <class Element>
struct Lanes<Element, kRegisterLanes> {
  typedef Element Type __attribute__((vector_size(kRegisterLanes * sizeof(Element))));
};
typedef Lanes<float, kRegisterLanes>::Type Register;

typedef Lanes<float, kLanes>::Type Vec;
typedef Lanes<int32_t, kLanes>::Type IntVec;
typedef Lanes<uint32_t, kLanes>::Type WordVec;
typedef Lanes<uint16_t, kLanes>::Type HalfVec;
typedef Lanes<int8_t, kLanes>::Type ByteVec;

// A bfloat16 number: the upper half of a float.
struct Bf16 {
  uint16_t bits;
};

inline Vec broadcast(float x) { return x - Vec{}; }

template <class V>
inline V load_any(const void* from) {
  return Parts<V>::load(from);
}

template <class V>
inline void put_any(void* to, V v) {
  Parts<V>::put(to, v);
}

// Converts each element.
template <class To, class From>
inline To convert(From v) {
  return Parts<To>::convert(v);
}

inline Vec load(const float* from) { return load_any<Vec>(from); }
inline void store(float* to, Vec v) { put_any(to, v); }

inline WordVec widen(HalfVec v) { return convert<WordVec>(v); }

inline Vec load(const Bf16* from) { return (Vec)(widen(load_any<HalfVec>(from)) << 16); }

inline HalfVec to_bf16(Vec v) {
#if defined(__AVX512BF16__)
  return (HalfVec)_mm512_cvtneps_pbh((__m512)v);
#else
  WordVec bits = (WordVec)v;
  WordVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  WordVec quiet = (bits >> 16) | 0x40;
  IntVec nan = v != v;
  return convert<HalfVec>((rounded & ~(WordVec)nan) | (quiet & (WordVec)nan));
#endif
}

inline void store(Bf16* to, Vec v) { put_any(to, to_bf16(v)); }

// Stores two vectors one after the other.
inline void store_pair(float* to, Vec left, Vec right) {
  store(to, left);
  store(to + kLanes, right);
}
inline void store_pair(Bf16* to, Vec left, Vec right) {
#if defined(__AVX512BF16__)
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)right, (__m512)left);
  std::memcpy(to, &both, sizeof both);
#else
  store(to, left);
  store(to + kLanes, right);
#endif
}

inline float to_float(Bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
inline float to_float(float x) { return x; }

inline Bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return {(uint16_t)((bits >> 16) | 0x40)};
  return {(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
inline void assign(Bf16& to, float x) { to = to_bf16(x); }
inline void assign(float& to, float x) { to = x; }

// Sets to[2 * i + which] = v[i]. The elements in between are not written, because another thread may be writing them.
inline void store_alternate(Bf16* to, Vec v, long which) {
  alignas(64) Bf16 rounded[kLanes];
  store(rounded, v);
#if defined(__AVX512BW__)
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i*)rounded));
  _mm512_mask_storeu_epi16(to, which ? 0xaaaaaaaau : 0x55555555u, _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16)));
#else
  for (long i = 0; i < kLanes; i++) to[2 * i + which] = rounded[i];
#endif
}

// Transposes 16 vectors of 16 words.
inline void transpose(WordVec (&m)[16]) {
#if defined(__AVX512F__)
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)m[i], (__m512i)m[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)m[i], (__m512i)m[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  // Now lane l of b[4 q + c] has words 4 q to 4 q + 3 of column 4 l + c.
  for (int c = 0; c < 4; c++) {
    const __m512i low = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88), odd = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
    const __m512i more = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88),
                  last = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
    m[c] = (WordVec)_mm512_shuffle_i32x4(low, more, 0x88), m[8 + c] = (WordVec)_mm512_shuffle_i32x4(low, more, 0xdd);
    m[4 + c] = (WordVec)_mm512_shuffle_i32x4(odd, last, 0x88),
          m[12 + c] = (WordVec)_mm512_shuffle_i32x4(odd, last, 0xdd);
  }
#else
  uint32_t words[16][16], columns[16][16];
  for (int i = 0; i < 16; i++) put_any(words[i], m[i]);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) columns[i][j] = words[j][i];
  for (int i = 0; i < 16; i++) m[i] = load_any<WordVec>(columns[i]);
#endif
}

inline Vec select(IntVec mask, Vec yes, Vec no) { return Parts<Vec>::select(mask, yes, no); }

// Returns `b` where `a` or `b` is NaN, so that a NaN in `a` is never chosen over a number in `b`.
inline Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return {(Register)_mm256_max_ps((__m256)a.low, (__m256)b.low),
          (Register)_mm256_max_ps((__m256)a.high, (__m256)b.high)};
#else
  return select(a > b, a, b);
#endif
}
inline Vec min(Vec a, Vec b) { return select(a < b, a, b); }

inline float sum_lanes(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#endif
  float part[kLanes];
  store(part, v);
  for (long width = kLanes / 2; width; width /= 2)
    for (long i = 0; i < width; i++) part[i] += part[i + width];
  return part[0];
}

inline float max_lanes(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float part[kLanes];
  store(part, v);
  for (long i = 1; i < kLanes; i++) part[0] = part[i] > part[0] ? part[i] : part[0];
  return part[0];
#endif
}

// Stores the first `count` lanes; the memory of the others is not written.
template <class T>
inline void store_some(T* to, Vec v, long count) {
  if (count == kLanes) return store(to, v);
  T all[kLanes];
  store(all, v);
  std::memcpy(to, all, count * sizeof(T));
}

inline Vec load_some(const float* from, long count) {
  if (count == kLanes) return load(from);
  float all[kLanes] = {};
  std::memcpy(all, from, count * sizeof(float));
  return load(all);
}

inline IntVec lane_numbers() {
  static constexpr int32_t numbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_any<IntVec>(numbers);
}

// Returns 2^x for x up to 127; 0 for x far below 0. Relative error 1e-7, with `coarse` 3e-6 (far below what bfloat16
// can represent).
template <bool coarse = false>
inline Vec exp2(Vec x) {
#if defined(__AVX512F__)
  Vec whole = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  x = max(x, broadcast(-200.0f));
  Vec whole = (x + magic) - magic;
#endif
  Vec f = x - whole;
  Vec p;
  if constexpr (coarse) {
    p = broadcast(9.570047450e-3f) * f + broadcast(5.591785603e-2f);
    p = p * f + broadcast(2.402474617e-1f);
    p = p * f + broadcast(6.931218155e-1f);
    p = p * f + broadcast(9.999992610e-1f);
  } else {
    p = broadcast(1.534576524e-4f) * f + broadcast(1.339993084e-3f);
    p = p * f + broadcast(9.618489131e-3f);
    p = p * f + broadcast(5.550328778e-2f);
    p = p * f + broadcast(2.402264689e-1f);
    p = p * f + broadcast(6.931472057e-1f);
    p = p * f + broadcast(1.0f);
  }
#if defined(__AVX512F__)
  // Lanes with result 0 are masked out: the processor takes a hundred times as long for results without a normal
  // exponent.
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)whole, _mm512_set1_ps(-125), _CMP_GE_OQ);
  return (Vec)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)whole);
#else
  const IntVec exponent = convert<IntVec>(whole);
  Vec scaled = (Vec)((IntVec)p + (exponent << 23));
  return select(exponent < -125, Vec{}, scaled);
#endif
}

constexpr float kLog2E = 1.44269504088896f;

template <bool coarse = false>
inline Vec exp(Vec x) {
  return exp2<coarse>(min(x, broadcast(88.0f)) * kLog2E);
}

// Returns 1 / x. With `coarse`, the relative error is 7e-5 and the result for infinity is right.
template <bool coarse = false>
inline Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
  const Vec guess = (Vec)_mm512_rcp14_ps((__m512)x);
  if constexpr (coarse) return guess;
  return guess * (2.0f - x * guess);
#else
  return 1.0f / x;
#endif
}

template <bool coarse = false>
inline Vec sigmoid(Vec x) {
#if defined(__AVX512F__)
  if constexpr (coarse) return reciprocal<true>(1.0f + exp2<true>(x * -kLog2E));
#endif
  return reciprocal(1.0f + exp<coarse>(-x));
}

inline Vec tanh(Vec x) {
  Vec wide = 1.0f - 2.0f / (1.0f + exp(x + x));
  // Near zero the difference above would lose digits, so a series is used.
  Vec square = x * x;
  Vec narrow = x * (1.0f + square * (broadcast(-1.0f / 3) + square * (broadcast(2.0f / 15) - square * (17.0f / 315))));
  return select(square < 0.01f, narrow, wide);
}

// Returns the error function, with an absolute error of 2e-7 (Abramowitz and Stegun, 7.1.26).
inline Vec erf(Vec x) {
  Vec size = select(x < 0.0f, -x, x);
  Vec t = 1.0f / (1.0f + 0.3275911f * size);
  Vec p = broadcast(1.061405429f) * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  Vec y = 1.0f - p * t * exp(-size * size);
  return select(x < 0.0f, -y, y);
}

}  // namespace antiphon
