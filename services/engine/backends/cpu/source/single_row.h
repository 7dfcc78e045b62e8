// Attention of one row: a single token whose key head is read by no other query head, and a cache of the model's type.
// Only included where there are AMX tiles.
//
// The results are the same as those of attention.h, bit for bit, because the next step of the sequence may use that
// code. But a tile of one row is read and written through memory, and what was just written there cannot be read until
// everything before it is done. Here scores, softmax weights and sums stay in registers, and the processor continues
// with the next keys meanwhile. Subnormal numbers are zero for a tile and not here; they do not matter beside the
// largest weight, which is 1.
#pragma once

#include "attention.h"

namespace antiphon {

// Multiplies `kPanels` panels by 32 terms of a row and adds as a tile does: even and odd terms separately, then to the
// sums. `x` holds bfloat16 numbers as floats.
template <int kPanels>
inline void add_group(const float* x, const Bf16* const (&panels)[kPanels], Vec (&sums)[2 * kPanels], Along& ahead) {
  typedef PanelOrder<Bf16, Halves::beside> Panel;
  constexpr int kHalves = 2 * kPanels;
  constexpr long kStep = Along::kStep / (kPanel * (long)sizeof(Bf16));
  Vec even[kHalves] = {}, odd[kHalves] = {};
  for (long group = 0; group < kTileTerms; group += kStep) {
    ahead.ask();
    for (long k = group; k < group + kStep; k += 2) {
      const Vec first = broadcast(x[k]), second = broadcast(x[k + 1]);
      for (int half = 0; half < kHalves; half++) {
        const WordVec both = load_any<WordVec>(panels[half / 2] + k * Panel::kTerm + half % 2 * Panel::kRight);
        even[half] = even[half] + first * (Vec)(both << 16);
        odd[half] = odd[half] + second * (Vec)(both & 0xffff0000u);
      }
    }
  }
  for (int half = 0; half < kHalves; half++) sums[half] = sums[half] + (even[half] + odd[half]);
}

// Forces a product to be rounded before it is added to anything: the compiler must not fuse the two operations.
inline void settle(Vec& v) { asm volatile("" : "+v"(v)); }

class SingleRow {
 public:
  SingleRow(const AttentionInput<Bf16>& in, const Span& span, long head, char* memory, TileScratch<Bf16>& scratch)
      : in_(in), span_(span), head_(head), last_(span.start), oldest_(oldest_key(in.rules, last_)), unit_(scratch.unit),
        sums_(TileState<Bf16>(memory, 1, in.shape.width).sums) {}

  // Sets the span and the key head whose first unit is prefetched during this row's last unit.
  void followed_by(const Span& span, long head) { next_ = &span, next_head_ = head; }

  void run() {
    start();
    for (long key = oldest_ / kUnit * kUnit; key <= last_; key += kUnit) one_unit(key);
    finish();
  }

 private:
  typedef const Bf16* Panel;
  static constexpr long kTogether = 2 * kPanel;
  static constexpr long kSize = (long)sizeof(Bf16);
  static_assert(1 + kWidthMax / kTogether + 2 <= Along::kParts, "keys, values, and what comes next");

  void start() {
    const long width = in_.shape.width;
    const Bf16* query = in_.queries + (span_.first * in_.heads + head_) * width;
    for (long d = 0; d < width; d += kLanes) store(query_ + d, load(query + d));
    std::fill_n(sums_, width, 0.0f);
    slope_ = in_.rules.slopes ? in_.rules.slopes[head_] : 0.0f;
  }

  void one_unit(long key) {
    const long tokens = tokens_of(key, last_);
    unit_.take(in_.shape, in_.cache, span_.blocks(in_.cache), head_, key, last_, tokens);
    Along ahead = what_follows(key, tokens);
    Vec scores[kUnit / kLanes] = {};
    score(tokens, scores, ahead);
    const View view{oldest_ - key, last_ - key, slope_};
    for (long i = 0; i < kUnit / kLanes; i++) scores[i] = adjusted(in_.rules, view, i * kLanes, scores[i]);
    alignas(64) float shares[kUnit];
    weigh(scores, shares);
    for (long d = 0; d < in_.shape.width; d += kTogether)
      if (d + kPanel < in_.shape.width)
        add_values<2>(shares, tokens, d, ahead);
      else
        add_values<1>(shares, tokens, d, ahead);
  }

