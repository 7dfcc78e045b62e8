// A step of a decoder: all threads together compute every phase of every layer.
//
//     hidden [tokens][hidden_size] in float32: the residual stream
//     each matrix multiplies rows of the model's type and passes its float32 sums to the next operation
//
// The spec (abi.h) and the weights determine what a model computes. Called by ModelOf (model_of.h) on the runner's
// thread.
#pragma once

#include <memory>

#include "batch.h"
#include "by_rows.h"
#include "experts.h"
#include "head.h"
#include "latent.h"
#include "lora.h"
#if defined(__AMX_BF16__)
#include "single_row.h"
#endif

namespace antiphon {

enum class Residual : int64_t { sequential, parallel, normed, post_normed };

// Fewer rows of latents do not share the work of making values of a unit's keys.
constexpr long kLatentRows = 8;

template <class T>
class Decoder {
 public:
  Decoder(const antiphon_Spec& spec, Pool& pool) : spec_(spec), pool_(pool) {
    shape_ = make_cache_shape<T>(spec.num_kv_heads, spec.head_dim, spec.block_size, (Stored)spec.cache,
                                 spec.latent_rank);
    latent_ = {spec.num_heads, spec.latent_rank, spec.latent_nope, spec.head_dim - spec.latent_rank, spec.latent_value,
               spec.query_rank, spec.latent_eps};
    experts_ = {spec.num_experts, spec.experts_per_token, spec.expert_size, spec.shared_expert_size,
                spec.normalise_experts != 0, (Scoring)spec.expert_scoring, spec.expert_groups, spec.chosen_groups,
                spec.expert_scale, spec.best_of_group};
    tile_bytes_ = latent_ ? TileState<T>::bytes(kTile, shape_.width) : tile_bytes<T>(shape_, group());
    tiles_ = Memory((size_t)(pool.threads() * tile_bytes_));
    scratch_.reset(new TileScratch<T>[pool.threads()]);
    own_.reset(new OwnRows<T>[pool.threads()]);
    weights.layers.resize(spec.num_layers);
    lora_slots.assign(spec.lora_slots, std::vector<LoraLayer<T>>(spec.num_layers));
  }

  const CacheShape& cache_shape() const { return shape_; }

  // Allocates memory for steps of up to so many tokens and logits; the weights must be set. Returns how many bytes all
  // of it takes once such steps have filled it.
  long reserve(long tokens, long logits) {
    const long before = Memory::live();
    asked_most_ = logits;
    make_room(tokens, logits, logits);
    asked_buffers_.rows(spec_, std::min(tokens, logits));
    head_buffers_.prepare(logits, weights.head.matrix.panels);
    prepare_own(can_go_by_rows() ? rows_apart_most() : 0);
    // A full pass of kPassRows rows can need more than all rows, which are divided into even passes.
    keep_sums({tokens, logits, std::min(tokens, kPassRows)}, logits);
    keep_sums({}, std::min(logits, kPassRows));
    const long tiles = latent_ ? (spec_.num_heads + kLatentRows - 1) / kLatentRows : spec_.num_kv_heads;
    const long lists = tokens * (experts_.per_token * 32 + tiles * 2 * (long)sizeof(Tile) + 64);
    return Memory::live() - before + lists;
  }

  void step(const antiphon_Step& step) {
    prepare(step);
    pool_.run([this, &step](int thread) { forward(step, thread); });
  }

  Weights<T> weights;
  std::vector<std::vector<LoraLayer<T>>> lora_slots;  // of each slot, what its adapter adds to each layer

 private:
  long q_size() const { return spec_.num_heads * spec_.head_dim; }
  long kv_size() const { return spec_.num_kv_heads * spec_.head_dim; }
  Residual residual() const { return (Residual)spec_.residual; }
  NormKind norm_kind() const { return (NormKind)spec_.norm; }
  Activation activation() const { return (Activation)spec_.activation; }

