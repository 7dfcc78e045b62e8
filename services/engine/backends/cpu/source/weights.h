// A decoder's weights in this backend's form. Set by ModelOf (model_of.h) with what Python passes.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "abi.h"
#include "cache.h"
#include "linear.h"
#include "memory.h"
#include "quantized_pack.h"

namespace antiphon {

// The order in which a packed matrix has the checkpoint's rows: as they are (plain), or alternating between 16 gates
// and the 16 rows that they are multiplied with, their partners (gated).
enum class Order { plain, gated };

// A matrix with its packed weights. `matrix` points to memory of the model's stock, or of the caller (see `place`).
template <class T>
class Packed {
 public:
  Packed() = default;

  // Packs a weight [out][in]. With `gated`, rows [0, out / 2) are gates and the others their partners.
  void pack(Pool& pool, Stock& stock, const T* weight, const float* bias, long out, long in, Order order) {
    Matrix<T>& m = matrix;
    shape(bias, out, in, order);
    bytes_ = packed_bytes();
    T* data = static_cast<T*>(stock.take(bytes_));
    pool.run([&](int) {
      pool.share(m.panels, 1, [&](long first, long last) {
        for (long p = first; p < last; p++) pack_panel(weight, data + p * m.terms * kPanel, p, order);
      });
    });
    m.data = data;
  }

  // Uses an earlier `matrix.data` of the same weight, which is kept elsewhere for as long as this object is used.
  void place(const T* packed, const float* bias, long out, long in, Order order) {
    shape(bias, out, in, order);
    matrix.data = packed;
    bytes_ = packed_bytes();
  }

  void pack(Pool& pool, Stock& stock, const antiphon_Quantized& weight, const float* bias, long out, long in,
            Order order) {
    shape(bias, out, in, order);
    std::vector<long> rows(matrix.panels * kPanel);
    for (size_t column = 0; column < rows.size(); column++) rows[column] = source((long)column, order);
    quantized_ = std::make_unique<PackedQuantized>(pool, stock, weight, rows, in);
    matrix.quantized = last_ = &quantized_->quantized;
  }

  // As `place`, for what `packed` returned of a quantized weight.
  void place_quantized(const void* packed, size_t bytes, const float* bias, long out, long in, Order order) {
    shape(bias, out, in, order);
    quantized_ = std::make_unique<PackedQuantized>(packed, bytes, matrix.panels, in);
    matrix.quantized = last_ = &quantized_->quantized;
  }

  // Lets the rows of another quantized matrix follow those of this one, which must be whole panels. The other matrix is
  // used as long as this one is.
  void append(const Packed& other) {
    Linear<T>& m = matrix;
    if (!last_ || !other.quantized_ || m.out % kPanel || m.in != other.matrix.in || !m.bias != !other.matrix.bias)
      throw std::invalid_argument("matrices that are multiplied together do not fit together");
    last_ = last_->below = &other.quantized_->quantized;
    m.out += other.matrix.out, m.panels += other.matrix.panels;
    if (!m.bias) return;
    bias_.insert(bias_.end(), other.bias_.begin(), other.bias_.end());
    m.bias = bias_.data();
  }

  // Returns the packed form, `bytes()` long; null if the matrix is not set.
  const void* packed() const { return quantized_ ? quantized_->packed() : matrix.data; }

  // Writes a row of the checkpoint's matrix to `to`. The matrix must not be quantized and must be in plain order.
  void unpack(long row, float* to) const {
    constexpr long kTerms = Pair<T>::kTerms;
    const T* from = matrix.panel(row / kPanel) + row % kLanes * kTerms;
    for (long k = 0; k < matrix.in; k++)
      to[k] = to_float(from[matrix.place(k / kTerms * kTerms, row % kPanel / kLanes) + k % kTerms]);
  }

  size_t bytes() const { return bytes_ + (quantized_ ? quantized_->bytes() : 0); }
  bool same_shape(const Packed& other) const {
    return !quantized_ == !other.quantized_ && (!quantized_ || quantized_->same_shape(*other.quantized_));
  }
  Linear<T> matrix;

 private:
  size_t packed_bytes() const { return (size_t)(matrix.panels * kPanel * matrix.terms) * sizeof(T); }

  void shape(const float* bias, long out, long in, Order order) {
    Linear<T>& m = matrix;
    m = {}, bytes_ = 0, last_ = nullptr, quantized_.reset();
    m.out = out, m.in = in, m.terms = round_up(in, kTermsMultiple);
    const long columns = order == Order::gated ? 2 * round_up(out / 2, kPanel) : round_up(out, kPanel);
    m.panels = columns / kPanel;
    if (bias) copy_bias(bias, columns, order);
  }

  // Returns the checkpoint's row of a column; -1 if the column is padding.
  long source(long column, Order order) const {
    if (order == Order::plain) return column < matrix.out ? column : -1;
    const long half = matrix.out / 2, index = column / kPanel * kLanes + column % kLanes;
    if (index >= half) return -1;
    return column % kPanel < kLanes ? index : half + index;
  }

