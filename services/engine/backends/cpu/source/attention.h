// Attention over the paged KV cache, for prompts and for single tokens: softmax(q kᵀ) v with a running maximum. Where
// there are AMX tiles, single_row.h computes the same numbers for single rows.
//
// A tile (of attention) is up to 32 rows of queries of one sequence that read the same key head: consecutive tokens,
// and for each the query heads of the group. It processes the keys in units of 64 tokens at fixed places of the
// sequence, so a row's result depends neither on its tile nor on how a prompt was divided into chunks.
//
//     score = q · k            q is already scaled, also by log2(e) if there is no soft cap
//     score = cap tanh(score / cap) log2(e)
//     score += slope (key position - query position) log2(e)
//     a row at position p sees keys [max(0, p - window + 1), p], or [p - p mod window, p] if windows are chunks
//     a sink is one more score of a head, without a value: it takes a part of the softmax's sum
#pragma once

#include <optional>

#include "cache.h"

namespace antiphon {

struct ScoreRules {
  float softcap = 0;              // 0: none
  const float* slopes = nullptr;  // [heads], times log2(e), or null
  long window = 0;                // 0: all
  const float* sinks = nullptr;   // [heads], times log2(e), or null
  bool chunked = false;           // windows are chunks
  float attended_scale = 1;       // factor on what attention gives

  // Returns a head's factor on its summed values. `highest`: the score that the total is relative to.
  float scale(long head, float total, float highest) const {
    return attended_scale / (sinks ? total + std::exp2(sinks[head] - highest) : total);
  }
};

template <class T>
struct AttentionInput {
  const CacheShape& shape;
  Cache cache;
  ScoreRules rules;
  long heads, group;
  const TermOf<T>* queries;  // [tokens][heads][width], scaled
  Inputs<T> attended;        // [tokens][heads * value_dim]
};

// The tokens of one sequence in a step: tokens [first, first + count) of the step, at positions from `start` on.
struct Span {
  long first, count, start;
  const int64_t* table;  // the sequence's block table in the first group of tables
  long stride;           // from a group's table to that of the next group

  const int64_t* blocks(const Cache& cache) const { return table + cache.tables * stride; }
};

constexpr float kNever = -2e30f, kLowest = -1e30f;  // score of an unseen key; maximum before the first key

// The keys of a unit that a row sees, as places in the unit, and the row's slope.
struct View {
  long oldest, newest;
  float slope;

