// Attention over the paged cache, for prompts and for single tokens: softmax(q kᵀ) v with a running maximum. Where
// there are tiles, lone.h gets the same numbers for single rows.
//
// A tile is up to 32 rows of queries of one sequence that read the same key head: consecutive tokens, and for each the
// query heads of the group. It goes through the keys in units at fixed places of the sequence, so a row's result
// depends neither on its tile nor on how a prompt was cut up.
//
//     score = q · k            q is scaled already, by log2(e) too where there is no soft cap
//     score = cap tanh(score / cap) log2(e)
//     score += slope (key position - query position) log2(e)
//     a row at position p sees keys [max(0, p - window + 1), p]
#pragma once

#include "cache.h"

namespace antiphon {

struct ScoreRules {
  float softcap = 0;              // 0: none
  const float* slopes = nullptr;  // [heads], times log2(e), or null
  long window = 0;                // 0: all
};

template <class T>
struct AttentionInput {
  const CacheShape& shape;
  Cache<T> cache;
  ScoreRules rules;
  long heads, group;
  const TermOf<T>* queries;  // [tokens][heads][width], scaled
  Inputs<T> attended;        // [tokens][heads * head_dim]
};

// One sequence's share of a step: tokens [first, first + count) of it, at positions from `start`.
struct Span {
  long first, count, start;
  const int64_t* blocks;
};

constexpr float kNever = -2e30f, kLowest = -1e30f;  // of a key that a row does not see; of a row without keys so far

// A row's view of a unit's scores: the keys that it sees, by their place in the unit, and its slope.
struct View {
  long oldest, newest;
  float slope;

  bool whole() const { return oldest <= 0 && newest >= kUnit - 1; }
};

// Soft cap and bias of scores of 16 keys, `distance` tokens after the row. Never put into its callers: two copies could
// be rounded differently.
__attribute__((noinline)) inline Vec shaped(const ScoreRules& rules, float slope, Vec s, IntVec distance) {
  const float cap = rules.softcap;
  if (cap != 0) s = tanh(s / cap) * (cap * kLog2E);
  return s + convert<Vec>(distance) * slope;
}

// The scores of 16 keys, from `place` of the unit on, as softmax takes them.
inline Vec adjusted(const ScoreRules& rules, const View& view, long place, Vec s) {
  const IntVec numbers = lane_numbers() + (int32_t)place;
  if (rules.softcap != 0 || view.slope != 0) s = shaped(rules, view.slope, s, numbers - (int32_t)view.newest);
  if (view.whole()) return s;
  const IntVec seen =
      (numbers >= (int32_t)std::max(view.oldest, 0L)) & (numbers <= (int32_t)std::min(view.newest, kUnit));
  return select(seen, s, splat(kNever));
}

// What is read of a unit: half of it where the other half's tokens are still to come.
inline long tokens_of(long key, long last) { return last < key + kPanel ? kPanel : kUnit; }

// The keys and values of a unit, asked for while another one is computed; of smaller blocks those of the first.
template <class T>
Ahead ask_for_unit(const AttentionInput<T>& in, const Span& span, long head, long key, long last) {
  const CacheShape& shape = in.shape;
  const long offset = shape.offset(span.blocks, head, key);
  const long unit = std::min(kUnit, shape.block_size), tokens = std::min(unit, tokens_of(key, last));
  // With every step through this unit as many lines as a step reads.
  constexpr long size = (long)sizeof(T), kLines = kTermsMultiple / kAsks * kPanel * size / 64;
  return Ahead(in.cache.keys + offset, tokens * shape.width * size, kLines, in.cache.values + offset,
               tokens * kPanel * size, shape.width / kPanel, unit * kPanel * size);
}

// The first key that a row at a position sees.
inline long oldest_key(const ScoreRules& rules, long position) {
  return rules.window ? std::max(0L, position - rules.window + 1) : 0;
}

// The first unit of a span.
inline long first_unit(const ScoreRules& rules, const Span& span) {
  return oldest_key(rules, span.start) / kUnit * kUnit;
}

constexpr long kTile = kBlockRows;
constexpr long kShareStride = kUnit + kTermsMultiple;

// The state of a tile on its way through the keys. Sums are [width / 32][kTile][32].
template <class T>
struct TileState {
  alignas(64) TermOf<T> queries[kTile * (kWidthMax + kTermsMultiple)];
  alignas(64) float sums[kTile * kWidthMax];
  alignas(64) float scores[kUnit / kPanel][kTile * kPanel];
  alignas(64) TermOf<T> shares[kTile * kShareStride];
  alignas(64) float highest[kTile], unit_highest[kTile], shrink[kTile];
  alignas(64) float total[kTile * kLanes];  // 16 parts of each row's
  long oldest[kTile], newest[kTile];        // the keys that each row sees
  float slope[kTile];
  Unit<T> unit;
};

template <class T>
class Attention {
 public:
  Attention(const AttentionInput<T>& in, const Span& span, long kv_head, long first_row, TileState<T>& state)
      : in_(in), span_(span), head_(kv_head), first_(first_row), t_(state),
        rows_(std::min(kTile, span.count * in.group - first_row)), stride_(in.shape.width + kTermsMultiple) {}