  // `asked`: number of tokens whose final hidden states are requested, those with logits included. If there are more
  // than `reserve` provided for, the last layer is computed for all tokens, in the memory of the other layers.
  void make_room(long tokens, long logits, long asked) {
    tokens_ = tokens;
    all_ = all_buffers_.rows(spec_, tokens_);
    asked_ = asked < tokens_ && asked <= std::max(logits, asked_most_) ? asked_buffers_.rows(spec_, asked) : all_;
    qkv_ = qkv_buffer_.rows(tokens_, latent_ ? latent_.first() + latent_.row() : q_size() + 2 * kv_size());
    if (latent_) latent_buffers_.prepare(latent_, tokens_);
    queries_ = query_buffer_.rows(tokens_ * spec_.num_heads, shape_.width).data;
    sampled_ = sampled_buffer_.rows(std::max(logits, 1L), spec_.hidden_size);
    angles_ = angle_buffer_.rows(tokens_, std::max(angle_width(), 1L));
    if (experts_.count) Experts<T>::prepare(expert_buffers_, experts_, tokens_, spec_.hidden_size);
    if (spec_.lora_slots) lora_inner_ = lora_buffer_.rows(tokens_, kLoraParts * spec_.lora_rank);
    if ((long)given_.size() < logits) given_.resize(logits);
  }

  // Allocates all memory that the step needs and lists its attention tiles, before the threads start.
  void prepare(const antiphon_Step& step) {
    list_asked_tokens(step);
    make_room(step.num_tokens, step.num_logits, (long)asked_tokens_.size());
    head_.reset(step.num_logits
                    ? new Head<T>(weights.head.matrix, spec_.logits_scale, spec_.logits_softcap, step, head_buffers_, given_.data())
                    : nullptr);
    list_lora_rows(step);
    rows_apart_ = can_go_by_rows() && !has_lora_ ? rows_apart() : 0;
    prepare_own(rows_apart_);
    keep_sums({tokens_, asked_.count}, step.num_logits);
    list_tiles(step);
  }

  void list_lora_rows(const antiphon_Step& step) {
    has_lora_ = step.lora != nullptr;
    all_lora_.clear(), asked_lora_.clear();
    if (!has_lora_) return;
    for (long t = 0; t < tokens_; t++) all_lora_.add(step.lora[t]);
    if (asked_.count < tokens_)
      for (const int64_t t : asked_tokens_) asked_lora_.add(step.lora[t]);
  }

  // `b` is all_ or asked_, which are the same batch if the final hidden states of all tokens are requested.
  LoraProduct<T> lora(const Layer<T>& layer, LoraTarget target, const Batch<T>& b) const {
    const LoraRows& rows = b.count < tokens_ ? asked_lora_ : all_lora_;
    const long index = &layer - weights.layers.data();
    return {lora_slots, {index, target, 0}, after(layer, target), rows, lora_inner_, matrix(layer, target).panels};
  }

  // Returns the matrix that adapters change next after one of a layer.
  LoraPlace after(const Layer<T>& layer, LoraTarget target) const {
    const long index = &layer - weights.layers.data();
    if (target != LoraTarget::down) {
      const LoraTarget next = (LoraTarget)((long)target + 1);
      return {index, next, matrix(layer, next).terms};
    }
    if (&layer == &weights.layers.back()) return {};
    return {index + 1, LoraTarget::qkv, matrix((&layer)[1], LoraTarget::qkv).terms};
  }

  static const Linear<T>& matrix(const Layer<T>& layer, LoraTarget target) {
    switch (target) {
      case LoraTarget::qkv:
        return layer.qkv.matrix;
      case LoraTarget::o:
        return layer.o.matrix;
      case LoraTarget::up:
        return layer.up.matrix;
      case LoraTarget::down:
        return layer.down.matrix;
    }
    __builtin_unreachable();
  }