  bool whole() const { return oldest <= 0 && newest >= kUnit - 1; }
};

// Applies soft cap and bias to the scores of 16 keys, `distance` tokens after the row. Never inlined: two copies could
// be rounded differently.
[[gnu::noinline]] inline Vec shaped(const ScoreRules& rules, float slope, Vec s, IntVec distance) {
  const float cap = rules.softcap;
  if (cap != 0) s = tanh(s / cap) * (cap * kLog2E);
  return s + convert<Vec>(distance) * slope;
}

// Returns the scores of 16 keys, from `place` of the unit on, as the softmax takes them: capped, biased and masked.
inline Vec adjusted(const ScoreRules& rules, const View& view, long place, Vec s) {
  const IntVec numbers = lane_numbers() + (int32_t)place;
  if (rules.softcap != 0 || view.slope != 0) s = shaped(rules, view.slope, s, numbers - (int32_t)view.newest);
  if (view.whole()) return s;
  const IntVec seen =
      (numbers >= (int32_t)std::max(view.oldest, 0L)) & (numbers <= (int32_t)std::min(view.newest, kUnit));
  return select(seen, s, broadcast(kNever));
}

// Returns how many tokens of a unit are read: half of them if the sequence does not reach the other half yet.
inline long tokens_of(long key, long last) { return last < key + kPanel ? kPanel : kUnit; }

// Returns a prefetcher for the keys and values of a unit, to be used while another unit is computed. If blocks are
// smaller than a unit, it prefetches only the unit's first block.
template <class T>
Ahead ask_for_unit(const AttentionInput<T>& in, const Span& span, long head, long key, long last) {
  const CacheShape& shape = in.shape;
  const long offset = shape.offset(span.blocks(in.cache), head, key);
  const long unit = std::min(kUnit, shape.block_size), tokens = std::min(unit, tokens_of(key, last));
  // Each call of `ask` prefetches as many lines as are read between two calls.
  const long size = shape.size, lines = kTermsMultiple / kUnitAsks * kPanel * size / 64;
  if (shape.latent) return Ahead(shape.at(in.cache.keys, offset), tokens * shape.width * size, lines);
  return Ahead(shape.at(in.cache.keys, offset), tokens * shape.width * size, lines, shape.at(in.cache.values, offset),
               tokens * kPanel * size, shape.width / kPanel, unit * kPanel * size);
}

// Returns the first key that a row at a position sees.
inline long oldest_key(const ScoreRules& rules, long position) {
  if (!rules.window) return 0;
  return rules.chunked ? position - position % rules.window : std::max(0L, position - rules.window + 1);
}

// Returns the first key of a span's first unit.
inline long first_unit(const ScoreRules& rules, const Span& span) {
  return oldest_key(rules, span.start) / kUnit * kUnit;
}

constexpr long kTile = kBlockRows;
constexpr long kShareStride = kUnit + kTermsMultiple;
// How many heads of a single token process their keys side by side: a block of the cache has all heads, and a long
// stretch of memory is read faster than pieces that are far apart. Where there are AMX tiles, one head at a time is as
// fast.
#if defined(__AMX_BF16__)
constexpr long kHeadsTogether = 1;
#else
constexpr long kHeadsTogether = 16;
#endif

// The state of a tile between two units, in a part of a thread's memory. Sums are [width / 32][rows][32].
template <class T>
struct TileState {
  TermOf<T>* queries;
  float *sums, *highest, *total;  // total: 16 partial sums for each row
  long *oldest, *newest;          // the first and the last key that each row sees
  float* slope;

  // For so many rows and dimensions. `memory` has `bytes(rows, width)` bytes and begins at a cache line.
  TileState(char* memory, long rows, long width) { place((uintptr_t)memory, rows, width); }

  static long bytes(long rows, long width) { return (long)TileState().place(0, rows, width); }
  static long query_stride(long width) { return width + kTermsMultiple; }

 private:
  TileState() = default;

  // Returns the end of the state.
  uintptr_t place(uintptr_t at, long rows, long width) {
    at = put(queries, at, rows * query_stride(width));
    at = put(sums, at, rows * width);
    at = put(highest, at, round_up(rows, kLanes));
    at = put(total, at, rows * kLanes);
    at = put(oldest, at, rows);
    at = put(newest, at, rows);
    return put(slope, at, rows);
  }

  template <class Element>
  static uintptr_t put(Element*& array, uintptr_t at, long count) {
    array = (Element*)at;
    return at + (uintptr_t)round_up(count * (long)sizeof(Element), 64);
  }
};

// The buffers of a tile within a unit; each thread has one.
template <class T>
struct TileScratch {
  alignas(64) float scores[kUnit / kPanel][kTile * kPanel];
  alignas(64) TermOf<T> shares[kTile * kShareStride];
  alignas(64) float unit_highest[kTile], shrink[kTile];
  Unit<T> unit;
};

// The attention of one tile and key head: call `start`, `one_unit` for each unit that the tile sees, then `finish`.
template <class T>
class Attention {
 public:
  Attention(const AttentionInput<T>& in, const Span& span, long kv_head, long first_row, long rows, char* memory,
            TileScratch<T>& scratch)
      : in_(in), span_(span), head_(kv_head), first_(first_row), rows_(rows),
        stride_(TileState<T>::query_stride(in.shape.width)), t_(memory, rows_, in.shape.width), u_(scratch) {}

