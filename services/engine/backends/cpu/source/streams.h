// Several residual streams of a token, of which a layer computes with the first (`Streams` in description.py), and the
// product of low rank beside attention. A layer reads and writes `hidden`, as it does without streams: between layers,
// all streams are corrected by what one layer gave, and what the next one reads is predicted of them.
#pragma once

#include "batch.h"
#include "mlp.h"

namespace antiphon {

constexpr long kStreamsMax = 8;

// All threads call the methods together.
template <class T>
class Streams {
 public:
  // `side`: buffer [rows][side_rank]; `kept`: see `linear`.
  Streams(Pool& pool, const antiphon_Spec& spec, const Weights<T>& weights, Inputs<T> side, float* kept)
      : pool_(pool), spec_(spec), weights_(weights), side_(side), kept_(kept), count_(spec.num_streams) {}

  // Makes the streams of the embeddings, and what the first layer reads.
  void enter(const Batch<T>& b) const {
    copy(b, 0, b.normed);
    for (long i = 1; i < count_; i++)
      linear(pool_, weights_.stream_in[i - 1].matrix, b.normed, b.count, kept_, Target{stream(b, i), false});
    pool_.each(b.count, [&](long row) {
      std::memcpy(stream(b, 0).row(row), b.hidden.row(row), spec_.hidden_size * sizeof(float));
      for (long i = 1; i < count_; i++) lengthen(b, row, i);
      predict(weights_.layers.front(), b, row);
    });
  }

  // Corrects the streams by what the layer gave, and puts in `hidden` what its inputs are let in by.
  void correct(const Layer<T>& layer, const Batch<T>& b) const {
    pool_.each(b.count, [&](long row) {
      float shares[kStreamsMax], routed[kStreamsMax];
      route(layer.streams, b.hidden.row(row), routed);
      for (long i = 0; i < count_; i++) {
        shares[i] = 1.0f;
        for (long j = 0; j < count_; j++) shares[i] += layer.streams.correct[i * count_ + j] * routed[j];
      }
      each_part([&](long d, long some) {
        const Vec news = load_some(b.hidden.row(row) + d, some) - load_some(stream(b, 0).row(row) + d, some);
        for (long i = 0; i < count_; i++) {
          float* const to = stream(b, i).row(row) + d;
          store_some(to, load_some(to, some) + shares[i] * news, some);
        }
        const Vec scale = load_some(layer.streams.scale.data() + d, some);
        store_some(b.hidden.row(row) + d, load_some(stream(b, 0).row(row) + d, some) * scale, some);
      });
    });
  }

  // Adds the rows of `branch` to the streams behind the first, and makes what the next layer reads, or behind the last
  // one the hidden states.
  void leave(const Layer<T>& layer, const Batch<T>& b) const {
    const bool last = &layer == &weights_.layers.back();
    pool_.each(b.count, [&](long row) {
      each_part([&](long d, long some) {
        const Vec more = load_some(b.branch.row(row) + d, some);
        for (long i = 1; i < count_; i++) {
          float* const to = stream(b, i).row(row) + d;
          store_some(to, load_some(to, some) + more, some);
        }
      });
      if (!last) predict((&layer)[1], b, row);
    });
    if (last) join(b);
  }

  // Adds what attention read, in `normed`, and its product with the matrices beside attention.
  void beside(const Layer<T>& layer, const Batch<T>& b) const {
    multiply(pool_, layer.side_in.matrix, b.normed, b.count, kept_, [&](long row, long panel, const float* sums) {
      for (long half = 0; half < kPanel; half += kLanes) {
        const long column = panel * kPanel + half, some = std::min(kLanes, spec_.side_rank - column);
        if (some > 0) store_some(side_.row(row) + column, load(sums + half), some);
      }
    });
    linear(pool_, layer.side_out.matrix, side_, b.count, kept_, Target{b.branch, false});
    const float half = std::sqrt(0.5f);
    pool_.each(b.count, [&](long row) {
      float *from = b.branch.row(row), *to = b.hidden.row(row);
      apply_norm(layer.side_after, (NormKind)spec_.norm, spec_.norm_eps, from, from, spec_.hidden_size);
      each_part([&](long d, long some) {
        const Vec sum = load_some(to + d, some) + load(b.normed.row(row) + d) + load_some(from + d, some);
        store_some(to + d, sum * half, some);
      });
    });
  }

