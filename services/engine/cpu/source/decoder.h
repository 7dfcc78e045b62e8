// A step of a decoder: every phase of every layer, on all threads together.
//
//     hidden [tokens][hidden_size] in float32: the residual stream
//     each matrix reads rows of the model's type and hands its sums, in float32, to what comes next
//
// What a model does is in its spec (abi.h) and weights. Called by model.cpp with the threads running.
#pragma once

#include <memory>

#include "attention.h"
#include "experts.h"
#include "head.h"

namespace antiphon {

enum class Residual : int64_t { sequential, parallel, normed };

template <class T>
class Decoder {
 public:
  Decoder(const antiphon_Spec& spec, Pool& pool) : spec_(spec), pool_(pool) {
    shape_ = make_cache_shape(spec.num_kv_heads, spec.head_dim, spec.block_size);
    experts_ = {spec.num_experts, spec.experts_per_token, spec.expert_size, spec.shared_expert_size,
                spec.normalise_experts != 0};
    tiles_.reset(new TileState<T>[pool.threads()]);
    weights.layers.resize(spec.num_layers);
  }

  const CacheShape& cache_shape() const { return shape_; }

  void step(const antiphon_Step& step) {
    prepare(step);
    pool_.run([this, &step](int thread) { forward(step, thread); });
  }

  Weights<T> weights;

 private:
  struct Tile {
    const Span* span;
    long first_row;
  };

  long q_size() const { return spec_.num_heads * spec_.head_dim; }
  long kv_size() const { return spec_.num_kv_heads * spec_.head_dim; }
  NormKind norm_kind() const { return (NormKind)spec_.norm; }
  Activation activation() const { return (Activation)spec_.activation; }

  // Everything that needs memory, and who attends: before the threads start.
  void prepare(const antiphon_Step& step) {
    tokens_ = step.num_tokens;
    hidden_ = hidden_buffer_.rows(tokens_, spec_.hidden_size);
    normed_ = normed_buffer_.rows(tokens_, spec_.hidden_size);
    branch_ = branch_buffer_.rows(tokens_, spec_.hidden_size);
    other_ = other_buffer_.rows(tokens_, spec_.hidden_size);
    qkv_ = qkv_buffer_.rows(tokens_, q_size() + 2 * kv_size());
    queries_ = query_buffer_.rows(tokens_ * spec_.num_heads, shape_.width).data;
    attended_ = attended_buffer_.rows(tokens_, q_size());
    inner_ = inner_buffer_.rows(tokens_, spec_.intermediate_size);
    sampled_ = sampled_buffer_.rows(std::max(step.num_logits, (int64_t)1), spec_.hidden_size);
    angles_ = angle_buffer_.rows(tokens_, std::max(angle_width(), 1L));
    if (experts_.count) Experts<T>::prepare(expert_buffers_, experts_, tokens_, spec_.hidden_size);
    if ((long)given_.size() < step.num_logits) given_.resize(step.num_logits);
    head_.reset(step.num_logits ? new Head<T>(weights.head.matrix, spec_.logits_softcap, step, head_buffers_, given_.data())
                                : nullptr);
    keep_sums(step.num_logits);
    list_tiles(step);
  }

  long angle_width() const {
    long width = 0;
    for (const Rope& rope : weights.ropes) width += 2 * (long)rope.frequencies.size();
    return width;
  }

  void keep_sums(long num_logits) {
    long most = kept_size(num_logits, weights.head.matrix);
    for (const Layer<T>& layer : weights.layers)
      for (const Packed<T>* packed :
           {&layer.qkv, &layer.o, &layer.up, &layer.down, &layer.shared_up, &layer.shared_down})
        if (packed->matrix) most = std::max(most, kept_size(tokens_, packed->matrix));
    for (const Layer<T>& layer : weights.layers) most = std::max(most, Experts<T>::kept_size(experts_, layer, tokens_));
    if (most * sizeof(float) > kept_.bytes()) kept_ = Memory(most * sizeof(float));
  }

  void list_tiles(const antiphon_Step& step) {
    spans_.clear();
    row_blocks_.clear();
    span_of_.resize(tokens_);
    for (long s = 0; s < step.num_sequences; s++) {
      const long first = step.query_start_loc[s], end = step.query_start_loc[s + 1];
      spans_.push_back({first, end - first, step.positions[first], step.block_tables + s * step.table_width});
      for (long t = first; t < end; t++) span_of_[t] = s;
    }
    all_alone_ = std::all_of(spans_.begin(), spans_.end(), [this](const Span& span) { return alone(span); });
    for (const Span& span : spans_)
      for (long row = 0; row < span.count * group(); row += kTile) row_blocks_.push_back({&span, row});
  }