  // Returns the first and the last key that any row sees.
  long oldest() const { return t_.oldest[0]; }
  long newest() const { return t_.newest[rows_ - 1]; }

  void start() {
    const long width = in_.shape.width;
    for (long r = 0; r < rows_; r++) {
      const long position = span_.start + token(r), head = query_head(r);
      std::memcpy(t_.queries + r * stride_, in_.queries + ((span_.first + token(r)) * in_.heads + head) * width,
                  width * sizeof(TermOf<T>));
      t_.newest[r] = position;
      t_.oldest[r] = oldest_key(in_.rules, position);
      t_.slope[r] = in_.rules.slopes ? in_.rules.slopes[head] : 0.0f;
    }
    std::fill_n(t_.sums, rows_ * width, 0.0f);
    std::fill_n(t_.highest, round_up(rows_, kLanes), kLowest);
    std::fill_n(u_.unit_highest, kTile, kNever);
    std::fill_n(t_.total, rows_ * kLanes, 0.0f);
  }

  // Processes the unit of keys from `key` on; `ahead` prefetches what is read next meanwhile.
  void one_unit(long key, Ahead ahead) {
    const long width = in_.shape.width, last = newest();
    const long tokens = tokens_of(key, last);
    u_.unit.take(in_.shape, in_.cache, span_.blocks(in_.cache), head_, key, last, tokens);
    for (long p = 0; p < tokens / kPanel; p++)
      Block<T>::template multiply<Stays::panel, Halves::beside>(
          rows_, t_.queries, stride_, u_.unit.keys + p * kPanel * width, width, u_.scores[p], false, ahead);
    for (long r = 0; r < rows_; r++) adjust(r, key);
    weigh();
    for (long p = 0; p < in_.shape.value_panels(); p++)
      Block<T>::template multiply<Stays::panel, Halves::beside>(rows_, u_.shares, kShareStride,
                                                                u_.unit.values + p * kUnit * kPanel, tokens,
                                                                t_.sums + p * rows_ * kPanel, true, ahead);
  }

  void finish() {
    const long value_dim = in_.shape.value_dim;
    for (long r = 0; r < rows_; r++) {
      TermOf<T>* to = in_.attended.row(span_.first + token(r)) + query_head(r) * value_dim;
      const float scale = in_.rules.scale(query_head(r), sum_lanes(load(t_.total + r * kLanes)), t_.highest[r]);
      for (long d = 0; d < value_dim; d += kLanes) {
        const Vec value = load(t_.sums + (d / kPanel * rows_ + r) * kPanel + d % kPanel) * scale;
        store_some(to + d, value, std::min(kLanes, value_dim - d));
      }
    }
  }

 private:
  long token(long row) const { return (first_ + row) / in_.group; }
  long query_head(long row) const { return head_ * in_.group + (first_ + row) % in_.group; }

  // Applies soft cap, bias and mask to a row's scores of the unit's keys, and stores their maximum.
  void adjust(long row, long key) {
    const View view{t_.oldest[row] - key, t_.newest[row] - key, t_.slope[row]};
    if (!view.whole() || in_.rules.softcap != 0 || view.slope != 0)
      for (long place = 0; place < kUnit; place += kLanes)
        store(score(row, place), adjusted(in_.rules, view, place, load(score(row, place))));
    const Vec left = max(load(score(row, 0)), load(score(row, kLanes)));
    const Vec right = max(load(score(row, 2 * kLanes)), load(score(row, 3 * kLanes)));
    u_.unit_highest[row] = max_lanes(max(left, right));
  }

  float* score(long row, long place) { return u_.scores[place / kPanel] + row * kPanel + place % kPanel; }

