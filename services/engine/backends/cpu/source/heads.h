// Processes the heads of a token between the query-key-value product and attention: norms and rotation; queries are
// scaled and stored, keys and values are written to the KV cache.
#pragma once

#include "abi.h"
#include "attention.h"
#include "elementwise.h"

namespace antiphon {

// A token's sums of a key head and of the query heads that read it: queries [group][head_dim], key and value
// [head_dim].
struct TokenHeads {
  float *queries, *key, *value;
};

template <class T>
struct Heads {
  const antiphon_Spec& spec;
  const CacheShape& shape;
  const std::vector<Rope>& ropes;
  const Rows<float> angles;   // cosines and sines of each token, for all ropes
  const float* const growth;  // [tokens] factors on queries beside `query_scale`; null: there are none
  TermOf<T>* const queries;   // [tokens][count][width]
  const long count;           // number of query heads

  long group() const { return count / shape.kv_heads; }
  // Returns the factor on a layer's queries of token `t`.
  float query_scale(const Layer<T>& layer, long t) const {
    const bool grows = growth && (layer.rope < 0 || !spec.query_growth_unrotated);
    return spec.query_scale * (spec.attention_softcap != 0 ? 1.0f : kLog2E) * (grows ? growth[t] : 1.0f);
  }
  TermOf<T>* query(long t, long h) const { return queries + (t * count + h) * shape.width; }

  // Processes token `t` of the step, which is in this span.
  void split(const Layer<T>& layer, const Span& span, long t, long kv_head, const TokenHeads& heads) const {
    turn_all(layer, t, kv_head, heads);
    if (layer.borrows) return;
    const long block = block_of(layer, span, t), place = position(span, t) % shape.block_size;
    with_stored<T>(shape, [&](auto type) {
      typedef decltype(type) S;
      write_key<T>(shape, (S*)layer.cache.keys, block, kv_head, place, heads.key);
      write_value<T>(shape, (S*)layer.cache.values, block, kv_head, place, heads.value);
    });
  }

  // Whether the kTokensTogether tokens from `t` on, which are written together, are in this span and in one block.
  bool together(const Span& span, long t) const {
    return t + kTokensTogether <= span.first + span.count && shape.block_size % kTokensTogether == 0 &&
           position(span, t) % kTokensTogether == 0;
  }

  // Processes kTokensTogether tokens, whose heads are `stride` floats apart.
  void split_together(const Layer<T>& layer, const Span& span, long t, long kv_head, const TokenHeads& first,
                      long stride) const {
    for (long i = 0; i < kTokensTogether; i++)
      turn_all(layer, t + i, kv_head, {first.queries + i * stride, first.key + i * stride, first.value + i * stride});
    const long block = block_of(layer, span, t), place = position(span, t) % shape.block_size;
    with_stored<T>(shape, [&](auto type) {
      typedef decltype(type) S;
      write_keys(shape, (S*)layer.cache.keys, block, kv_head, place, {first.key, stride}, T{});
      write_values(shape, (S*)layer.cache.values, block, kv_head, place, {first.value, stride}, T{});
    });
  }

  // Writes a row of latents, [head_dim], to the cache.
  void keep_row(const Layer<T>& layer, const Span& span, long t, const float* row) const {
    const long block = block_of(layer, span, t), place = position(span, t) % shape.block_size;
    with_stored<T>(shape, [&](auto type) {
      typedef decltype(type) S;
      write_key<T>(shape, (S*)layer.cache.keys, block, 0, place, row);
    });
  }

  // Stores `size` scaled numbers of a query from dimension `first` on.
  void keep_query(const Layer<T>& layer, long t, long h, const float* numbers, long first, long size) const {
    TermOf<T>* to = query(t, h) + first;
    const float scale = query_scale(layer, t);
    for (long d = 0; d < size; d += kLanes) {
      const long some = std::min(kLanes, size - d);
      store_some(to + d, load_some(numbers + d, some) * scale, some);
    }
  }

  void turn(long index, long t, float* head) const {
    const float* from = angles.row(t);
    for (long i = 0; i < index; i++) from += 2 * ropes[i].frequencies.size();
    const Rope& rope = ropes[index];
    rotate(rope, from, from + rope.frequencies.size(), head);
  }

 private:
  static long position(const Span& span, long t) { return span.start + t - span.first; }
  long block_of(const Layer<T>& layer, const Span& span, long t) const {
    return span.blocks(layer.cache)[position(span, t) / shape.block_size];
  }

  void turn_all(const Layer<T>& layer, long t, long kv_head, const TokenHeads& heads) const {
    for (long g = 0; g < group(); g++) {
      float* query = heads.queries + g * shape.head_dim;
      prepare(layer, t, kv_head * group() + g, query);
      keep_query(layer, t, kv_head * group() + g, query, 0, shape.head_dim);
    }
    if (layer.borrows) return;
    prepare(layer, t, count + kv_head, heads.key);
    if (spec.value_norm) norm(heads.value, [](long) { return 1.0f; });
  }

  void prepare(const Layer<T>& layer, long t, long h, float* head) const {
    const float* weight = layer.qk_norm.data() + h * shape.head_dim;
    if (spec.qk_norm == 1) norm(head, [=](long d) { return weight[d]; });
    if (layer.rope >= 0) turn(layer.rope, t, head);
    if (spec.qk_norm == 3 && !layer.qk_norm.empty()) norm(head, [=](long d) { return weight[d]; });
  }

  template <class WeightOf>
  void norm(float* head, WeightOf&& weight_of) const {
    const float scale = 1.0f / std::sqrt(mean_square(head, shape.head_dim) + spec.norm_eps);
    for (long d = 0; d < shape.head_dim; d++) head[d] *= scale * weight_of(d);
  }
};

}  // namespace antiphon
