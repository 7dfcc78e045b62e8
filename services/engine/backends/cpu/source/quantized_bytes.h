// The elementary product of rows and columns of 8 bits, in whole numbers; pair.h has that of the other types.
//
//     acc[j] += sum over i < 4 of x[i] * q[j * 4 + i]
//
// AVX512-VNNI has this product as an instruction with an unsigned x: there 128 is added to x, and the sums of the
// matrix's columns are used to subtract the excess.
#pragma once

#include "quantized.h"

namespace antiphon {

#if defined(__AVX512VNNI__)
struct Bytes {
  static constexpr int32_t kMore = 128;  // what is added to x
  typedef __m512i Sum;
  typedef __m512i Word;
  typedef __m512i Spread;

  static Sum load(const int32_t* from) { return _mm512_loadu_si512(from); }
  static void store(int32_t* to, Sum v) { _mm512_storeu_si512(to, v); }
  static Word word(const uint8_t* w) { return _mm512_loadu_si512(w); }
  static Spread spread(const uint8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
  }
  static Sum add(Sum acc, Spread x, Word w) { return _mm512_dpbusd_epi32(acc, x, w); }
};
#elif defined(__AVX2__) && !defined(__AVX512F__)
// The instruction for bytes takes an unsigned first factor: the absolute values of w, with the signs moved to x. Two of
// its products, of at most 128 * 127 each, are added in 16 bits without overflow.
struct Bytes {
  static constexpr int32_t kMore = 0;
  static constexpr int kParts = 2;
  struct Sum {
    __m256i part[kParts];
  };
  struct Word {
    __m256i part[kParts], size[kParts];
  };
  typedef __m256i Spread;