  // Multiplies rows of a batch by a matrix of a layer that adapters can change.
  void adaptable(const Layer<T>& layer, LoraTarget which, const Linear<T>& w, Inputs<T> x, const Batch<T>& b,
                 const Target& target) {
    float* kept = kept_.as<float>();
    if (has_lora_)
      linear(pool_, w, x, b.count, kept, target, lora(layer, which, b));
    else
      linear(pool_, w, x, b.count, kept, target);
  }

  void prepare_own(long rows) {
    for (long i = 0; rows && i < pool_.threads(); i++)
      own_[i].prepare(rows, spec_.hidden_size, spec_.intermediate_size, (group() + 2) * spec_.head_dim);
  }

  // Whether all layers are of the kind that by_rows.h supports, and heads consist of whole panels.
  bool can_go_by_rows() const {
    return residual() == Residual::sequential && !experts_.count && !latent_ && spec_.head_dim % kPanel == 0 &&
           std::all_of(weights.layers.begin(), weights.layers.end(), [](const Layer<T>& layer) {
             return layer.qkv.matrix.data && layer.o.matrix.data && layer.up.matrix.data && layer.down.matrix.data;
           });
  }

  long rows_apart_most() const {
    return std::min(kOwnRows, cache_bytes() / OwnRows<T>::bytes(spec_.hidden_size, spec_.intermediate_size));
  }

  // Returns how many rows a thread takes through a layer by itself, the same number for all; 0 if the threads should
  // share each matrix instead.
  long rows_apart() const {
    const long most = rows_apart_most();
    if (most < kRowsApart<T>) return 0;
    const long parts = round_up((tokens_ + most - 1) / most, pool_.threads()), rows = (tokens_ + parts - 1) / parts;
    return rows < kRowsApart<T> ? 0 : rows;
  }

  long angle_width() const {
    long width = 0;
    for (const Rope& rope : weights.ropes) width += 2 * (long)rope.frequencies.size();
    return width;
  }

  // Allocates the buffer of partial sums for steps, and ends of steps, with these numbers of rows.
  void keep_sums(std::initializer_list<long> counts, long num_logits) {
    long most = kept_size(num_logits, weights.head.matrix);
    for (const Layer<T>& layer : weights.layers)
      for (const long rows : counts) {
        for (const Packed<T>* packed :
             {&layer.qkv, &layer.o, &layer.up, &layer.down, &layer.shared_up, &layer.shared_down, &layer.query_up})
          if (packed->matrix) most = std::max(most, kept_size(rows, packed->matrix));
        most = std::max(most, Experts<T>::kept_size(experts_, layer, rows));
      }
    if (most * sizeof(float) > kept_.bytes()) kept_ = Memory(most * sizeof(float));
  }

  void list_tiles(const antiphon_Step& step) {
    spans_.clear();
    span_of_.resize(tokens_);
    for (long s = 0; s < step.num_sequences; s++) {
      const long first = step.query_start_loc[s], end = step.query_start_loc[s + 1];
      spans_.push_back({first, end - first, step.positions[first], step.block_tables + s * step.table_width});
      for (long t = first; t < end; t++) span_of_[t] = s;
    }
    all_alone_ = std::all_of(spans_.begin(), spans_.end(), [this](const Span& span) { return alone(span); });
    row_blocks_.clear();
    // Prompts: all rows with one key head come before those with the next; the last rows, which see the most keys, come
    // first.
    const long most = tile_rows();
    for (long head = 0; head < spec_.num_kv_heads; head++)
      for (const Span& span : spans_) {
        if (alone(span)) continue;
        const long rows = span.count * group();
        for (long row = (rows - 1) / most * most; row >= 0; row -= most)
          row_blocks_.push_back({&span, head, 1, row, std::min(most, rows - row)});
      }
    // Single tokens (see `alone`): a tile has several heads, which lie side by side in each block of the cache.
    const long heads = spec_.num_kv_heads, parts = single_row_parts();
    for (const Span& span : spans_) {
      if (!alone(span)) continue;
      for (long part = 0; part < parts; part++) {
        const long first = heads * part / parts;
        row_blocks_.push_back({&span, first, heads * (part + 1) / parts - first, 0, group()});
      }
    }
    list_asked();
  }

