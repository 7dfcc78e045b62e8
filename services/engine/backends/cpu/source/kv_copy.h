// Copies a KV block between the pieces of a cache and contiguous memory, and sums the words for its checksum on the way
// (services/engine/kv/pieces.py). Memory is the limit: what is read next is prefetched, and pieces, which the engine does
// not use soon, are written past the caches, so that their memory need not be read first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace antiphon {

constexpr long kRowWords = 512, kRowBytes = 8 * kRowWords;
// How far ahead of the copy its source is prefetched.
constexpr long kAheadBytes = 1024;
// Bytes that are copied at once: a cache line.
constexpr long kLine = 64;

typedef uint64_t Words __attribute__((vector_size(32)));

// Adds a row to the columns' sums and returns its own sum.
inline uint64_t add_row(const char* __restrict row, uint64_t* __restrict columns) {
  uint64_t sum = 0;
  for (long i = 0; i < kRowWords; i++) {
    uint64_t word;
    std::memcpy(&word, row + 8 * i, 8);
    columns[i] += word;
    sum += word;
  }
  return sum;
}

template <bool kPast>
inline void put_words(char* to, const Words& words) {
#ifdef __AVX__
  if (kPast) return _mm256_stream_si256((__m256i*)to, (__m256i)words);
#endif
  std::memcpy(to, &words, sizeof(words));
}

// As add_row, and copies the row. `kPast`: past the caches; `to` is then a multiple of 32 bytes.
template <bool kPast>
inline uint64_t copy_row(char* __restrict to, const char* __restrict from, uint64_t* __restrict columns) {
  Words sums = {};
  for (long i = 0; i < kRowBytes; i += kLine) {
    __builtin_prefetch(from + i + kAheadBytes);
    if (!kPast) __builtin_prefetch(to + i + kAheadBytes, 1);
    for (long j = i; j < i + kLine; j += (long)sizeof(Words)) {
      Words words, column;
      std::memcpy(&words, from + j, sizeof(words));
      put_words<kPast>(to + j, words);
      std::memcpy(&column, columns + j / 8, sizeof(column));
      column += words;
      std::memcpy(columns + j / 8, &column, sizeof(column));
      sums += words;
    }
  }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

// See antiphon_copy_block. The rows that are summed are those of the contiguous memory; a piece may end within a word.
template <bool kToPieces>
void copy_block(char* const* pieces, long count, long piece_bytes, char* whole, uint64_t* sums) {
  alignas(64) uint64_t columns[kRowWords] = {};
  uint64_t* rows = sums + kRowWords;
  long at = 0;
  for (long piece = 0; piece < count; piece++)
    for (long done = 0; done < piece_bytes;) {
      const long some = std::min(piece_bytes - done, kRowBytes - at % kRowBytes);
      char* const here = pieces[piece] + done;
      char *const to = kToPieces ? here : whole + at, *const from = kToPieces ? whole + at : here;
      at += some, done += some;
      if (some < kRowBytes) {
        std::memcpy(to, from, (size_t)some);
        if (at % kRowBytes == 0) *rows++ = add_row(whole + at - kRowBytes, columns);
      } else if (kToPieces && (uintptr_t)to % sizeof(Words) == 0) {
        *rows++ = copy_row<true>(to, from, columns);
      } else {
        *rows++ = copy_row<false>(to, from, columns);
      }
    }
#ifdef __AVX__
  if (kToPieces) _mm_sfence();
#endif
  std::memcpy(sums, columns, sizeof(columns));
}

}  // namespace antiphon
