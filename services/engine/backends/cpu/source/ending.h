// The end of a layer beside its MLP: a gate lets in the inputs that the layer has besides the residual stream
// (per-layer embeddings, `LayerInputs` in description.py), and a factor multiplies the stream. Where there are several
// streams, they begin and end here (streams.h).
#pragma once

#include "streams.h"

namespace antiphon {

template <class T>
struct EndingBuffers {
  RowBuffer<float> inputs;         // [tokens][layers * size]
  RowBuffer<TermOf<T>> let_in;     // [rows][size]
  RowBuffer<TermOf<T>> side;       // [rows][side_rank], with several streams
};

// All threads call the methods together.
template <class T>
class Ending {
 public:
  // `kept`: see `linear`.
  Ending(Pool& pool, const antiphon_Spec& spec, const Weights<T>& weights, const EndingBuffers<T>& b, float* kept)
      : pool_(pool), spec_(spec), weights_(weights), inputs_(b.inputs.get()), let_in_(b.let_in.get()), kept_(kept),
        streams_(pool, spec, weights, b.side.get(), kept) {}

  static void prepare(EndingBuffers<T>& b, const antiphon_Spec& spec, long tokens) {
    if (!spec.input_size) return;
    b.inputs.rows(tokens, spec.num_layers * spec.input_size);
    b.let_in.rows(tokens, spec.input_size);
    if (spec.num_streams) b.side.rows(tokens, spec.side_rank);
  }

  // Computes the inputs of all layers of the batch's tokens, whose hidden states are their embeddings.
  // `id_of(t)`: the token's id.
  template <class IdOf>
  void take(const Batch<T>& b, IdOf&& id_of) const {
    pool_.each(b.count, [&](long t) { copy_floats(b.hidden.row(t), b.normed.row(t), spec_.hidden_size); });
    linear(pool_, weights_.inputs_in.matrix, b.normed, b.count, kept_, Target{inputs_, false});
    const long size = spec_.input_size;
    const float half = std::sqrt(0.5f), scale = 1.0f / std::sqrt((float)spec_.hidden_size);
    pool_.each(b.count, [&](long t) {
      const int64_t id = id_of(t);
      const T* row = weights_.inputs + (id < spec_.input_rows ? id : 0) * spec_.num_layers * size;
      float* to = inputs_.row(t);
      for (long d = 0; d < spec_.num_layers * size; d++) to[d] *= scale;
      for (long layer = 0; layer < spec_.num_layers; layer++, to += size, row += size) {
        apply_norm(weights_.inputs_norm, (NormKind)spec_.norm, spec_.norm_eps, to, to, size);
        for (long d = 0; d < size; d++) to[d] = (to[d] + to_float(row[d]) * spec_.input_scale) * half;
      }
    });
    if (spec_.num_streams) streams_.enter(b);
  }

  // Ends layer number `index`. `token_of(i)`: the token of row i of the batch.
  template <class TokenOf>
  void run(const Layer<T>& layer, long index, const Batch<T>& b, TokenOf&& token_of) const {
    const bool lets_in = (bool)layer.input_gate.matrix, streams = spec_.num_streams != 0;
    if (streams) streams_.correct(layer, b);
    if (lets_in) let_in(layer, index, b, token_of);
    if (!lets_in && layer.scale == 1.0f) return;
    pool_.each(b.count, [&](long i) {
      float *from = b.branch.row(i), *to = b.hidden.row(i);
      if (lets_in) apply_norm(layer.input_after, (NormKind)spec_.norm, spec_.norm_eps, from, from, spec_.hidden_size);
      if (streams) return;
      for (long d = 0; lets_in && d < spec_.hidden_size; d++) to[d] += from[d];
      for (long d = 0; d < spec_.hidden_size; d++) to[d] *= layer.scale;
    });
    if (streams) streams_.leave(layer, b);
  }

  // Adds what is beside attention to the hidden states behind it.
  void beside(const Layer<T>& layer, const Batch<T>& b) const {
    if (spec_.num_streams) streams_.beside(layer, b);
  }

 private:
  template <class TokenOf>
  void let_in(const Layer<T>& layer, long index, const Batch<T>& b, TokenOf&& token_of) const {
    pool_.each(b.count, [&](long i) { copy_floats(b.hidden.row(i), b.normed.row(i), spec_.hidden_size); });
    const Activation activation{(ActivationKind)spec_.activation};
    multiply(pool_, layer.input_gate.matrix, b.normed, b.count, kept_, [&](long row, long panel, const float* sums) {
      const float* own = inputs_.row(token_of(row)) + index * spec_.input_size;
      for (long half = 0; half < kPanel; half += kLanes) {
        const long column = panel * kPanel + half, some = std::min(kLanes, spec_.input_size - column);
        if (some <= 0) return;
        const Vec gate = activate<T>(activation, load(sums + half));
        store_some(let_in_.row(row) + column, gate * load_some(own + column, some), some);
      }
    });
    linear(pool_, layer.input_out.matrix, let_in_, b.count, kept_, Target{b.branch, false});
  }

  Pool& pool_;
  const antiphon_Spec& spec_;
  const Weights<T>& weights_;
  const Rows<float> inputs_;
  const Inputs<T> let_in_;
  float* const kept_;
  const Streams<T> streams_;
};

}  // namespace antiphon