  long group() const { return spec_.num_heads / spec_.num_kv_heads; }

  template <class Work>
  void each_token(Work&& work) {
    pool_.share(tokens_, std::max(1L, tokens_ / (8 * pool_.threads())), [&](long first, long last) {
      for (long t = first; t < last; t++) work(t);
    });
  }

  void forward(const antiphon_Step& step, int thread) {
    each_token([&](long t) {
      const int64_t id = step.ids[t];
      embed(t, id < 0 ? given_[-1 - id] : id, step.positions[t]);
    });
    for (Layer<T>& layer : weights.layers) {
      switch ((Residual)spec_.residual) {
        case Residual::sequential:
          sequential(layer, thread);
          break;
        case Residual::parallel:
          parallel(layer, thread);
          break;
        case Residual::normed:
          normed(layer, thread);
          break;
      }
    }
    if (!head_) return;
    pool_.share(step.num_logits, 1, [&](long first, long last) {
      for (long i = first; i < last; i++)
        apply_norm(weights.final_norm, norm_kind(), spec_.norm_eps, hidden_.row(step.logit_tokens[i]), sampled_.row(i),
                   spec_.hidden_size);
    });
    head_->run(pool_, sampled_, kept_.as<float>());
  }

  void sequential(Layer<T>& layer, int thread) {
    norm(layer.input_norm, normed_);
    attention(layer, thread, Target{hidden_, true});
    norm(layer.mlp_norm, normed_);
    mlp(layer, normed_, Target{hidden_, true});
  }

  void parallel(Layer<T>& layer, int thread) {
    norm(layer.input_norm, normed_);
    if (layer.mlp_norm) norm(layer.mlp_norm, other_);
    attention(layer, thread, Target{hidden_, true});
    mlp(layer, layer.mlp_norm ? other_ : normed_, Target{hidden_, true});
  }

  void normed(Layer<T>& layer, int thread) {
    norm(layer.input_norm, normed_);
    attention(layer, thread, Target{branch_, false});
    add_normed(layer.after_attention_norm);
    norm(layer.mlp_norm, normed_);
    mlp(layer, normed_, Target{branch_, false});
    add_normed(layer.after_mlp_norm);
  }

  void embed(long t, int64_t id, int64_t position) {
    const long width = spec_.hidden_size;
    const T* row = weights.embedding + id * width;
    const T* place =
        weights.positions ? weights.positions + (position + spec_.learned_position_offset) * width : nullptr;
    float* to = hidden_.row(t);
    for (long i = 0; i < width; i++)
      to[i] = to_float(row[i]) * spec_.embedding_scale + (place ? to_float(place[i]) : 0.0f);
    float* angles = angles_.row(t);
    for (const Rope& rope : weights.ropes) {
      const size_t pairs = rope.frequencies.size();
      make_angles(rope, position, angles, angles + pairs);
      angles += 2 * pairs;
    }
  }

  void norm(const Norm& norm, Rows<T> to) {
    each_token(
        [&](long t) { apply_norm(norm, norm_kind(), spec_.norm_eps, hidden_.row(t), to.row(t), spec_.hidden_size); });
  }

  void add_normed(const Norm& norm) {
    each_token([&](long t) {
      float *from = branch_.row(t), *to = hidden_.row(t);
      apply_norm(norm, norm_kind(), spec_.norm_eps, from, from, spec_.hidden_size);
      for (long i = 0; i < spec_.hidden_size; i++) to[i] += from[i];
    });
  }

  void attention(Layer<T>& layer, int thread, const Target& target) {
    linear(pool_, layer.qkv.matrix, normed_, tokens_, kept_.as<float>(), Target{qkv_, false});
    if (!all_alone_)
      each_token([&](long t) {
        const Span& span = spans_[span_of_[t]];
        if (!alone(span))
          for (long h = 0; h < spec_.num_kv_heads; h++) split_heads(layer, span, t, h);
      });
    const AttentionInput<T> input{shape_,          layer.cache, {spec_.attention_softcap, slopes(), layer.window},
                                  spec_.num_heads, group(),     queries_,
                                  attended_};
    const long count = (long)row_blocks_.size(), items = count * spec_.num_kv_heads;
    pool_.share(items, std::max(1L, items / (16 * pool_.threads())), [&](long first, long last) {
      for (long i = first; i < last; i++) {
        // The last rows of a prompt see most: they go first.
        const Tile& tile = row_blocks_[count - 1 - i % count];
        // What this thread writes here it also reads first, from its own cache.
        if (alone(*tile.span)) split_heads(layer, *tile.span, tile.span->first, i / count);
        Attention<T> attention(input, *tile.span, i / count, tile.first_row, tiles_[thread]);
        if (i + 1 < last) attention.followed_by(*row_blocks_[count - 1 - (i + 1) % count].span, (i + 1) / count);
        attention.run();
      }
    });
    linear(pool_, layer.o.matrix, attended_, tokens_, kept_.as<float>(), target);
  }