  // Returns how many rows a tile has at most. Over latents, the heads of a few tokens are divided among the threads.
  long tile_rows() const {
    if (!latent_) return kTile;
    const long fair = (tokens_ * group() + pool_.threads() - 1) / pool_.threads();
    return std::min(round_up(fair, kLatentRows), kTile);
  }

  // Returns into how many tiles the heads of a single token are divided: as few as keep all threads busy until the end.
  long single_row_parts() const {
    const long single = std::count_if(spans_.begin(), spans_.end(), [this](const Span& span) { return alone(span); });
    const long least = (spec_.num_kv_heads + kHeadsTogether - 1) / kHeadsTogether;
    return std::min(std::max(least, 8 * pool_.threads() / std::max(single, 1L)), spec_.num_kv_heads);
  }

  // Lists the tokens whose final hidden states are requested: first those with logits, then those of the spans.
  void list_asked_tokens(const antiphon_Step& step) {
    asked_tokens_.assign(step.logit_tokens, step.logit_tokens + step.num_logits);
    for (long i = 0; i < step.num_spans; i++)
      for (int64_t t = step.spans[2 * i]; t < step.spans[2 * i + 1]; t++) asked_tokens_.push_back(t);
  }

  // Lists the tiles of the last layer. Tokens that are not requested only need their keys and values there. Tiles of
  // single tokens are listed in any case, because they write the keys and values of their token.
  void list_asked() {
    if (!asked_tokens_.empty() && asked_.count == tokens_) {
      asked_blocks_ = row_blocks_;
      return;
    }
    std::vector<char> asked(tokens_);
    for (const int64_t t : asked_tokens_) asked[t] = 1;
    asked_blocks_.clear();
    for (const Tile& tile : row_blocks_) {
      const long first = tile.span->first + tile.first_row / group();
      const long last = tile.span->first + (tile.first_row + tile.rows - 1) / group();
      if (alone(*tile.span) || std::any_of(&asked[first], &asked[last] + 1, [](char is) { return is; }))
        asked_blocks_.push_back(tile);
    }
  }

  long group() const { return spec_.num_heads / spec_.num_kv_heads; }

  template <class Work>
  void each(long count, Work&& work) {
    pool_.share(count, std::max(1L, count / (8 * pool_.threads())), [&](long first, long last) {
      for (long i = first; i < last; i++) work(i);
    });
  }

  void forward(const antiphon_Step& step, int thread) {
    each(tokens_, [&](long t) {
      const int64_t id = step.ids[t];
      const T* own = step.embeddings ? reinterpret_cast<const T*>(step.embeddings[t]) : nullptr;
      embed(t, id < 0 ? given_[-1 - id] : id, step.positions[t], own);
    });
    if (rows_apart_)
      layers_by_rows(thread);
    else
      layers(thread);
    if (asked_tokens_.empty()) return;
    if (asked_.count < tokens_)
      each(asked_.count, [&](long i) { copy_row(spec_, all_, asked_tokens_[i], asked_, i); });
    after_attention(weights.layers.back(), asked_);
    if (step.num_spans) add_spans(step);
    if (!head_) return;
    pool_.share(step.num_logits, 1, [&](long first, long last) {
      for (long i = first; i < last; i++)
        apply_norm(weights.final_norm, norm_kind(), spec_.norm_eps, asked_.hidden.row(place(i)), sampled_.row(i),
                   spec_.hidden_size);
    });
    head_->run(pool_, sampled_, kept_.as<float>());
  }

