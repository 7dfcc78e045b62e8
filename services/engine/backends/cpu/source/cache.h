// The paged KV cache in this backend's layout: the keys and the values of a block and a head are panels (see block.h),
// stored pair by pair, so that scores and weighted sums are products of rows with panels.
//
//     keys    [blocks][kv_heads][block_size / p][width / kTerms][p tokens][kTerms]            p = min(32, block_size)
//     values  [blocks][kv_heads][block_size / u][width / 32][u / e][32 dimensions][e tokens]  u = min(64, block_size)
//
// `width` is the head's dimensions padded to a multiple of 32, e = min(kTerms, u). Attention reads units of 64 tokens.
// If blocks are smaller, `Unit` copies several blocks into one unit. Numbers are of the model's type, or of 8 bits in
// the same order (float8.h), which `Unit` converts.
//
// Of latent attention (latent.h) there are keys only, the rows of latents. `Unit` makes the values of them.
#pragma once

#include "float8.h"
#include "matrix.h"

namespace antiphon {

constexpr long kUnit = 64;
constexpr long kWidthMax = 576;

// The type of the numbers in the cache; spec.cache is its index.
enum class Stored : int64_t { model, e4m3, e5m2 };

// A layer's keys and values; CacheShape says what they consist of.
struct Cache {
  void* keys = nullptr;
  void* values = nullptr;
  long tables = 0;  // the group of block tables that has its blocks
};

struct CacheShape {
  long kv_heads = 0, head_dim = 0, width = 0, block_size = 0;
  Stored stored = Stored::model;
  long size = 0;       // bytes of a number
  long value_dim = 0;  // width of a value as it is attended
  bool latent = false;  // whether keys are rows of latents, and there are no values
  long stride = 0;      // numbers from one block to the next: layers that share a tensor lie between