  // Returns a prefetcher for use while a unit is read: first for the rest of the unit, then for the beginning of the
  // next one. If blocks are smaller than a unit, it prefetches only the first block of the next unit.
  Along what_follows(long key, long tokens) const {
    Along ahead;
    if (in_.shape.holds_units()) {
      add_keys(ahead, unit_.keys, tokens, key_bytes());
      for (long d = 0; d < in_.shape.width; d += kTogether)
        ahead.add(unit_.values + d * kUnit, tokens * kPanel * kSize,
                  d + kPanel < in_.shape.width ? kUnit * kPanel * kSize : 0);
      ahead.skip(lead());
    }
    if (key + kUnit <= last_)
      add_next(ahead, span_, head_, key + kUnit);
    else if (next_)
      add_next(ahead, *next_, next_head_, first_unit(in_.rules, *next_));
    return ahead;
  }

  long key_bytes() const { return in_.shape.width * kPanel * kSize; }
  // Returns how many bytes prefetching is ahead of the reader, in each of the two stretches that it reads: 5 KiB in
  // all.
  long lead() const { return std::min(10 * Along::kStep, key_bytes()); }

  void add_keys(Along& ahead, const Bf16* keys, long tokens, long bytes) const {
    ahead.add(keys, bytes, tokens == kUnit ? key_bytes() : 0);
  }

  void add_next(Along& ahead, const Span& span, long head, long key) const {
    const CacheShape& shape = in_.shape;
    const long offset = shape.offset(span.blocks(in_.cache), head, key);
    const Bf16* keys = (const Bf16*)in_.cache.keys + offset;
    if (shape.holds_units()) return add_keys(ahead, keys, tokens_of(key, span.start + span.count - 1), lead());
    for (const Bf16* first : {keys, (const Bf16*)in_.cache.values + offset})
      ahead.add(first, shape.block_size * shape.width * kSize);
  }

  void score(long tokens, Vec (&scores)[kUnit / kLanes], Along& ahead) const {
    const long width = in_.shape.width;
    const Panel keys = unit_.keys;
    if (tokens == kUnit) {
      for (long d = 0; d < width; d += kTileTerms)
        add_group<2>(query_ + d, {keys + d * kPanel, keys + (width + d) * kPanel}, scores, ahead);
      return;
    }
    Vec half[2] = {};
    for (long d = 0; d < width; d += kTileTerms) add_group<1>(query_ + d, {keys + d * kPanel}, half, ahead);
    scores[0] = half[0], scores[1] = half[1];
  }

  // Turns scores into softmax weights relative to the running maximum; scales earlier sums down if the maximum has
  // grown.
  void weigh(const Vec (&scores)[kUnit / kLanes], float* shares) {
    const Vec before = highest_;
    highest_ = max(before, broadcast(max_lanes(max(max(scores[0], scores[1]), max(scores[2], scores[3])))));
    if ((highest_ - before)[0] > 0) shrink(exp2(before - highest_)[0]);
    Vec share[kUnit / kLanes];
    for (long i = 0; i < kUnit / kLanes; i++) {
      share[i] = exp2<true>(scores[i] - highest_);
      store(shares + i * kLanes, (Vec)(widen(to_bf16(share[i])) << 16));
    }
    total_ = total_ + ((share[0] + share[1]) + (share[2] + share[3]));
  }

  void shrink(float by) {
    for (long d = 0; d < in_.shape.width; d += kLanes) store(sums_ + d, load(sums_ + d) * by);
    total_ = total_ * by;
    settle(total_);
  }

  // Adds the weighted values of `kPanels` panels, from dimension `d` on.
  template <int kPanels>
  void add_values(const float* shares, long tokens, long d, Along& ahead) {
    Vec sums[2 * kPanels];
    for (int half = 0; half < 2 * kPanels; half++) sums[half] = load(sums_ + d + half * kLanes);
    const Panel values = unit_.values + d * kUnit;
    for (long k = 0; k < tokens; k += kTileTerms) {
      Panel panels[kPanels];
      for (int p = 0; p < kPanels; p++) panels[p] = values + (p * kUnit + k) * kPanel;
      add_group<kPanels>(shares + k, panels, sums, ahead);
    }
    for (int half = 0; half < 2 * kPanels; half++) store(sums_ + d + half * kLanes, sums[half]);
  }

  void finish() {
    const long head_dim = in_.shape.head_dim;
    Bf16* to = in_.attended.row(span_.first) + head_ * head_dim;
    const float scale = in_.rules.scale(head_, sum_lanes(total_), highest_[0]);
    for (long d = 0; d < head_dim; d += kLanes)
      store_some(to + d, load(sums_ + d) * scale, std::min(kLanes, head_dim - d));
  }

  const AttentionInput<Bf16>& in_;
  const Span& span_;
  const long head_;
  const long last_, oldest_;  // the last and the first key that the row sees
  Unit<Bf16>& unit_;
  float* const sums_;  // [width]
  alignas(64) float query_[kWidthMax];
  float slope_ = 0;
  Vec highest_ = broadcast(kLowest), total_ = {};
  const Span* next_ = nullptr;
  long next_head_ = 0;
};

}  // namespace antiphon