  // Returns the row of `asked_` that has the token `asked_tokens_[i]`.
  long place(long i) const { return asked_.count < tokens_ ? i : asked_tokens_[i]; }

  // Adds up the final hidden states of each span, in the order of its tokens. Overwrites their rows.
  void add_spans(const antiphon_Step& step) {
    pool_.share(step.num_spans, 1, [&](long first, long last) {
      for (long s = first; s < last; s++) {
        long i = step.num_logits;
        for (const int64_t* span = step.spans; span < step.spans + 2 * s; span += 2) i += span[1] - span[0];
        float* sum = step.sums + s * spec_.hidden_size;
        std::fill(sum, sum + spec_.hidden_size, 0.0f);
        for (long left = step.spans[2 * s + 1] - step.spans[2 * s]; left > 0; left--, i++) {
          float* row = asked_.hidden.row(place(i));
          apply_norm(weights.final_norm, norm_kind(), spec_.norm_eps, row, row, spec_.hidden_size);
          for (long d = 0; d < spec_.hidden_size; d++) sum[d] += row[d];
        }
      }
    });
  }

  // Computes all layers up to the attention of the last one.
  void layers(int thread) {
    for (Layer<T>& layer : weights.layers) {
      const bool last = &layer == &weights.layers.back();
      before_attention(layer);
      attend(layer, thread, last ? asked_blocks_ : row_blocks_, true);
      if (!last) after_attention(layer, all_);
    }
  }

  // As above, but between two attentions a thread takes its rows from one layer to the next by itself.
  void layers_by_rows(int thread) {
    const Heads<T> heads = this->heads();
    const auto span_of = [this](long t) -> const Span& { return spans_[span_of_[t]]; };
    for (Layer<T>& layer : weights.layers) {
      pool_.share((tokens_ + rows_apart_ - 1) / rows_apart_, 1, [&](long part, long end) {
        for (; part < end; part++) {
          const long first = part * rows_apart_, count = std::min(rows_apart_, tokens_ - first);
          const RowsOfLayer<T> rows(spec_, heads, own_[thread], all_.hidden, first, count);
          if (&layer != &weights.layers.front()) rows.after_attention((&layer)[-1], all_.attended);
          rows.before_attention(layer, span_of);
        }
      });
      attend(layer, thread, &layer == &weights.layers.back() ? asked_blocks_ : row_blocks_, false);
    }
  }

  void before_attention(const Layer<T>& layer) {
    norm(layer.input_norm, all_, all_.normed);
    if (residual() == Residual::parallel && layer.mlp_norm) norm(layer.mlp_norm, all_, all_.other);
    adaptable(layer, LoraTarget::qkv, layer.qkv.matrix, all_.normed, all_, Target{qkv_, false});
    const auto span_of = [this](long t) -> const Span& { return spans_[span_of_[t]]; };
    if (latent_) return latents().before_attention(layer, qkv_, tokens_, span_of);
    if (spec_.qk_norm == 2) each(tokens_, [&](long t) { norm_heads_together(layer, t); });
    if (all_alone_) return;
    each(tokens_, [&](long t) {
      const Span& span = span_of(t);
      if (!alone(span))
        for (long h = 0; h < spec_.num_kv_heads; h++) split_heads(layer, span, t, h);
    });
  }

  void after_attention(const Layer<T>& layer, const Batch<T>& b) {
    const bool adds = residual() == Residual::sequential || residual() == Residual::parallel;
    const Target target = adds ? Target{b.hidden, true} : Target{b.branch, false};
    const Inputs<T> attended = latent_ ? latents().values(layer, b.attended, b.count) : b.attended;
    adaptable(layer, LoraTarget::o, layer.o.matrix, attended, b, target);
    switch (residual()) {
      case Residual::sequential:
        norm(layer.mlp_norm, b, b.normed);
        return mlp(layer, b, b.normed, target);
      case Residual::parallel:
        return mlp(layer, b, layer.mlp_norm ? b.other : b.normed, target);
      case Residual::normed:
      case Residual::post_normed:
        add_normed(layer.after_attention_norm, b);
        norm(layer.mlp_norm, b, b.normed);
        mlp(layer, b, b.normed, target);
        return add_normed(layer.after_mlp_norm, b);
    }
  }