  // Turns scores into softmax weights relative to the running maximum; scales earlier sums down if the maximum has
  // grown.
  void weigh() {
    bool shrinks = false;
    for (long first = 0; first < rows_; first += kLanes) {
      const Vec before = load(t_.highest + first), now = max(before, load(u_.unit_highest + first));
      store(t_.highest + first, now);
      store(u_.shrink + first, exp2(before - now));
      shrinks |= max_lanes(now - before) > 0;
    }
    if (shrinks) shrink_sums();
    for (long r = 0; r < rows_; r++) share(r);
  }

  void share(long row) {
    constexpr bool kCoarse = sizeof(T) == sizeof(Bf16);
    const Vec highest = broadcast(t_.highest[row]);
    Vec shares[kUnit / kLanes];
    for (long i = 0; i < kUnit / kLanes; i++) shares[i] = exp2<kCoarse>(load(score(row, i * kLanes)) - highest);
    TermOf<T>* to = u_.shares + row * kShareStride;
    store_pair(to, shares[0], shares[1]);
    store_pair(to + kPanel, shares[2], shares[3]);
    float* total = t_.total + row * kLanes;
    store(total, load(total) + ((shares[0] + shares[1]) + (shares[2] + shares[3])));
  }

  void shrink_sums() {
    for (long p = 0; p < in_.shape.value_panels(); p++)
      for (long r = 0; r < rows_; r++) {
        if (u_.shrink[r] == 1.0f) continue;
        float* sums = t_.sums + (p * rows_ + r) * kPanel;
        store(sums, load(sums) * u_.shrink[r]);
        store(sums + kLanes, load(sums + kLanes) * u_.shrink[r]);
      }
    for (long r = 0; r < rows_; r++) store(t_.total + r * kLanes, load(t_.total + r * kLanes) * u_.shrink[r]);
  }

  const AttentionInput<T>& in_;
  const Span& span_;
  const long head_, first_;
  const long rows_, stride_;
  const TileState<T> t_;
  TileScratch<T>& u_;
};

// `rows` rows of a span, from `first_row` of each head on, for `heads` key heads from `kv_head` on.
struct Tile {
  const Span* span;
  long kv_head, heads, first_row, rows;
};

// Returns the bytes that `attend` needs for its tiles.
template <class T>
long tile_bytes(const CacheShape& shape, long group) {
  return std::max(TileState<T>::bytes(kTile, shape.width),
                  kHeadsTogether * TileState<T>::bytes(std::min(group, kTile), shape.width));
}

// Computes all heads of a tile, at most kHeadsTogether, unit by unit. If the thread has another tile after this one,
// the first unit of that tile is prefetched during the last unit.
template <class T>
void attend(const AttentionInput<T>& in, const Tile& tile, const Tile* next, char* memory, TileScratch<T>& scratch) {
  const Span& span = *tile.span;
  const long rows = tile.rows, size = TileState<T>::bytes(rows, in.shape.width);
  std::optional<Attention<T>> heads[kHeadsTogether];
  for (long h = 0; h < tile.heads; h++)
    heads[h].emplace(in, span, tile.kv_head + h, tile.first_row, rows, memory + h * size, scratch).start();
  BlockShape<T>(rows).use();
  const long oldest = heads[0]->oldest(), last = heads[0]->newest();
  const auto after = [&](long head, long key) {
    if (head + 1 < tile.heads) return ask_for_unit(in, span, tile.kv_head + head + 1, key, last);
    if (key + kUnit <= last) return ask_for_unit(in, span, tile.kv_head, key + kUnit, last);
    if (!next) return Ahead();
    const Span& other = *next->span;
    return ask_for_unit(in, other, next->kv_head, first_unit(in.rules, other), other.start + other.count - 1);
  };
  for (long key = oldest / kUnit * kUnit; key <= last; key += kUnit)
    for (long h = 0; h < tile.heads; h++) heads[h]->one_unit(key, after(h, key));
  for (long h = 0; h < tile.heads; h++) heads[h]->finish();
}

}  // namespace antiphon
