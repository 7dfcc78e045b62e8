// Copies a KV block between the pieces of a cache and contiguous memory, and sums the words for its checksum while they
// are in the L1 cache (services/engine/kv/pieces.py). Memory is the limit, not the sums: plain loops are enough.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace antiphon {

constexpr long kRowWords = 512, kRowBytes = 8 * kRowWords;

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

// Copies a row to a piece. The engine does not use the block soon: past the caches, its memory need not be read first.
inline void put_row(char* to, const char* from) {
#ifdef __AVX__
  if ((uintptr_t)to % sizeof(__m256i) == 0) {
    for (long i = 0; i < kRowBytes; i += (long)sizeof(__m256i))
      _mm256_stream_si256((__m256i*)(to + i), _mm256_loadu_si256((const __m256i*)(from + i)));
    return;
  }
#endif
  std::memcpy(to, from, kRowBytes);
}

// See antiphon_copy_block. The rows that are summed are those of the contiguous memory; a piece may end within a word.
template <bool kToPieces>
void copy_block(char* const* pieces, long count, long piece_bytes, char* whole, uint64_t* sums) {
  uint64_t columns[kRowWords] = {};
  uint64_t* rows = sums + kRowWords;
  long at = 0;
  for (long piece = 0; piece < count; piece++)
    for (long done = 0; done < piece_bytes;) {
      const long some = std::min(piece_bytes - done, kRowBytes - at % kRowBytes);
      char* const here = pieces[piece] + done;
      char *const to = kToPieces ? here : whole + at, *const from = kToPieces ? whole + at : here;
      if (kToPieces && some == kRowBytes)
        put_row(to, from);
      else if (some == kRowBytes)  // a copy of a constant size is compiled to plain loads and stores
        std::memcpy(to, from, kRowBytes);
      else
        std::memcpy(to, from, (size_t)some);
      at += some, done += some;
      if (at % kRowBytes == 0) *rows++ = add_row(whole + at - kRowBytes, columns);
    }
#ifdef __AVX__
  if (kToPieces) _mm_sfence();
#endif
  std::memcpy(sums, columns, sizeof(columns));
}

}  // namespace antiphon