  // `own`: the embedding to use in place of the id's; null: the id's.
  void embed(long t, int64_t id, int64_t position, const T* own) {
    const long width = spec_.hidden_size;
    const T* row = own ? own : weights.embedding ? weights.embedding + id * width : nullptr;
    const T* place =
        weights.positions ? weights.positions + (position + spec_.learned_position_offset) * width : nullptr;
    float* to = all_.hidden.row(t);
    if (!row) weights.head.unpack(id, to);
    for (long i = 0; i < width; i++)
      to[i] = (row ? to_float(row[i]) : to[i]) * spec_.embedding_scale + (place ? to_float(place[i]) : 0.0f);
    float* angles = angles_.row(t);
    for (const Rope& rope : weights.ropes) {
      const size_t pairs = rope.frequencies.size();
      make_angles(rope, position, angles, angles + pairs);
      angles += 2 * pairs;
    }
  }

  // Without a norm the hidden states are copied, in the type that matrices are multiplied with.
  void norm(const Norm& norm, const Batch<T>& b, Inputs<T> to) {
    each(b.count, [&](long i) {
      if (norm)
        apply_norm(norm, norm_kind(), spec_.norm_eps, b.hidden.row(i), to.row(i), spec_.hidden_size);
      else
        copy_floats(b.hidden.row(i), to.row(i), spec_.hidden_size);
    });
  }

  void norm_heads_together(const Layer<T>& layer, long t) {
    float* sums = qkv_.row(t);
    const float* weight = layer.qk_norm.data();
    for (const long count : {q_size(), kv_size()}) {
      const float scale = 1.0f / std::sqrt(mean_square(sums, count) + spec_.norm_eps);
      for (long d = 0; d < count; d++) sums[d] *= scale * weight[d];
      sums += count, weight += count;
    }
  }

  void add_normed(const Norm& norm, const Batch<T>& b) {
    each(b.count, [&](long i) {
      float *from = b.branch.row(i), *to = b.hidden.row(i);
      apply_norm(norm, norm_kind(), spec_.norm_eps, from, from, spec_.hidden_size);
      for (long d = 0; d < spec_.hidden_size; d++) to[d] += from[d];
    });
  }

  // `single_keys`: the keys and values of single tokens are not in the cache yet and are written here.
  void attend(Layer<T>& layer, int thread, const std::vector<Tile>& tiles, bool single_keys) {
    const float* sinks = layer.sinks.empty() ? nullptr : layer.sinks.data();
    const ScoreRules rules{spec_.attention_softcap, slopes(), layer.window, sinks};
    const AttentionInput<T> input{shape_, layer.cache, rules, spec_.num_heads, group(), queries_, all_.attended};
    const long count = (long)tiles.size();
    pool_.share(count, std::max(1L, count / (16 * pool_.threads())), [&](long first, long last) {
      for (long i = first; i < last; i++) {
        const Tile& tile = tiles[i];
        // The thread that writes these keys and values also reads them first, from its own cache.
        const long unwritten = single_keys && alone(*tile.span) ? tile.heads : 0;
        for (long h = 0; h < unwritten; h++) split_heads(layer, *tile.span, tile.span->first, tile.kv_head + h);
        attend_tile(input, tile, i + 1 < last ? &tile + 1 : nullptr, tiles_.as<char>() + thread * tile_bytes_,
                    scratch_[thread]);
      }
    });
  }

