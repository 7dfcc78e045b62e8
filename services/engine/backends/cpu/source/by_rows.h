// The layers by rows: a thread takes some of a step's rows through all matrices between two attentions by itself.
//
// The activations of these rows stay in the thread's own cache; if all threads shared each matrix, they would go
// through memory after each. In return every thread reads all weights. This is faster if a thread has many rows and its
// cache has room for them. Sums are added in the same order in both cases, so the results are the same.
#pragma once

#include "heads.h"
#include "mlp.h"

namespace antiphon {

// With fewer rows per thread, reading all weights takes too long: tiles finish the products of so few rows long before
// the weights have been read.
template <class T>
constexpr long kRowsApart = 64;
#if defined(__AMX_BF16__)
template <>
constexpr long kRowsApart<Bf16> = 128;
#endif
// The number of prompt tokens in a step from which on reading the weights takes hardly any time compared with the
// products: more tokens would only make other sequences wait longer for the step.
template <class T>
constexpr long kPromptRows = 512;
#if defined(__AMX_BF16__)
template <>
constexpr long kPromptRows<Bf16> = 1024;
#endif
// Columns of the MLP's inner state that are computed and used up at a time.
constexpr long kInnerTerms = 512;

// The buffers that a thread needs for its rows.
template <class T>
class OwnRows {
 public:
  // Returns the bytes of a row that are used over and over.
  static long bytes(long hidden, long inner) {
    return hidden * (long)(sizeof(TermOf<T>) + sizeof(float)) + std::min(inner, kInnerTerms) * (long)sizeof(TermOf<T>);
  }

  void prepare(long rows, long hidden, long inner, long heads) {
    x = x_.rows(rows, hidden);
    inner_part = inner_.rows(rows, std::min(inner, kInnerTerms));
    head_sums = heads_.rows(rows, heads);
    const size_t bytes = (size_t)(rows * round_up(hidden, kPanel)) * sizeof(float);
    if (bytes > sums_.bytes()) sums_ = Memory(bytes);
    sums = sums_.template as<float>();
  }

  Inputs<T> x, inner_part;
  Rows<float> head_sums;
  float* sums = nullptr;  // [panels][rows][32]

 private:
  RowBuffer<TermOf<T>> x_, inner_;
  RowBuffer<float> heads_;
  Memory sums_;
};

// Multiplies rows by panels [first, end) on this thread; `finish(row, panel, sums)` as in matrix.h.
template <class T, class Finish>
void multiply_own(const Matrix<T>& w, long first, long end, Inputs<T> x, long rows, Finish&& finish) {
  Pass<T, Finish> pass(rows, x.data, x.stride, finish);
  for (long p = first; p < end; p++) pass.multiply({w.panel(p), w.terms, p, w.panel(p + 1), false, true}, nullptr);
}

// The rows [first, first + count) of a step in a layer with a sequential residual: attention is added, then an MLP.
template <class T>
class RowsOfLayer {
 public:
  RowsOfLayer(const antiphon_Spec& spec, const Heads<T>& heads, OwnRows<T>& own, Rows<float> hidden, long first,
              long count)
      : spec_(spec), heads_(heads), own_(own), hidden_(hidden.from(first)), first_(first), count_(count) {}

  // Computes the layer up to attention. `span_of(t)` returns the span of token t of the step.
  template <class SpanOf>
  void before_attention(const Layer<T>& layer, SpanOf&& span_of) const {
    norm(layer.input_norm);
    const long dim = spec_.head_dim, group = heads_.group();
    for (long h = 0; h < spec_.num_kv_heads; h++) {
      put_heads(layer.qkv.matrix, h * group * dim, group * dim, 0);
      put_heads(layer.qkv.matrix, (spec_.num_heads + h) * dim, dim, group * dim);
      put_heads(layer.qkv.matrix, (spec_.num_heads + spec_.num_kv_heads + h) * dim, dim, (group + 1) * dim);
      split(layer, h, span_of);
    }
  }

  // Computes the rest of the layer, after attention.
  void after_attention(const Layer<T>& layer, Inputs<T> attended) const {
    const Target target{hidden_, true};
    const Linear<T>& o = layer.o.matrix;
    multiply_own(o, 0, o.panels, attended.from(first_), count_,
                 [&](long row, long panel, const float* sums) { put_sums(o.bias, target, row, panel, sums); });
    norm(layer.mlp_norm);
    const Linear<T>& down = layer.down.matrix;
    for (long k = 0, step = even_part(down.terms, kInnerTerms); k < down.terms; k += step) {
      const long terms = std::min(step, down.terms - k);
      inner(layer, k, terms);
      add_down(down, k, terms, target);
    }
  }

 private:
  void norm(const Norm& norm) const {
    for (long r = 0; r < count_; r++)
      apply_norm(norm, (NormKind)spec_.norm, spec_.norm_eps, hidden_.row(r), own_.x.row(r), spec_.hidden_size);
  }

  template <class SpanOf>
  void split(const Layer<T>& layer, long kv_head, SpanOf&& span_of) const {
    const long dim = spec_.head_dim, group = heads_.group(), stride = own_.head_sums.stride;
    for (long r = 0; r < count_;) {
      float* row = own_.head_sums.row(r);
      const TokenHeads heads{row, row + group * dim, row + (group + 1) * dim};
      const Span& span = span_of(first_ + r);
      const bool together = r + kTokensTogether <= count_ && heads_.together(span, first_ + r);
      if (together)
        heads_.split_together(layer, span, first_ + r, kv_head, heads, stride);
      else
        heads_.split(layer, span, first_ + r, kv_head, heads);
      r += together ? kTokensTogether : 1;
    }
  }

  // Computes columns [first, first + count) of the heads and writes them to the head sums from column `to` on.
  void put_heads(const Linear<T>& w, long first, long count, long to) const {
    const Target target{own_.head_sums, false};
    multiply_own(w, first / kPanel, (first + count) / kPanel, own_.x, count_,
                 [&](long row, long panel, const float* sums) {
                   const long column = panel * kPanel;
                   target.put_at(row, column - first + to, with_bias(w.bias, column, load(sums)),
                                 with_bias(w.bias, column + kLanes, load(sums + kLanes)));
                 });
  }

  // Computes columns [k, k + terms) of the inner state.
  void inner(const Layer<T>& layer, long k, long terms) const {
    const Linear<T>& up = layer.up.matrix;
    const bool gated = spec_.gated_mlp != 0;
    const Activation activation = activation_of(spec_, layer);
    const long width = inner_width(gated);
    multiply_own(up, k / width, (k + terms) / width, own_.x, count_, [&](long row, long panel, const float* sums) {
      put_inner(gated, activation, up.bias, panel, sums, own_.inner_part.row(row) + (panel * width - k));
    });
  }

  void add_down(const Linear<T>& down, long k, long terms, const Target& target) const {
    const auto finish = [&](long row, long panel, const float* sums) { put_sums(down.bias, target, row, panel, sums); };
    Pass<T, decltype(finish)> pass(count_, own_.inner_part.data, own_.inner_part.stride, finish);
    for (long p = 0; p < down.panels; p++)
      pass.multiply(
          {down.panel(p) + k * kPanel, terms, p, down.panel(p + 1) + k * kPanel, k > 0, k + terms == down.terms},
          own_.sums + p * count_ * kPanel);
  }

  const antiphon_Spec& spec_;
  const Heads<T>& heads_;
  OwnRows<T>& own_;
  const Rows<float> hidden_;
  const long first_, count_;
};

}  // namespace antiphon