  void pack_panel(const T* weight, T* panel, long p, Order order) const {
    constexpr long kTerms = Pair<T>::kTerms;
    const T* from[kPanel];
    for (long j = 0; j < kPanel; j++) {
      const long row = source(p * kPanel + j, order);
      from[j] = row < 0 ? nullptr : weight + row * matrix.in;
    }
    const long whole = matrix.in / kTerms * kTerms;
    const auto to = [&](long k, long j) { return panel + matrix.place(k, j / kLanes) + j % kLanes * kTerms; };
    for (long k = 0; k < whole; k += kTerms)
      for (long j = 0; j < kPanel; j++)
        if (from[j]) std::memcpy(to(k, j), from[j] + k, kTerms * sizeof(T));
    for (long k = whole; k < matrix.in; k++)
      for (long j = 0; j < kPanel; j++)
        if (from[j]) *to(whole, j) = from[j][k];
  }

  void copy_bias(const float* bias, long columns, Order order) {
    bias_.assign(columns, 0.0f);
    for (long column = 0; column < columns; column++) {
      const long row = source(column, order);
      if (row >= 0) bias_[column] = bias[row];
    }
    matrix.bias = bias_.data();
  }

  size_t bytes_ = 0;
  std::unique_ptr<PackedQuantized> quantized_;
  Quantized* last_ = nullptr;  // of this matrix and those that were appended
  std::vector<float> bias_;
};

struct Norm {
  std::vector<float> weight, bias;
  explicit operator bool() const { return !weight.empty(); }
};

struct Rope {
  std::vector<float> frequencies;
  bool interleaved = false;
  float scale = 1;
  std::vector<int64_t> axes;  // of each frequency: which of a token's three positions it turns by; empty: always the same
  bool operator==(const Rope& other) const {
    return frequencies == other.frequencies && interleaved == other.interleaved && scale == other.scale &&
           axes == other.axes;
  }
};

// What a layer has for several residual streams (streams.h).
struct StreamWeights {
  std::vector<float> router, predict, correct, scale;
};

template <class T>
struct Layer {
  Norm input_norm, mlp_norm, after_attention_norm, after_mlp_norm;
  std::vector<float> qk_norm;
  std::vector<float> sinks;  // scores of the heads' sinks times log2(e), or empty
  std::vector<float> xielu;  // the numbers of `Activation`; empty: the activation has none
  std::vector<float> gate_cut;  // deviations above their mean at which gates are cut (mlp.h); empty: they are not
  std::vector<float> router_correction;  // added to the scores of experts for the choice; empty: nothing is
  std::vector<Packed<T>> qkv_below;  // what follows qkv, if its parts are quantized in different ways
  Packed<T> qkv, o, up, down, router, shared_up, shared_down, shared_gate;
  Packed<T> mix_in, mix_out;  // of a mixer with a recurrent state beside attention
  Packed<T> mix_decay, mix_out_gate;  // of a delta rule of channels (delta.h)
  Packed<T> mix_select, mix_step;  // of a state space with decays for each channel (channel_space.h)
  Packed<T> gate;  // gates of what attention gives, or those of a delta rule
  std::vector<Packed<T>> expert_up, expert_down;
  Packed<T> expert_in, expert_out;  // between hidden states and what the experts read and write, if that is narrower
  Norm latent_norm, query_latent_norm;  // of latent attention, as is the rest (latent.h)
  Packed<T> query_up;                   // makes queries of their latent
  std::vector<Packed<T>> latent_key, latent_value;  // of each head, W_keyᵀ and W_value
  std::vector<float> conv, conv_bias;  // of a layer with a recurrent state (recurrent.h)
  std::vector<float> decay, decay_bias, mix_norm, skip;  // of a delta rule, or a state space (delta.h, state_space.h)
  Packed<T> draft_input;  // of a draft layer (draft.h), as are the norms
  Norm draft_embedding_norm, draft_hidden_norm, draft_norm;
  float* states = nullptr;
  Norm experts_norm, router_norm, after_experts, after_mlp;  // of experts beside the MLP
  std::vector<float> expert_scales;                          // factors on the weights of experts; empty: there are none
  Packed<T> input_gate, input_out;                           // of the layer's inputs (ending.h), with the norm behind
  Norm input_after;
  StreamWeights streams;
  Packed<T> side_in, side_out;  // of the product beside attention, with the norm behind
  Norm side_after;
  float scale = 1;  // of the residual stream, at the end of the layer
  CacheShape shape;
  bool borrows = false;  // whether the cache is that of an earlier layer, and `qkv` has queries only
  Cache cache;
  long window = 0;
  long rope = -1;  // index in the model's ropes; -1: none
};

template <class T>
struct Weights {
  std::vector<Layer<T>> layers;
  std::vector<Rope> ropes;
  const T* embedding = nullptr;  // null: the head's rows are used
  const T* positions = nullptr;
  const T* inputs = nullptr;  // the table of layers' inputs, [input_rows][layers * input_size]
  Packed<T> inputs_in;
  Norm inputs_norm;
  std::vector<Packed<T>> stream_in, stream_out;  // for each stream but the first
  Norm final_norm;
  Packed<T> head;
  std::vector<float> slopes;  // ALiBi slopes times log2(e), [heads] or empty
};

}  // namespace antiphon