  static void attend_tile(const AttentionInput<T>& in, const Tile& tile, const Tile* next, char* memory,
                          TileScratch<T>& scratch) {
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) == sizeof(Bf16))
      if (tile.span->count == 1 && in.group == 1 && in.shape.stored == Stored::model && !in.shape.latent) {
        SingleRow row(in, *tile.span, tile.kv_head, memory, scratch);
        if (next) row.followed_by(*next->span, next->kv_head);
        return row.run();
      }
#endif
    antiphon::attend(in, tile, next, memory, scratch);
  }

  const float* slopes() const { return weights.slopes.empty() ? nullptr : weights.slopes.data(); }

  // Whether the span is a single token whose keys and values are read by only one tile per key head.
  bool alone(const Span& span) const { return span.count == 1 && group() <= kTile && !latent_; }

  void split_heads(const Layer<T>& layer, const Span& span, long t, long kv_head) {
    float* sums = qkv_.row(t);
    float* key = sums + q_size() + kv_head * spec_.head_dim;
    heads().split(layer, span, t, kv_head, {sums + kv_head * group() * spec_.head_dim, key, key + kv_size()});
  }

  Heads<T> heads() const { return {spec_, shape_, weights.ropes, angles_, queries_}; }
  Latents<T> latents() { return {pool_, latent_, shape_, heads(), latent_buffers_, kept_.as<float>()}; }

  void mlp(const Layer<T>& layer, const Batch<T>& b, Inputs<T> x, const Target& target) {
    float* kept = kept_.as<float>();
    if (!layer.expert_up.empty())
      return Experts<T>(pool_, experts_, activation(), kept)
          .run(layer, expert_buffers_, x, b.count, spec_.hidden_size, target);
    const bool gated = spec_.gated_mlp != 0;
    if (has_lora_)
      mlp_inner(pool_, layer.up.matrix, gated, activation(), x, b.count, kept, b.inner,
                lora(layer, LoraTarget::up, b));
    else
      mlp_inner(pool_, layer.up.matrix, gated, activation(), x, b.count, kept, b.inner);
    adaptable(layer, LoraTarget::down, layer.down.matrix, b.inner, b, target);
  }

  const antiphon_Spec& spec_;
  Pool& pool_;
  CacheShape shape_;
  ExpertShape experts_;
  LatentShape latent_;
  LatentBuffers<T> latent_buffers_;
  long tokens_ = 0;

  BatchBuffers<T> all_buffers_, asked_buffers_;
  RowBuffer<float> qkv_buffer_, angle_buffer_;
  RowBuffer<TermOf<T>> query_buffer_, sampled_buffer_;
  ExpertBuffers<T> expert_buffers_;
  HeadBuffers head_buffers_;
  Memory kept_;
  Batch<T> all_, asked_;  // rows of all tokens; of the tokens whose final hidden states are requested
  Rows<float> qkv_, angles_;
  Inputs<T> sampled_;
  TermOf<T>* queries_ = nullptr;
  std::vector<int64_t> given_;  // the most likely tokens of the last step that had logits
  std::vector<Span> spans_;
  std::vector<long> span_of_;  // the span of each token
  std::vector<int64_t> asked_tokens_;
  long asked_most_ = 0;  // number of rows that `reserve` provided for requested tokens
  std::vector<Tile> row_blocks_, asked_blocks_;
  bool all_alone_ = false;
  Memory tiles_;  // `tile_bytes_` for each thread
  long tile_bytes_ = 0;
  std::unique_ptr<TileScratch<T>[]> scratch_;
  std::unique_ptr<OwnRows<T>[]> own_;
  long rows_apart_ = 0;  // rows that a thread takes through a layer by itself; 0: the threads share each matrix
  bool has_lora_ = false;  // whether any token of the step has an adapter
  LoraRows all_lora_, asked_lora_;
  RowBuffer<float> lora_buffer_;
  Rows<float> lora_inner_;
  std::unique_ptr<Head<T>> head_;
};

}  // namespace antiphon