  const float* slopes() const { return weights.slopes.empty() ? nullptr : weights.slopes.data(); }

  // Whether nobody but one tile for each key head reads what the span's tokens write.
  bool alone(const Span& span) const { return span.count == 1 && group() <= kTile; }

  // Norms and rotates a key head of a token and the query heads that read it; queries are scaled and kept, keys and
  // values go to the cache.
  void split_heads(const Layer<T>& layer, const Span& span, long t, long kv_head) {
    const long position = span.start + t - span.first, dim = spec_.head_dim;
    float* heads = qkv_.row(t);
    for (long h = kv_head * group(); h < (kv_head + 1) * group(); h++) {
      prepare_head(layer, t, h, heads + h * dim);
      keep_query(t, h, heads + h * dim);
    }
    float* key = heads + q_size() + kv_head * dim;
    prepare_head(layer, t, spec_.num_heads + kv_head, key);
    const long block = span.blocks[position / shape_.block_size], place = position % shape_.block_size;
    write_key(shape_, layer.cache.keys, block, kv_head, place, key);
    write_value(shape_, layer.cache.values, block, kv_head, place, key + kv_size());
  }

  void prepare_head(const Layer<T>& layer, long t, long h, float* head) const {
    if (!layer.qk_norm.empty()) norm_head(layer.qk_norm.data() + h * spec_.head_dim, head);
    if (layer.rope >= 0) rotate_head(layer.rope, t, head);
  }

  void norm_head(const float* weight, float* head) const {
    const float scale = 1.0f / std::sqrt(mean_square(head, spec_.head_dim) + spec_.norm_eps);
    for (long d = 0; d < spec_.head_dim; d++) head[d] *= scale * weight[d];
  }

  void rotate_head(long index, long t, float* head) const {
    const float* angles = angles_.row(t);
    for (long i = 0; i < index; i++) angles += 2 * weights.ropes[i].frequencies.size();
    const Rope& rope = weights.ropes[index];
    rotate(rope, angles, angles + rope.frequencies.size(), head);
  }

  void keep_query(long t, long h, const float* head) const {
    const float scale = spec_.query_scale * (spec_.attention_softcap != 0 ? 1.0f : kLog2E);
    T* to = queries_ + (t * spec_.num_heads + h) * shape_.width;
    for (long d = 0; d < spec_.head_dim; d += kLanes) {
      const long count = std::min(kLanes, spec_.head_dim - d);
      store_some(to + d, load_some(head + d, count) * scale, count);
    }
  }

  void mlp(const Layer<T>& layer, Rows<T> x, const Target& target) {
    float* kept = kept_.as<float>();
    if (!layer.expert_up.empty())
      return Experts<T>(pool_, experts_, activation(), kept)
          .run(layer, expert_buffers_, x, tokens_, spec_.hidden_size, target);
    mlp_inner(pool_, layer.up.matrix, spec_.gated_mlp != 0, activation(), x, tokens_, kept, inner_);
    linear(pool_, layer.down.matrix, inner_, tokens_, kept, target);
  }

  const antiphon_Spec& spec_;
  Pool& pool_;
  CacheShape shape_;
  ExpertShape experts_;
  long tokens_ = 0;

  RowBuffer<float> hidden_buffer_, branch_buffer_, qkv_buffer_, angle_buffer_;
  RowBuffer<T> normed_buffer_, other_buffer_, query_buffer_, attended_buffer_, inner_buffer_, sampled_buffer_;
  ExpertBuffers<T> expert_buffers_;
  HeadBuffers head_buffers_;
  Memory kept_;
  Rows<float> hidden_, branch_, qkv_, angles_;
  Rows<T> normed_, other_, attended_, inner_, sampled_;
  T* queries_ = nullptr;
  std::vector<int64_t> given_;  // the likeliest tokens of the last step that had some
  std::vector<Span> spans_;
  std::vector<long> span_of_;  // of each token
  std::vector<Tile> row_blocks_;
  bool all_alone_ = false;
  std::unique_ptr<TileState<T>[]> tiles_;
  std::unique_ptr<Head<T>> head_;
};

}  // namespace antiphon