 private:
  Rows<float> stream(const Batch<T>& b, long i) const {
    return {b.streams.data + i * stream_width(spec_), b.streams.stride};
  }

  template <class Work>
  void each_part(Work&& work) const {
    for (long d = 0; d < spec_.hidden_size; d += kLanes) work(d, std::min(kLanes, spec_.hidden_size - d));
  }

  // Copies a stream, or the hidden states as stream 0, in the type that matrices are multiplied with.
  void copy(const Batch<T>& b, long i, Inputs<T> to) const {
    pool_.each(b.count, [&](long row) {
      copy_floats(i ? stream(b, i).row(row) : b.hidden.row(row), to.row(row), spec_.hidden_size);
    });
  }

  // Makes a stream as long as the first one.
  void lengthen(const Batch<T>& b, long row, long i) const {
    float* const own = stream(b, i).row(row);
    const float wanted = std::sqrt(mean_square(stream(b, 0).row(row), spec_.hidden_size));
    const float scale = wanted / std::sqrt(std::max(mean_square(own, spec_.hidden_size), 1e-5f));
    each_part([&](long d, long some) { store_some(own + d, load_some(own + d, some) * scale, some); });
  }

  // Computes the numbers of which shares are made, from hidden states of which the router has the norm's factors.
  void route(const StreamWeights& weights, const float* x, float* routed) const {
    const float scale = 1.0f / std::sqrt(mean_square(x, spec_.hidden_size) + spec_.norm_eps);
    for (long i = 0; i < count_; i++) {
      const float* const row = weights.router.data() + i * spec_.hidden_size;
      Vec sum = {};
      each_part([&](long d, long some) { sum += load_some(x + d, some) * load_some(row + d, some); });
      routed[i] = std::tanh(sum_lanes(sum) * scale);
    }
  }

  // Predicts the streams of a row, of which the layer reads the first, in `hidden`.
  void predict(const Layer<T>& layer, const Batch<T>& b, long row) const {
    float shares[kStreamsMax][kStreamsMax], routed[kStreamsMax];
    route(layer.streams, stream(b, 0).row(row), routed);
    for (long i = 0; i < count_; i++)
      for (long j = 0; j < count_; j++) {
        shares[i][j] = i == j ? 1.0f : 0.0f;
        const float* const own = layer.streams.predict.data() + (i * count_ + j) * count_;
        for (long k = 0; k < count_; k++) shares[i][j] += own[k] * routed[k];
      }
    each_part([&](long d, long some) {
      Vec before[kStreamsMax];
      for (long j = 0; j < count_; j++) before[j] = load_some(stream(b, j).row(row) + d, some);
      for (long i = 0; i < count_; i++) {
        Vec sum = {};
        for (long j = 0; j < count_; j++) sum += shares[i][j] * before[j];
        store_some(stream(b, i).row(row) + d, sum, some);
        if (!i) store_some(b.hidden.row(row) + d, sum, some);
      }
    });
  }

  // Makes the hidden states of the streams behind the last layer.
  void join(const Batch<T>& b) const {
    for (long i = 1; i < count_; i++) {
      copy(b, i, b.normed);
      linear(pool_, weights_.stream_out[i - 1].matrix, b.normed, b.count, kept_, Target{stream(b, i), false});
    }
    pool_.each(b.count, [&](long row) {
      for (long i = 1; i < count_; i++) lengthen(b, row, i);
      each_part([&](long d, long some) {
        Vec sum = {};
        for (long i = 0; i < count_; i++) sum += load_some(stream(b, i).row(row) + d, some);
        store_some(b.hidden.row(row) + d, sum * (1.0f / (float)count_), some);
      });
    });
  }

  Pool& pool_;
  const antiphon_Spec& spec_;
  const Weights<T>& weights_;
  const Inputs<T> side_;
  float* const kept_;
  const long count_;
};

}  // namespace antiphon