  // Returns the address of a number in keys or values.
  const char* at(const void* numbers, long offset) const { return (const char*)numbers + offset * size; }
  long block_elements() const { return kv_heads * block_size * width; }
  long offset(long block, long head) const { return block * stride + head * block_size * width; }
  // Returns the offset of `key`, which a panel begins with, in the cache of the sequence with these blocks.
  long offset(const int64_t* blocks, long head, long key) const {
    return offset(blocks[key / block_size], head) + key % block_size * width;
  }
  long value_panels() const { return (value_dim + kPanel - 1) / kPanel; }
  // Whether blocks contain whole units.
  bool holds_units() const { return block_size >= kUnit; }
};

template <class T>
CacheShape make_cache_shape(long kv_heads, long head_dim, long block_size, Stored stored, long latent_rank) {
  const long size = stored == Stored::model ? (long)sizeof(T) : 1;
  // A latent is padded, so that it can be multiplied by a matrix.
  const long value_dim = latent_rank ? round_up(latent_rank, kTermsMultiple) : head_dim;
  const long width = round_up(head_dim, kTermsMultiple);
  return {kv_heads, head_dim, width, block_size, stored, size, value_dim, latent_rank > 0, kv_heads * block_size * width};
}

// Calls `work` with an object of the type that the cache stores in place of T.
template <class T, class Work>
void with_stored(const CacheShape& shape, Work&& work) {
  switch (shape.stored) {
    case Stored::model:
      return work(T{});
    case Stored::e4m3:
      return work(E4m3{});
    case Stored::e5m2:
      return work(E5m2{});
  }
}

// The functions that write take the model's type T and the type S that is stored.
template <class T, class S>
void write_key(const CacheShape& shape, S* keys, long block, long head, long place, const float* key) {
  constexpr long kTerms = Pair<T>::kTerms;
  const long tokens = std::min(kPanel, shape.block_size);
  S* panel = keys + shape.offset(block, head) + place / tokens * tokens * shape.width + place % tokens * kTerms;
  S rounded[kWidthMax];
  for (long d = 0; d < shape.width; d += kLanes) {
    const long count = std::max(0L, std::min(kLanes, shape.head_dim - d));
    store(rounded + d, load_some(key + d, count));
  }
  for (long d = 0; d < shape.width; d += kTerms) std::memcpy(panel + d * tokens, rounded + d, kTerms * sizeof(S));
}

template <class T, class S>
void write_value(const CacheShape& shape, S* values, long block, long head, long place, const float* value) {
  const long tokens = std::min(kUnit, shape.block_size), terms = std::min(Pair<T>::kTerms, tokens);
  const long token = place % tokens;
  S* unit = values + shape.offset(block, head) + place / tokens * tokens * shape.width + token / terms * kPanel * terms;
  for (long d = 0; d < shape.width; d += kLanes) {
    const Vec some = load_some(value + d, std::max(0L, std::min(kLanes, shape.head_dim - d)));
    S* to = unit + d / kPanel * tokens * kPanel + d % kPanel * terms;
    if constexpr (Pair<T>::kTerms == 2)
      if (terms == 2) {
        store_alternate(to, some, token % 2);
        continue;
      }
    store(to, some);
  }
}

// The number of consecutive tokens whose keys or values are written together, since they fill whole cache lines. Their
// first place is a multiple of this number, in blocks that hold as many; `rows` is [16][head_dim].
constexpr long kTokensTogether = 16;

// Loads 16 vectors of the rows from column `d` on, with one or two numbers per word, zero after the head's last
// dimension.
inline void gather_words(const Rows<float>& rows, long d, long head_dim, WordVec (&words)[kTokensTogether], float) {
  const long count = std::max(0L, std::min(kLanes, head_dim - d));
  for (long i = 0; i < kTokensTogether; i++) words[i] = (WordVec)load_some(rows.row(i) + d, count);
}
inline void gather_words(const Rows<float>& rows, long d, long head_dim, WordVec (&words)[kTokensTogether], Bf16) {
  const long count = std::max(0L, std::min(kLanes, head_dim - d));
  const long more = std::max(0L, std::min(kLanes, head_dim - d - kLanes));
  for (long i = 0; i < kTokensTogether; i++) {
    const float* from = rows.row(i) + d;
    Bf16 rounded[2 * kLanes];
    store_pair(rounded, load_some(from, count), load_some(from + kLanes, more));
    words[i] = load_any<WordVec>(rounded);
  }
}

template <class T>
void write_keys(const CacheShape& shape, T* keys, long block, long head, long place, const Rows<float>& rows, T) {
  constexpr long kTerms = Pair<T>::kTerms;
  const long tokens = std::min(kPanel, shape.block_size);
  T* panel = keys + shape.offset(block, head) + place / tokens * tokens * shape.width + place % tokens * kTerms;
  WordVec words[kTokensTogether];
  for (long d = 0; d < shape.width; d += kLanes * kTerms) {
    gather_words(rows, d, shape.head_dim, words, T{});
    transpose(words);
    for (long i = 0; i < kLanes; i++) put_any(panel + (d + i * kTerms) * tokens, words[i]);
  }
}

template <class T, class Eight>
void write_keys(const CacheShape& shape, Eight* keys, long block, long head, long place, const Rows<float>& rows, T) {
  for (long i = 0; i < kTokensTogether; i++) write_key<T>(shape, keys, block, head, place + i, rows.row(i));
}

template <class T, class S>
void write_values(const CacheShape& shape, S* values, long block, long head, long place, const Rows<float>& rows, T) {
  for (long i = 0; i < kTokensTogether; i++) write_value<T>(shape, values, block, head, place + i, rows.row(i));
}

inline void write_values(const CacheShape& shape, Bf16* values, long block, long head, long place,
                         const Rows<float>& rows, Bf16) {
  const long tokens = std::min(kUnit, shape.block_size), token = place % tokens;
  Bf16* unit = values + shape.offset(block, head) + place / tokens * tokens * shape.width + token * kPanel;
  for (long i = 0; i < kTokensTogether; i += 2, unit += 2 * kPanel)
    for (long d = 0; d < shape.width; d += kLanes) {
      const long count = std::max(0L, std::min(kLanes, shape.head_dim - d));
      const WordVec first = widen(to_bf16(load_some(rows.row(i) + d, count)));
      const WordVec second = widen(to_bf16(load_some(rows.row(i + 1) + d, count)));
      put_any(unit + d / kPanel * tokens * kPanel + d % kPanel * 2, first | second << 16);
    }
}

// Makes values of the keys of a unit, `tokens` of them, a multiple of 32: both are the same rows in another order.
inline void make_values(const CacheShape& shape, const float* keys, long tokens, float* values) {
  WordVec words[kLanes];
  for (long token = 0; token < tokens; token += kLanes) {
    const float* panel = keys + token / kPanel * kPanel * shape.width + token % kPanel;
    for (long d = 0; d < shape.value_panels() * kPanel; d += kLanes) {
      for (long i = 0; i < kLanes; i++) words[i] = load_any<WordVec>(panel + (d + i) * kPanel);
      transpose(words);
      float* to = values + (d / kPanel * kUnit + token) * kPanel + d % kPanel;
      for (long i = 0; i < kLanes; i++) put_any(to + i * kPanel, words[i]);
    }
  }
}
inline void make_values(const CacheShape& shape, const Bf16* keys, long tokens, Bf16* values) {
  WordVec words[kLanes];
  alignas(64) Bf16 rows[kLanes][kPanel];
  for (long token = 0; token < tokens; token += kLanes) {
    const Bf16* pairs = keys + token / kPanel * kPanel * shape.width + token % kPanel * 2;
    for (long p = 0; p < shape.value_panels(); p++) {
      for (long i = 0; i < kLanes; i++) words[i] = load_any<WordVec>(pairs + (p * kLanes + i) * kPanel * 2);
      transpose(words);
      for (long i = 0; i < kLanes; i++) put_any(rows[i], words[i]);
      Bf16* to = values + (p * kUnit + token) * kPanel;
      for (long i = 0; i < kLanes; i += 2, to += 2 * kPanel)
        for (long d = 0; d < kPanel; d += kLanes) {
          const WordVec first = widen(load_any<HalfVec>(rows[i] + d));
          const WordVec second = widen(load_any<HalfVec>(rows[i + 1] + d));
          put_any(to + d * 2, first | second << 16);
        }
    }
  }
}

// 64 tokens of a sequence: pointers into a block that has them all, or to a copy in the model's type. After the last
// token, a copy contains data of other units, to which attention gives no weight.
template <class T>
class Unit {
 public:
  const T* keys;
  const T* values;