  // Another tile comes after this one on the same thread: its first unit is asked for during the last one.
  void followed_by(const Span& span, long kv_head) {
    after_ = ask_for_unit(in_, span, kv_head, first_unit(in_.rules, span), span.start + span.count - 1);
  }

  void run() {
    start();
    BlockShape<T>(rows_).use();
    for (long key = t_.oldest[0] / kUnit * kUnit; key <= t_.newest[rows_ - 1]; key += kUnit) one_unit(key);
    finish();
  }

 private:
  long token(long row) const { return (first_ + row) / in_.group; }
  long query_head(long row) const { return head_ * in_.group + (first_ + row) % in_.group; }

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
    for (long p = 0; p < width / kPanel; p++) std::fill_n(t_.sums + p * kTile * kPanel, rows_ * kPanel, 0.0f);
    std::fill_n(t_.highest, kTile, kLowest);
    std::fill_n(t_.unit_highest, kTile, kNever);
    std::fill_n(t_.total, rows_ * kLanes, 0.0f);
  }

  void one_unit(long key) {
    const long width = in_.shape.width, last = t_.newest[rows_ - 1];
    const long tokens = tokens_of(key, last);
    t_.unit.take(in_.shape, in_.cache, span_.blocks, head_, key, last);
    Ahead ahead = key + kUnit <= last ? ask_for_unit(in_, span_, head_, key + kUnit, last) : after_;
    for (long p = 0; p < tokens / kPanel; p++)
      Block<T>::template multiply<Stays::panel, Halves::beside>(
          rows_, t_.queries, stride_, t_.unit.keys + p * kPanel * width, width, t_.scores[p], false, ahead);
    for (long r = 0; r < rows_; r++) adjust(r, key);
    weigh();
    for (long p = 0; p < width / kPanel; p++)
      Block<T>::template multiply<Stays::panel, Halves::beside>(rows_, t_.shares, kShareStride,
                                                                t_.unit.values + p * kUnit * kPanel, tokens,
                                                                t_.sums + p * kTile * kPanel, true, ahead);
  }

  // Soft cap, bias and mask of a row's scores of the unit's keys, and their maximum.
  void adjust(long row, long key) {
    const View view{t_.oldest[row] - key, t_.newest[row] - key, t_.slope[row]};
    if (!view.whole() || in_.rules.softcap != 0 || view.slope != 0)
      for (long place = 0; place < kUnit; place += kLanes)
        store(score(row, place), adjusted(in_.rules, view, place, load(score(row, place))));
    const Vec left = max(load(score(row, 0)), load(score(row, kLanes)));
    const Vec right = max(load(score(row, 2 * kLanes)), load(score(row, 3 * kLanes)));
    t_.unit_highest[row] = max_lanes(max(left, right));
  }

  float* score(long row, long place) { return t_.scores[place / kPanel] + row * kPanel + place % kPanel; }

  // Scores become shares of the running maximum; what was summed up under an older maximum shrinks.
  void weigh() {
    bool shrinks = false;
    for (long first = 0; first < rows_; first += kLanes) {
      const Vec before = load(t_.highest + first), now = max(before, load(t_.unit_highest + first));
      store(t_.highest + first, now);
      store(t_.shrink + first, exp2(before - now));
      shrinks |= max_lanes(now - before) > 0;
    }
    if (shrinks) shrink_sums();
    for (long r = 0; r < rows_; r++) share(r);
  }

  void share(long row) {
    constexpr bool kCoarse = sizeof(T) == sizeof(Bf16);
    const Vec highest = splat(t_.highest[row]);
    Vec shares[kUnit / kLanes];
    for (long i = 0; i < kUnit / kLanes; i++) shares[i] = exp2<kCoarse>(load(score(row, i * kLanes)) - highest);
    TermOf<T>* to = t_.shares + row * kShareStride;
    store_pair(to, shares[0], shares[1]);
    store_pair(to + kPanel, shares[2], shares[3]);
    float* total = t_.total + row * kLanes;
    store(total, load(total) + ((shares[0] + shares[1]) + (shares[2] + shares[3])));
  }

  void shrink_sums() {
    for (long p = 0; p < in_.shape.width / kPanel; p++)
      for (long r = 0; r < rows_; r++) {
        if (t_.shrink[r] == 1.0f) continue;
        float* sums = t_.sums + (p * kTile + r) * kPanel;
        store(sums, load(sums) * t_.shrink[r]);
        store(sums + kLanes, load(sums + kLanes) * t_.shrink[r]);
      }
    for (long r = 0; r < rows_; r++) store(t_.total + r * kLanes, load(t_.total + r * kLanes) * t_.shrink[r]);
  }

  void finish() {
    const long head_dim = in_.shape.head_dim;
    for (long r = 0; r < rows_; r++) {
      TermOf<T>* to = in_.attended.row(span_.first + token(r)) + query_head(r) * head_dim;
      const float scale = 1.0f / sum_lanes(load(t_.total + r * kLanes));
      for (long d = 0; d < head_dim; d += kLanes) {
        const Vec value = load(t_.sums + (d / kPanel * kTile + r) * kPanel + d % kPanel) * scale;
        store_some(to + d, value, std::min(kLanes, head_dim - d));
      }
    }
  }

  const AttentionInput<T>& in_;
  const Span& span_;
  const long head_, first_;
  TileState<T>& t_;
  const long rows_, stride_;
  Ahead after_;
};

}  // namespace antiphon