  static Sum load(const int32_t* from) { return load_any<Sum>(from); }
  static void store(int32_t* to, const Sum& v) { std::memcpy(to, &v, sizeof v); }
  static Word word(const uint8_t* w) {
    __m256i part[kParts];
    for (int i = 0; i < kParts; i++) part[i] = _mm256_loadu_si256((const __m256i*)(w + i * 32));
    return word(part);
  }
  static Word word(const __m256i* part) {
    Word word;
    for (int i = 0; i < kParts; i++) word.part[i] = part[i], word.size[i] = _mm256_abs_epi8(part[i]);
    return word;
  }
  static Spread spread(const uint8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
  }
  static Sum add(Sum acc, Spread x, const Word& w) {
    for (int i = 0; i < kParts; i++) {
      const __m256i pairs = _mm256_maddubs_epi16(w.size[i], _mm256_sign_epi8(x, w.part[i]));
      acc.part[i] = _mm256_add_epi32(acc.part[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return acc;
  }
};
#elif defined(__AVX512F__)
// Even and odd terms are processed separately, in words of 16 bits, in which the products of two terms cannot overflow.
struct Bytes {
  static constexpr int32_t kMore = 0;
  static constexpr int kParts = 1;
  typedef __m512i Register;
  static Register even(Register w) { return _mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8); }
  static Register odd(Register w) { return _mm512_srai_epi16(w, 8); }
  static Register same(int32_t pair) { return _mm512_set1_epi32(pair); }
  static Register multiply(Register a, Register b) { return _mm512_madd_epi16(a, b); }
  static Register plus(Register a, Register b) { return _mm512_add_epi32(a, b); }
  struct Sum {
    Register part[kParts];
  };
  struct Word {
    Register even[kParts], odd[kParts];
  };
  struct Spread {
    Register even, odd;
  };

  static Sum load(const int32_t* from) { return load_any<Sum>(from); }
  static void store(int32_t* to, const Sum& v) { std::memcpy(to, &v, sizeof v); }
  static Word word(const uint8_t* w) {
    Word word;
    for (int i = 0; i < kParts; i++) {
      const Register bytes = load_any<Register>(w + i * sizeof(Register));
      word.even[i] = even(bytes), word.odd[i] = odd(bytes);
    }
    return word;
  }
  static int32_t pair(uint8_t first, uint8_t second) {
    return (int32_t)(((uint32_t)(int32_t)(int8_t)first & 0xffff) | ((uint32_t)(int32_t)(int8_t)second << 16));
  }
  static Spread spread(const uint8_t* x) { return {same(pair(x[0], x[2])), same(pair(x[1], x[3]))}; }
  static Sum add(Sum acc, const Spread& x, const Word& w) {
    for (int i = 0; i < kParts; i++)
      acc.part[i] = plus(acc.part[i], plus(multiply(x.even, w.even[i]), multiply(x.odd, w.odd[i])));
    return acc;
  }
};
#else
struct Bytes {
  static constexpr int32_t kMore = 0;
  struct Word {
    IntVec term[4];
  };
  struct Spread {
    int32_t term[4];
  };
  typedef IntVec Sum;

  static Sum load(const int32_t* from) { return load_any<Sum>(from); }
  static void store(int32_t* to, Sum v) { std::memcpy(to, &v, sizeof v); }
  static Word word(const uint8_t* w) {
    const WordVec v = load_any<WordVec>(w);
    return {{(IntVec)(v << 24) >> 24, (IntVec)(v << 16) >> 24, (IntVec)(v << 8) >> 24, (IntVec)v >> 24}};
  }
  static Spread spread(const uint8_t* x) { return {{(int8_t)x[0], (int8_t)x[1], (int8_t)x[2], (int8_t)x[3]}}; }
  static Sum add(Sum acc, const Spread& x, const Word& w) {
    for (int i = 0; i < 4; i++) acc += w.term[i] * x.term[i];
    return acc;
  }
};
#endif

// The number of rows that are multiplied at once. The sums of 12 rows would fit into the registers of AVX-512, but with 8
// rows products of 32 rows and more are a fifth faster. AVX2 has registers for the sums of 5 rows and one half of a
// panel; with 1 or 2 rows, both halves are multiplied together, because reading the panel takes most of the time.
#if defined(__AVX512F__)
constexpr int kByteRows = 8, kBothHalves = kByteRows;
#elif defined(__AVX2__)
constexpr int kByteRows = 5, kBothHalves = 2;
#else
constexpr int kByteRows = 3, kBothHalves = kByteRows;
#endif

template <int kRows>
inline void multiply_byte_rows(const uint8_t* x, long stride, const uint8_t* panel, long terms, int32_t* sums,
                               Ahead& ahead) {
  constexpr int kHalves = kRows <= kBothHalves ? 2 : 1;
  for (int first = 0; first < 2; first += kHalves) {
    int32_t* const to = sums + first * kLanes;
    Bytes::Sum acc[kRows][kHalves];
    for (int r = 0; r < kRows; r++)
      for (int half = 0; half < kHalves; half++) acc[r][half] = Bytes::load(to + r * kPanel + half * kLanes);
    for (long step = 0; step < terms; step += kByteTermsMultiple) {
      if (!first) ahead.ask();
      for (long k = step; k < step + kByteTermsMultiple; k += 4) {
        Bytes::Word w[kHalves];
        for (int half = 0; half < kHalves; half++) w[half] = Bytes::word(panel + k * kPanel + (first + half) * 64);
        for (int r = 0; r < kRows; r++) {
          const auto spread = Bytes::spread(x + r * stride + k);
          for (int half = 0; half < kHalves; half++) acc[r][half] = Bytes::add(acc[r][half], spread, w[half]);
        }
      }
    }
    for (int r = 0; r < kRows; r++)
      for (int half = 0; half < kHalves; half++) Bytes::store(to + r * kPanel + half * kLanes, acc[r][half]);
  }
}

template <int kRows = kByteRows>
void multiply_some_bytes(long rows, const uint8_t* x, long stride, const uint8_t* panel, long terms, int32_t* sums,
                         Ahead& ahead) {
  if (rows >= kRows) return multiply_byte_rows<kRows>(x, stride, panel, terms, sums, ahead);
  if constexpr (kRows > 1) multiply_some_bytes<kRows - 1>(rows, x, stride, panel, terms, sums, ahead);
}

// Multiplies blocks of up to kBlockRows rows and adds to the sums [rows][32].
class ByteProduct {
 public:
#if defined(__AMX_INT8__)
  static constexpr int32_t kMore = 0;
#else
  static constexpr int32_t kMore = Bytes::kMore;
#endif

  void multiply(long rows, const uint8_t* x, long stride, const uint8_t* panel, long terms, int32_t* sums,
                Ahead& ahead) {
#if defined(__AMX_INT8__)
    if (rows != shaped_) TileShape(std::min(rows, kTileRows), std::max(rows - kTileRows, 0L)).use();
    shaped_ = rows;
    if (rows > kTileRows)
      pass<true>(x, stride, panel, terms, sums, ahead);
    else
      pass<false>(x, stride, panel, terms, sums, ahead);
#else
    long first = 0;
    for (long left = (rows + kByteRows - 1) / kByteRows; left; left--) {
      const long count = (rows - first + left - 1) / left;
      multiply_some_bytes(count, x + first * stride, stride, panel, terms, sums + first * kPanel, ahead);
      first += count;
    }
#endif
  }

#if defined(__AMX_INT8__)
 private:
  template <bool kBoth>
  static void pass(const uint8_t* x, long stride, const uint8_t* panel, long terms, int32_t* sums, Ahead& ahead) {
    publish_stores();
    const uint8_t* below = x + kTileRows * stride;
    load_sums<kBoth>((const float*)sums, true);
    for (long k = 0; k < terms; k += kByteTermsMultiple) {
      const uint8_t* w = panel + k * kPanel;
      ahead.ask();
      _tile_stream_loadd(4, x + k, stride);
      _tile_loadd(6, w, 128);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, w + 64, 128);
      _tile_dpbssd(1, 4, 7);
      if constexpr (kBoth) {
        _tile_stream_loadd(5, below + k, stride);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      }
    }
    store_sums<kBoth>((float*)sums);
  }

  long shaped_ = 0;
#endif
};

}  // namespace antiphon
