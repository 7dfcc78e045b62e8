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
#include "draft.h"
#include "embedding.h"
#include "ending.h"
#include "experts.h"
#include "gates.h"
#include "head.h"
#include "latent.h"
#include "lora.h"
#include "mixers.h"
#include "tile_lists.h"
#if defined(__AMX_BF16__)
#include "single_row.h"
#endif

namespace antiphon {

enum class Residual : int64_t { sequential, parallel, normed, post_normed };

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
                spec.expert_scale, spec.best_of_group, spec.gated_mlp != 0, spec.expert_latent,
                spec.weighted_inputs != 0};
    tile_bytes_ = latent_ ? TileState<T>::bytes(kTile, shape_.width) : tile_bytes<T>(shape_, group());
    tiles_ = Memory((size_t)(pool.threads() * tile_bytes_));
    scratch_.reset(new TileScratch<T>[pool.threads()]);
    own_.reset(new OwnRows<T>[pool.threads()]);
    weights.layers.resize(spec.num_layers);
    for (Layer<T>& layer : weights.layers) layer.shape = shape_;
    lora_slots.assign(spec.lora_slots, std::vector<LoraLayer<T>>(spec.num_layers));
  }

  const CacheShape& cache_shape() const { return shape_; }

  // Allocates memory for steps of up to so many tokens and logits; the weights must be set. Returns how many bytes all
  // of it takes once such steps have filled it.
  long reserve(long tokens, long logits) {
    const long before = Memory::live();
    prepare_lists();
    asked_most_ = logits;
    make_room(tokens, logits, logits);
    asked_buffers_.rows(spec_, std::min(tokens, logits));
    head_buffers_.prepare(logits, weights.head.matrix.panels);
    prepare_own(can_go_by_rows() ? rows_apart_most() : 0);
    // A full pass of kPassRows rows can need more than all rows, which are divided into even passes.
    keep_sums({tokens, logits, std::min(tokens, kPassRows)}, logits);
    keep_sums({}, std::min(logits, kPassRows));
    const long tiles = latent_ ? (spec_.num_heads + kLatentRows - 1) / kLatentRows : spec_.num_kv_heads;
    const long lists = tokens * (experts_.per_token * 32 + tiles * 2 * (long)(lists_.size() * sizeof(Tile)) + 64);
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

  // `asked`: number of tokens whose final hidden states are requested, those with logits included. If there are more
  // than `reserve` provided for, the last layer is computed for all tokens, in the memory of the other layers.
  void make_room(long tokens, long logits, long asked) {
    tokens_ = tokens;
    all_ = all_buffers_.rows(spec_, tokens_);
    asked_ = asked < tokens_ && asked <= std::max(logits, asked_most_) ? asked_buffers_.rows(spec_, asked) : all_;
    const long projected = latent_ ? latent_.first() + latent_.row() : q_size() + 2 * kv_size();
    const long first = spec_.attends_beside ? round_up(projected, kPanel) : 0;
    qkv_ = qkv_buffer_.rows(tokens_, std::max(projected, first + (long)spec_.mixed_width));
    mixed_ = {qkv_.data + first, qkv_.stride};
    if (spec_.num_gates) gates_ = gate_buffer_.rows(tokens_, spec_.num_gates);
    if (latent_) latent_buffers_.prepare(latent_, tokens_);
    mixers_.prepare(tokens_);
    queries_ = query_buffer_.rows(tokens_ * spec_.num_heads, shape_.width).data;
    sampled_ = sampled_buffer_.rows(std::max(logits, 1L), spec_.hidden_size);
    angles_ = angle_buffer_.rows(tokens_, std::max(angle_width(), 1L));
    if (grows() && (long)growth_.size() < tokens_) growth_.resize(tokens_);
    if (experts_.count) Experts<T>::prepare(expert_buffers_, experts_, tokens_, spec_.hidden_size);
    if (spec_.experts_beside) beside_ = beside_buffer_.rows(tokens_, spec_.hidden_size);
    Ending<T>::prepare(ending_buffers_, spec_, tokens_);
    if (spec_.cuts_gates) cut_ = cut_buffer_.rows(std::min(tokens_, kPassRows), gated_columns(spec_.intermediate_size));
    if (spec_.lora_slots) lora_inner_ = lora_buffer_.rows(tokens_, kLoraParts * spec_.lora_rank);
    if ((long)given_.size() < logits) given_.resize(logits);
    drafts_.prepare(spec_, tokens_);
  }

  // Allocates all memory that the step needs and lists its attention tiles, before the threads start.
  void prepare(const antiphon_Step& step) {
    list_asked_tokens(step);
    Layer<T>* const drafting = weights.layers.data() + spec_.num_layers - spec_.num_draft_layers;
    first_ = step.sources ? drafting : weights.layers.data();
    last_ = step.sources ? &weights.layers.back() : drafting - 1;
    make_room(step.num_tokens, step.num_logits, step.keeps ? step.num_tokens : (long)asked_tokens_.size());
    head_.reset(step.num_logits
                    ? new Head<T>(weights.head.matrix, spec_.logits_scale, spec_.logits_softcap, step, head_buffers_, given_.data())
                    : nullptr);
    list_lora_rows(step);
    rows_apart_ = can_go_by_rows() && !has_lora_ ? rows_apart() : 0;
    prepare_own(rows_apart_);
    keep_sums({tokens_, asked_.count, spec_.cuts_gates ? std::min(tokens_, kPassRows) : 0}, step.num_logits);
    list_tiles(step);
    moves_ = {step.query_start_loc, step.state_sources, step.state_starts, step.state_ends, step.state_slots,
              step.num_sequences};
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
    if (&layer == last_) return {};
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
           !spec_.conv_kernel && !spec_.num_gates &&
           std::all_of(weights.layers.begin(), weights.layers.end(), [this](const Layer<T>& layer) {
             return heads_of(layer) == spec_.num_heads && layer.shape.kv_heads == shape_.kv_heads &&
                    layer.shape.head_dim == shape_.head_dim && layer.qkv.matrix.data && layer.o.matrix.data &&
                    layer.up.matrix.data && layer.down.matrix.data;
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

  // Whether queries are multiplied by a factor that grows with the position.
  bool grows() const { return spec_.query_growth_length != 0; }

  long angle_width() const {
    long width = 0;
    for (const Rope& rope : weights.ropes) width += 2 * (long)rope.frequencies.size();
    return width;
  }

  // Allocates the buffer of partial sums for steps, and ends of steps, with these numbers of rows.
  void keep_sums(std::initializer_list<long> counts, long num_logits) {
    long most = kept_size(num_logits, weights.head.matrix);
    if (weights.inputs_in.matrix) most = std::max(most, kept_size(tokens_, weights.inputs_in.matrix));
    for (const auto* streams : {&weights.stream_in, &weights.stream_out})
      for (const Packed<T>& packed : *streams)
        for (const long rows : counts) most = std::max(most, kept_size(rows, packed.matrix));
    for (const Layer<T>& layer : weights.layers)
      for (const long rows : counts) {
        for (const Packed<T>* packed :
             {&layer.qkv, &layer.o, &layer.up, &layer.down, &layer.shared_up, &layer.shared_down, &layer.query_up,
              &layer.gate, &layer.input_gate, &layer.input_out, &layer.side_in, &layer.side_out, &layer.draft_input,
              &layer.mix_in, &layer.mix_out, &layer.mix_select, &layer.mix_step, &layer.mix_decay,
              &layer.mix_out_gate})
          if (packed->matrix) most = std::max(most, kept_size(rows, packed->matrix));
        most = std::max(most, Experts<T>::kept_size(experts_, layer, rows));
      }
    if (most * sizeof(float) > kept_.bytes()) kept_ = Memory(most * sizeof(float));
  }

  void list_tiles(const antiphon_Step& step) {
    prepare_lists();
    spans_.clear();
    span_of_.resize(tokens_);
    for (long s = 0; s < step.num_sequences; s++) {
      const long first = step.query_start_loc[s], count = step.query_start_loc[s + 1] - first, width = step.table_width;
      spans_.push_back({first, count, step.positions[first], step.block_tables + s * width, step.num_sequences * width});
      for (long t = first; t < first + count; t++) span_of_[t] = s;
    }
    all_alone_ = std::all_of(spans_.begin(), spans_.end(), [this](const Span& span) { return alone(span); });
    for (TileList& list : lists_) list.list(spans_, tokens_, asked_tokens_, asked_.count == tokens_);
  }

  // Prepares a list for each number of key heads, and of query heads that read one.
  void prepare_lists() {
    if (!lists_.empty()) return;
    for (const Layer<T>& layer : weights.layers) {
      if (!attends(layer)) continue;
      const auto is_own = [&](const TileList& list) { return list.is_for(layer.shape.kv_heads, group(layer)); };
      if (std::any_of(lists_.begin(), lists_.end(), is_own)) continue;
      const bool singles = group() <= kTile && !latent_;
      lists_.emplace_back(layer.shape.kv_heads, group(layer), pool_.threads(), singles, (bool)latent_);
    }
  }

  const TileList& tiles_of(const Layer<T>& layer) const {
    return *std::find_if(lists_.begin(), lists_.end(), [&](const TileList& list) {
      return list.is_for(layer.shape.kv_heads, group(layer));
    });
  }

  // Lists the tokens whose final hidden states are requested: first those with logits, then those of the spans.
  void list_asked_tokens(const antiphon_Step& step) {
    asked_tokens_.assign(step.logit_tokens, step.logit_tokens + step.num_logits);
    for (long i = 0; i < step.num_spans; i++)
      for (int64_t t = step.spans[2 * i]; t < step.spans[2 * i + 1]; t++) asked_tokens_.push_back(t);
  }

  // Returns the number of query heads of a layer that attends, which layers may differ in.
  long heads_of(const Layer<T>& layer) const {
    return latent_ ? spec_.num_heads : layer.o.matrix.in / layer.shape.head_dim;
  }
  long group(const Layer<T>& layer) const { return heads_of(layer) / layer.shape.kv_heads; }
  long group() const { return spec_.group ? spec_.group : spec_.num_heads / spec_.num_kv_heads; }

  void forward(const antiphon_Step& step, int thread) {
    const Embedding<T> embedding{spec_, weights, step};
    pool_.each(tokens_, [&](long t) {
      embedding.put(t, id_of(step, t), all_.hidden.row(t));
      embedding.angles(t, angles_.row(t));
      if (grows()) growth_[t] = embedding.growth(t);
    });
    if (spec_.input_size) ending().take(all_, [&](long t) { return id_of(step, t); });
    if (step.sources)
      linear(pool_, last_->draft_input.matrix, drafts_.join(pool_, spec_, *last_, step, all_.hidden), tokens_,
             kept_.as<float>(), Target{all_.hidden, false});
    if (rows_apart_)
      layers_by_rows(thread);
    else
      layers(thread);
    if (asked_tokens_.empty() && !step.keeps) return;
    if (asked_.count < tokens_)
      pool_.each(asked_.count, [&](long i) { copy_row(spec_, all_, asked_tokens_[i], asked_, i); });
    after_attention(*last_, asked_);
    if (step.keeps) pool_.each(tokens_, [&](long t) { drafts_.keep(spec_, weights.final_norm, all_.hidden.row(t), t); });
    if (step.num_spans) add_spans(step);
    if (!head_) return;
    const Norm& norm = step.sources ? last_->draft_norm : weights.final_norm;
    pool_.share(step.num_logits, 1, [&](long first, long last) {
      for (long i = first; i < last; i++) {
        const float* hidden = asked_.hidden.row(place(i));
        if (step.sources) drafts_.keep(spec_, norm, hidden, i);
        apply_norm(norm, norm_kind(), spec_.norm_eps, hidden, sampled_.row(i), spec_.hidden_size);
      }
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
    for (Layer<T>* at = first_; at <= last_; at++) {
      Layer<T>& layer = *at;
      const bool last = at == last_;
      before_attention(layer);
      if (recurrent(layer))
        mixers_.run(layer, moves_, mixed_, gates_, tokens_, kept_.as<float>(), mixed(all_));
      if (attends(layer)) attend(layer, thread, last, true);
      if (attends(layer) && layer.gate.matrix) gate(layer);
      if (!last) after_attention(layer, all_);
    }
  }

  // As above, but between two attentions a thread takes its rows from one layer to the next by itself.
  void layers_by_rows(int thread) {
    const Heads<T> heads = this->heads(weights.layers.front());
    const auto span_of = [this](long t) -> const Span& { return spans_[span_of_[t]]; };
    for (Layer<T>* at = first_; at <= last_; at++) {
      Layer<T>& layer = *at;
      pool_.share((tokens_ + rows_apart_ - 1) / rows_apart_, 1, [&](long part, long end) {
        for (; part < end; part++) {
          const long first = part * rows_apart_, count = std::min(rows_apart_, tokens_ - first);
          const RowsOfLayer<T> rows(spec_, heads, own_[thread], all_.hidden, first, count);
          if (at != first_) rows.after_attention((&layer)[-1], all_.attended);
          rows.before_attention(layer, span_of);
        }
      });
      attend(layer, thread, at == last_, false);
    }
  }

  void before_attention(const Layer<T>& layer) {
    norm(layer.input_norm, all_, all_.normed);
    if (residual() == Residual::parallel && layer.mlp_norm) norm(layer.mlp_norm, all_, all_.other);
    adaptable(layer, LoraTarget::qkv, layer.qkv.matrix, all_.normed, all_, Target{qkv_, false});
    if (layer.gate.matrix) linear(pool_, layer.gate.matrix, all_.normed, tokens_, kept_.as<float>(), Target{gates_, false});
    if (layer.mix_in.matrix)
      linear(pool_, layer.mix_in.matrix, all_.normed, tokens_, kept_.as<float>(), Target{mixed_, false});
    if (!attends(layer)) return;
    const auto span_of = [this](long t) -> const Span& { return spans_[span_of_[t]]; };
    if (latent_) return latents().before_attention(layer, qkv_, tokens_, span_of);
    if (spec_.qk_norm == 2) pool_.each(tokens_, [&](long t) { norm_heads_together(layer, t); });
    if (all_alone_) return;
    pool_.each(tokens_, [&](long t) {
      const Span& span = span_of(t);
      if (!alone(span))
        for (long h = 0; h < layer.shape.kv_heads; h++) split_heads(layer, span, t, h);
    });
  }

  void after_attention(const Layer<T>& layer, const Batch<T>& b) {
    const bool adds = residual() == Residual::sequential || residual() == Residual::parallel;
    const Target target = adds ? Target{b.hidden, true} : Target{b.branch, false};
    const Inputs<T> attended = latent_ && attends(layer) ? latents().values(layer, b.attended, b.count) : b.attended;
    adaptable(layer, LoraTarget::o, layer.o.matrix, attended, b, target);
    if (layer.mix_out.matrix) linear(pool_, layer.mix_out.matrix, mixed(b), b.count, kept_.as<float>(), target);
    switch (residual()) {
      case Residual::sequential:
        if (!has_mlp(layer)) return;
        norm(layer.mlp_norm, b, b.normed);
        return mlp(layer, b, b.normed, target);
      case Residual::parallel:
        return mlp(layer, b, layer.mlp_norm ? b.other : b.normed, target);
      case Residual::normed:
      case Residual::post_normed:
        add_normed(layer.after_attention_norm, b);
        ending().beside(layer, b);
        norm(layer.mlp_norm, b, b.normed);
        mlp(layer, b, b.normed, target);
        if (beside(layer)) add_experts(layer, b);
        add_normed(layer.after_mlp_norm, b);
        return ending().run(layer, &layer - weights.layers.data(), b, [&](long i) { return token_of(b, i); });
    }
  }

  // Without a norm the hidden states are copied, in the type that matrices are multiplied with.
  void norm(const Norm& norm, const Batch<T>& b, Inputs<T> to) {
    pool_.each(b.count, [&](long i) {
      if (norm)
        apply_norm(norm, norm_kind(), spec_.norm_eps, b.hidden.row(i), to.row(i), spec_.hidden_size);
      else
        copy_floats(b.hidden.row(i), to.row(i), spec_.hidden_size);
    });
  }

  void norm_heads_together(const Layer<T>& layer, long t) {
    float* sums = qkv_.row(t);
    const float* weight = layer.qk_norm.data();
    for (const long count : {heads_of(layer) * layer.shape.head_dim, layer.shape.kv_heads * layer.shape.head_dim}) {
      const float scale = 1.0f / std::sqrt(mean_square(sums, count) + spec_.norm_eps);
      for (long d = 0; d < count; d++) sums[d] *= scale * weight[d];
      sums += count, weight += count;
    }
  }

  void add_normed(const Norm& norm, const Batch<T>& b) {
    pool_.each(b.count, [&](long i) {
      float *from = b.branch.row(i), *to = b.hidden.row(i);
      apply_norm(norm, norm_kind(), spec_.norm_eps, from, from, spec_.hidden_size);
      for (long d = 0; d < spec_.hidden_size; d++) to[d] += from[d];
    });
  }

  // `last`: only for the tokens whose final hidden states are requested. `single_keys`: the keys and values of single
  // tokens are not in the cache yet and are written here.
  void attend(Layer<T>& layer, int thread, bool last, bool single_keys) {
    const std::vector<Tile>& tiles = last ? tiles_of(layer).asked : tiles_of(layer).all;
    const float* sinks = layer.sinks.empty() ? nullptr : layer.sinks.data();
    const ScoreRules rules{spec_.attention_softcap, slopes(), layer.window, sinks, spec_.chunked_windows != 0,
                           spec_.attended_scale};
    const AttentionInput<T> input{layer.shape, layer.cache, rules, heads_of(layer), group(layer), queries_, all_.attended};
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

  void gate(const Layer<T>& layer) {
    const long count = layer.gate.matrix.out, size = heads_of(layer) * layer.shape.head_dim / count;
    pool_.each(tokens_, [&](long t) {
      apply_gates((GateKind)spec_.gate_kind, gates_.row(t), count, size, all_.attended.row(t));
    });
  }

  // Returns what the mixers with recurrent states give, for each row of a batch.
  Inputs<T> mixed(const Batch<T>& b) const { return {b.attended.data + mixed_place(spec_), b.attended.stride}; }

  // Whether a layer has a recurrent state, in place of attention or beside it.
  static bool recurrent(const Layer<T>& layer) { return !layer.conv.empty(); }
  bool attends(const Layer<T>& layer) const { return !recurrent(layer) || spec_.attends_beside; }

  static bool has_mlp(const Layer<T>& layer) { return layer.up.matrix || !layer.expert_up.empty(); }

  const float* slopes() const { return weights.slopes.empty() ? nullptr : weights.slopes.data(); }

  // Whether the span is a single token whose keys and values are read by only one tile per key head.
  bool alone(const Span& span) const { return span.count == 1 && group() <= kTile && !latent_; }

  void split_heads(const Layer<T>& layer, const Span& span, long t, long kv_head) {
    const CacheShape& shape = layer.shape;
    float* sums = qkv_.row(t);
    float* key = sums + (heads_of(layer) + kv_head) * shape.head_dim;
    float* value = key + shape.kv_heads * shape.head_dim;
    heads(layer).split(layer, span, t, kv_head, {sums + kv_head * group(layer) * shape.head_dim, key, value});
  }

  Heads<T> heads(const Layer<T>& layer) const {
    const float* growth = grows() ? growth_.data() : nullptr;
    return {spec_, layer.shape, weights.ropes, angles_, growth, queries_, heads_of(layer)};
  }
  Latents<T> latents() {
    return {pool_, latent_, shape_, heads(weights.layers.front()), latent_buffers_, kept_.as<float>()};
  }
  Ending<T> ending() { return {pool_, spec_, weights, ending_buffers_, kept_.as<float>()}; }

  int64_t id_of(const antiphon_Step& step, long t) const {
    return step.ids[t] < 0 ? given_[-1 - step.ids[t]] : step.ids[t];
  }
  // Returns the token of row i of a batch, which is all_ or asked_.
  long token_of(const Batch<T>& b, long i) const { return b.count < tokens_ ? asked_tokens_[i] : i; }

  // Whether a layer has experts beside its MLP.
  bool beside(const Layer<T>& layer) const { return spec_.experts_beside && !layer.expert_up.empty(); }

  // Norms the output of the MLP in `branch`, and adds that of the experts.
  void add_experts(const Layer<T>& layer, const Batch<T>& b) {
    norm(layer.experts_norm, b, b.normed);
    norm(layer.router_norm, b, b.other);
    Experts<T>(pool_, experts_, activation_of(spec_, layer), kept_.as<float>())
        .run(layer, expert_buffers_, b.normed, b.other, b.count, spec_.hidden_size, Target{beside_, false});
    pool_.each(b.count, [&](long i) {
      float *from = beside_.row(i), *to = b.branch.row(i);
      apply_norm(layer.after_experts, norm_kind(), spec_.norm_eps, from, from, spec_.hidden_size);
      apply_norm(layer.after_mlp, norm_kind(), spec_.norm_eps, to, to, spec_.hidden_size);
      for (long d = 0; d < spec_.hidden_size; d++) to[d] += from[d];
    });
  }

  void mlp(const Layer<T>& layer, const Batch<T>& b, Inputs<T> x, const Target& target) {
    float* kept = kept_.as<float>();
    Activation activation = activation_of(spec_, layer);
    if (!layer.expert_up.empty() && !beside(layer))
      return Experts<T>(pool_, experts_, activation, kept)
          .run(layer, expert_buffers_, x, x, b.count, spec_.hidden_size, target);
    const bool gated = spec_.gated_mlp != 0;
    activation.gate_scale = spec_.mlp_gate_scale, activation.scale = spec_.mlp_scale;
    if (!layer.gate_cut.empty())
      mlp_inner_cut(pool_, layer.up.matrix, layer.gate_cut[0], activation, x, b.count, kept, cut_, b.inner);
    else if (has_lora_)
      mlp_inner(pool_, layer.up.matrix, gated, activation, x, b.count, kept, b.inner,
                lora(layer, LoraTarget::up, b));
    else
      mlp_inner(pool_, layer.up.matrix, gated, activation, x, b.count, kept, b.inner);
    adaptable(layer, LoraTarget::down, layer.down.matrix, b.inner, b, target);
  }

  const antiphon_Spec& spec_;
  Pool& pool_;
  CacheShape shape_;
  ExpertShape experts_;
  LatentShape latent_;
  LatentBuffers<T> latent_buffers_;
  Mixers<T> mixers_{spec_, pool_};
  long tokens_ = 0;
  Layer<T>*first_ = nullptr, *last_ = nullptr;  // the layers of the step: the model's, or the draft layer
  DraftInputs<T> drafts_;

  BatchBuffers<T> all_buffers_, asked_buffers_;
  RowBuffer<float> qkv_buffer_, angle_buffer_, gate_buffer_, beside_buffer_, cut_buffer_;
  RowBuffer<TermOf<T>> query_buffer_, sampled_buffer_;
  ExpertBuffers<T> expert_buffers_;
  EndingBuffers<T> ending_buffers_;
  HeadBuffers head_buffers_;
  Memory kept_;
  Batch<T> all_, asked_;  // rows of all tokens; of the tokens whose final hidden states are requested
  Rows<float> qkv_, angles_, gates_, beside_, cut_;
  Rows<float> mixed_;  // inputs of the mixers with recurrent states, in or behind `qkv_`
  std::vector<float> growth_;  // of each token, the factor on queries; empty: there is none
  Inputs<T> sampled_;
  TermOf<T>* queries_ = nullptr;
  std::vector<int64_t> given_;  // the most likely tokens of the last step that had logits
  StateMoves moves_ = {};
  std::vector<Span> spans_;
  std::vector<long> span_of_;  // the span of each token
  std::vector<int64_t> asked_tokens_;
  long asked_most_ = 0;  // number of rows that `reserve` provided for requested tokens
  std::vector<TileList> lists_;  // see prepare_lists
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