  // Sets the unit to the tokens from `first`, a multiple of 64, up to `last` of the sequence with these blocks. Only
  // the first `tokens` are read.
  void take(const CacheShape& shape, const Cache& cache, const int64_t* blocks, long head, long first, long last,
            long tokens) {
    take_numbers(shape, cache, blocks, head, first, last, tokens);
    if (!shape.latent) return;
    make_values(shape, keys, tokens, own_values_);
    values = own_values_;
  }

 private:
  void take_numbers(const CacheShape& shape, const Cache& cache, const int64_t* blocks, long head, long first,
                    long last, long tokens) {
    if (shape.holds_units() && shape.stored == Stored::model) {
      const long offset = shape.offset(blocks, head, first);
      keys = (const T*)shape.at(cache.keys, offset);
      if (!shape.latent) values = (const T*)shape.at(cache.values, offset);
      return;
    }
    keys = own_keys_, values = own_values_;
    with_stored<T>(shape, [&](auto type) {
      typedef decltype(type) S;
      if (shape.holds_units()) {
        const long offset = shape.offset(blocks, head, first);
        copy((const S*)cache.keys + offset, tokens * shape.width, own_keys_);
        if (!shape.latent) expand_values(shape, (const S*)cache.values + offset, tokens);
        return;
      }
      for (long token = first; token < first + kUnit && token <= last; token += shape.block_size) {
        const long offset = shape.offset(blocks, head, token);
        copy_keys(shape, (const S*)cache.keys + offset, token - first);
        if (!shape.latent) copy_values(shape, (const S*)cache.values + offset, token - first);
      }
    });
  }

  static void copy(const T* from, long count, T* to) {
    if (count * sizeof(T) == 64)
      std::memcpy(to, from, 64);
    else
      std::memcpy(to, from, count * sizeof(T));
  }
  template <class Eight>
  static void copy(const Eight* from, long count, T* to) {
    expander<Eight>().expand(from, count, to);
  }

  template <class S>
  void expand_values(const CacheShape& shape, const S* from, long tokens) {
    for (long panel = 0; panel < shape.width * kUnit; panel += kUnit * kPanel)
      copy(from + panel, tokens * kPanel, own_values_ + panel);
  }

  template <class S>
  void copy_keys(const CacheShape& shape, const S* from, long place) {
    constexpr long kTerms = Pair<T>::kTerms;
    T* to = own_keys_ + place / kPanel * kPanel * shape.width + place % kPanel * kTerms;
    const long part = shape.block_size * kTerms;
    for (long row = 0; row < shape.width / kTerms; row++, to += kPanel * kTerms, from += part) copy(from, part, to);
  }

  template <class S>
  void copy_values(const CacheShape& shape, const S* from, long place) {
    constexpr long kTerms = Pair<T>::kTerms;
    const long part = shape.block_size * kPanel;
    for (long panel = 0; panel < shape.width / kPanel; panel++, from += part) {
      T* to = own_values_ + panel * kUnit * kPanel + place / kTerms * kPanel * kTerms;
      if (shape.block_size >= kTerms) {
        copy(from, part, to);
        continue;
      }
      T numbers[kPanel];
      copy(from, kPanel, numbers);
      for (long d = 0; d < kPanel; d++) to[d * kTerms + place % kTerms] = numbers[d];
    }
  }

  alignas(64) T own_keys_[kUnit * kWidthMax] = {};
  alignas(64) T own_values_[kUnit * kWidthMax] = {};
};

}  // namespace antiphon
