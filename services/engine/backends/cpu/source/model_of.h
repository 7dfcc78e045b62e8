// A model of one type of numbers: finds the matrix, vector or table that Python sets by its name.
#pragma once

#include <map>
#include <stdexcept>
#include <type_traits>

#include "decoder.h"
#include "model.h"
#include "runner.h"

namespace antiphon {

// Queries, keys and values: the maximum number of parts of "qkv".
constexpr int64_t kQkvParts = 3;

template <class T>
class ModelOf final : public Model {
 public:
  explicit ModelOf(const antiphon_Spec& spec) : spec_(spec), pool_((int)spec.threads), decoder_(spec_, pool_) {
    if (spec.cache < 0 || spec.cache > (int64_t)Stored::e5m2) throw std::invalid_argument("no such type of cache");
    if (spec.conv_kernel < 0 || spec.conv_kernel == 1 || spec.conv_kernel > kTapsMax + 1)
      throw std::invalid_argument("convolutions may read 2 to 16 tokens");
    const bool delta = (Mixer)spec.mixer == Mixer::delta || (Mixer)spec.mixer == Mixer::channel_delta;
    if (std::max(spec.mix_key_dim, delta ? spec.mix_value_dim : 0) > kStateDim)
      throw std::invalid_argument("heads of a recurrent layer may have at most 256 dimensions");
    if (spec.num_streams > kStreamsMax) throw std::invalid_argument("there may be at most 8 residual streams");
    if (decoder_.cache_shape().width > kWidthMax) throw std::invalid_argument("heads may have at most 576 dimensions");
  }

  void set_matrix(int64_t layer, const char* name, int64_t expert, const void* weight, int64_t out, int64_t in,
                  const float* bias) override {
    matrix_named(layer, name, expert).pack(pool_, stock_, static_cast<const T*>(weight), bias, out, in, order_of(name));
  }

  void set_packed(int64_t layer, const char* name, int64_t expert, const void* packed, int64_t quantized_bytes,
                  int64_t out, int64_t in, const float* bias) override {
    Packed<T>& to = matrix_named(layer, name, expert);
    if (quantized_bytes)
      to.place_quantized(packed, (size_t)quantized_bytes, bias, out, in, order_of(name)), follow(layer, name, expert);
    else
      to.place(static_cast<const T*>(packed), bias, out, in, order_of(name));
  }

  const void* packed(int64_t layer, const char* name, int64_t expert, int64_t& bytes) override {
    const Packed<T>& packed = matrix_named(layer, name, expert);
    bytes = (int64_t)packed.bytes();
    return packed.packed();
  }

  void set_quantized(int64_t layer, const char* name, int64_t expert, const antiphon_Quantized& weight, int64_t out,
                     int64_t in, const float* bias) override {
    matrix_named(layer, name, expert).pack(pool_, stock_, weight, bias, out, in, order_of(name));
    follow(layer, name, expert);
  }

  void set_lora(int64_t slot, int64_t layer, const char* name, const antiphon_Lora& delta) override {
    if (delta.rank > kLoraParts * spec_.lora_rank) throw std::invalid_argument("the rank of an adapter is too large");
    decoder_.lora_slots.at(slot).at(layer)[(long)lora_target(name)] = {
        (long)delta.rank, static_cast<const T*>(delta.a), static_cast<const T*>(delta.b),
        reinterpret_cast<const LoraRange*>(delta.ranges)};
  }

  void set_vector(int64_t layer, const char* name, const float* values, int64_t count) override {
    if (name == std::string("scale"))
      at(layer).scale = *values;
    else
      vector_named(layer, name).assign(values, values + count);
  }

  void set_table(int64_t layer, const char* name, const void* table) override {
    const std::string which = name;
    if (which == "keys")
      at(layer).cache.keys = const_cast<void*>(table);
    else if (which == "values")
      at(layer).cache.values = const_cast<void*>(table);
    else if (which == "states")
      at(layer).states = static_cast<float*>(const_cast<void*>(table));
    else if (which == "embedding")
      decoder_.weights.embedding = static_cast<const T*>(table);
    else if (which == "positions")
      decoder_.weights.positions = static_cast<const T*>(table);
    else if (which == "inputs")
      decoder_.weights.inputs = static_cast<const T*>(table);
    else
      throw std::invalid_argument("no table is called " + which);
  }

  void set_heads(int64_t layer, int64_t kv_heads, int64_t head_dim, int64_t stride, bool borrows) override {
    CacheShape& shape = at(layer).shape;
    shape = make_cache_shape<T>(kv_heads, head_dim, spec_.block_size, (Stored)spec_.cache, spec_.latent_rank);
    shape.stride = stride;
    at(layer).borrows = borrows;
  }

  void set_window(int64_t layer, int64_t window, int64_t group) override {
    at(layer).window = window, at(layer).cache.tables = group;
  }

  void set_rope(int64_t layer, const float* frequencies, const int64_t* axes, int64_t pairs, bool interleaved,
                float scale) override {
    Rope rope{{frequencies, frequencies + pairs}, interleaved, scale, {}};
    if (axes) rope.axes.assign(axes, axes + pairs);
    std::vector<Rope>& ropes = decoder_.weights.ropes;
    const auto found = std::find(ropes.begin(), ropes.end(), rope);
    at(layer).rope = found - ropes.begin();
    if (found == ropes.end()) ropes.push_back(std::move(rope));
  }

  int64_t block_bytes() const override { return decoder_.cache_shape().block_elements() * decoder_.cache_shape().size; }

  int64_t prompt_tokens() const override { return kPromptRows<T>; }

  int64_t weight_bytes() const override {
    int64_t total = decoder_.weights.head.bytes() + decoder_.weights.inputs_in.bytes();
    for (const auto* streams : {&decoder_.weights.stream_in, &decoder_.weights.stream_out})
      for (const Packed<T>& packed : *streams) total += packed.bytes();
    for (const Layer<T>& layer : decoder_.weights.layers) {
      for (const Packed<T>* packed : {&layer.qkv, &layer.o, &layer.up, &layer.down, &layer.router, &layer.shared_up,
                                      &layer.shared_down, &layer.shared_gate, &layer.query_up, &layer.gate, &layer.expert_in,
                                      &layer.expert_out, &layer.input_gate, &layer.input_out, &layer.draft_input,
                                      &layer.mix_in, &layer.mix_out, &layer.mix_select, &layer.mix_step, &layer.mix_decay,
                                      &layer.mix_out_gate, &layer.side_in, &layer.side_out})
        total += packed->bytes();
      for (const auto* matrices : {&layer.qkv_below, &layer.expert_up, &layer.expert_down, &layer.latent_key,
                                   &layer.latent_value})
        for (const Packed<T>& packed : *matrices) total += packed.bytes();
    }
    return total;
  }

  int64_t reserve(int64_t tokens, int64_t logits) override { return decoder_.reserve(tokens, logits); }

  void launch(const antiphon_Step& step) override {
    for (const Layer<T>& layer : decoder_.weights.layers)
      if (!alike(layer.expert_up) || !alike(layer.expert_down))
        throw std::invalid_argument("the experts of a layer must be quantized alike");
    if (!decoder_.weights.embedding && !decoder_.weights.head.matrix.data)
      throw std::invalid_argument("there is no embedding");
    if ((step.keeps || step.sources) && !spec_.num_draft_layers)
      throw std::invalid_argument("the model has no draft layer");
    runner_.launch([this, step] { decoder_.step(step); });
  }

  void collect() override { runner_.collect(); }

  void multiply(int64_t layer, const char* name, int64_t expert, const void* x, int64_t x_stride, int64_t rows,
                float* y, int64_t y_stride) override {
    const Linear<T>& w = matrix_named(layer, name, expert).matrix;
    const Inputs<T> from = as_inputs({static_cast<T*>(const_cast<void*>(x)), x_stride}, rows, w.in);
    const size_t bytes = kept_size(rows, w) * sizeof(float);
    if (bytes > kept_.bytes()) kept_ = Memory(bytes);
    pool_.run([&](int) { linear(pool_, w, from, rows, kept_.as<float>(), Target{{y, y_stride}, false}); });
  }

 private:
  // Returns rows of the model's type as rows of the type that matrices are multiplied with.
  Inputs<T> as_inputs(Rows<T> x, long rows, long width) {
    if constexpr (std::is_same_v<T, TermOf<T>>) {
      return x;
    } else {
      const Inputs<T> to = inputs_.rows(rows, width);
      for (long r = 0; r < rows; r++)
        for (long k = 0; k < round_up(width, kTermsMultiple); k += kLanes) store(to.row(r) + k, load(x.row(r) + k));
      return to;
    }
  }

  Layer<T>& at(int64_t layer) { return decoder_.weights.layers.at(layer); }

  Order order_of(const std::string& name) const {
    const bool up = name == "up" || name == "experts.up" || name == "shared.up";
    return up && spec_.gated_mlp ? Order::gated : Order::plain;
  }

  static bool alike(const std::vector<Packed<T>>& experts) {
    return std::all_of(experts.begin(), experts.end(), [&](const Packed<T>& e) { return e.same_shape(experts[0]); });
  }

  static bool is_below(const std::string& name, int64_t part) { return name == "qkv" && part > 0; }

  // Puts a further part of a matrix below the parts before it, which were set before.
  void follow(int64_t layer, const std::string& name, int64_t part) {
    if (is_below(name, part)) at(layer).qkv.append(matrix_named(layer, name, part));
  }

  Packed<T>& matrix_named(int64_t layer, const std::string& name, int64_t expert) {
    if (is_below(name, expert)) return one_of(at(layer).qkv_below, kQkvParts - 1, expert - 1);
    if (name == "head") return decoder_.weights.head;
    if (name == "inputs.in") return decoder_.weights.inputs_in;
    if (name == "streams.in") return one_of(decoder_.weights.stream_in, spec_.num_streams - 1, expert);
    if (name == "streams.out") return one_of(decoder_.weights.stream_out, spec_.num_streams - 1, expert);
    if (name == "experts.up") return one_of(at(layer).expert_up, spec_.num_experts, expert);
    if (name == "experts.down") return one_of(at(layer).expert_down, spec_.num_experts, expert);
    if (name == "latent.key") return one_of(at(layer).latent_key, spec_.num_heads, expert);
    if (name == "latent.value") return one_of(at(layer).latent_value, spec_.num_heads, expert);
    static const std::map<std::string, Packed<T> Layer<T>::*> places = {
        {"qkv", &Layer<T>::qkv},
        {"o", &Layer<T>::o},
        {"up", &Layer<T>::up},
        {"down", &Layer<T>::down},
        {"router", &Layer<T>::router},
        {"shared.up", &Layer<T>::shared_up},
        {"shared.down", &Layer<T>::shared_down},
        {"shared.gate", &Layer<T>::shared_gate},
        {"q_up", &Layer<T>::query_up},
        {"gate", &Layer<T>::gate},
        {"mix_in", &Layer<T>::mix_in},
        {"mix_out", &Layer<T>::mix_out},
        {"mix_select", &Layer<T>::mix_select},
        {"mix_step", &Layer<T>::mix_step},
        {"mix_decay", &Layer<T>::mix_decay},
        {"mix_out_gate", &Layer<T>::mix_out_gate},
        {"experts.in", &Layer<T>::expert_in},
        {"experts.out", &Layer<T>::expert_out},
        {"input_gate", &Layer<T>::input_gate},
        {"input_out", &Layer<T>::input_out},
        {"draft_input", &Layer<T>::draft_input},
        {"side.in", &Layer<T>::side_in},
        {"side.out", &Layer<T>::side_out},
    };
    const auto place = places.find(name);
    if (place == places.end()) throw std::invalid_argument("no matrix is called " + name);
    return at(layer).*place->second;
  }

  // Returns the matrix of an expert or of a head.
  static Packed<T>& one_of(std::vector<Packed<T>>& matrices, int64_t count, int64_t index) {
    if (matrices.empty()) matrices.resize(count);
    return matrices.at(index);
  }

  std::vector<float>& vector_named(int64_t layer, const std::string& name) {
    if (name == "slopes") return decoder_.weights.slopes;
    if (name == "qk_norm") return at(layer).qk_norm;
    if (name == "sinks") return at(layer).sinks;
    if (name == "xielu") return at(layer).xielu;
    if (name == "gate_cut") return at(layer).gate_cut;
    if (name == "conv") return at(layer).conv;
    if (name == "conv.bias") return at(layer).conv_bias;
    if (name == "decay") return at(layer).decay;
    if (name == "decay_bias") return at(layer).decay_bias;
    if (name == "mix_norm") return at(layer).mix_norm;
    if (name == "skip") return at(layer).skip;
    if (name == "router.correction") return at(layer).router_correction;
    if (name == "expert_scales") return at(layer).expert_scales;
    if (name == "stream_router") return at(layer).streams.router;
    if (name == "stream_predict") return at(layer).streams.predict;
    if (name == "stream_correct") return at(layer).streams.correct;
    if (name == "stream_scale") return at(layer).streams.scale;
    static const std::map<std::string, Norm Layer<T>::*> norms = {
        {"input_norm", &Layer<T>::input_norm},
        {"mlp_norm", &Layer<T>::mlp_norm},
        {"after_attention_norm", &Layer<T>::after_attention_norm},
        {"after_mlp_norm", &Layer<T>::after_mlp_norm},
        {"latent_norm", &Layer<T>::latent_norm},
        {"q_latent_norm", &Layer<T>::query_latent_norm},
        {"experts_norm", &Layer<T>::experts_norm},
        {"router_norm", &Layer<T>::router_norm},
        {"after_experts", &Layer<T>::after_experts},
        {"after_mlp", &Layer<T>::after_mlp},
        {"input_after", &Layer<T>::input_after},
        {"draft_embedding_norm", &Layer<T>::draft_embedding_norm},
        {"draft_hidden_norm", &Layer<T>::draft_hidden_norm},
        {"draft_norm", &Layer<T>::draft_norm},
        {"side_after", &Layer<T>::side_after},
    };
    const std::string owner = name.substr(0, name.find('.'));
    const bool bias = name == owner + ".bias";
    if (owner == "final_norm") return part(decoder_.weights.final_norm, bias);
    if (owner == "inputs_norm") return part(decoder_.weights.inputs_norm, bias);
    const auto place = norms.find(owner);
    if (place == norms.end()) throw std::invalid_argument("no vector is called " + name);
    return part(at(layer).*place->second, bias);
  }

  static std::vector<float>& part(Norm& norm, bool bias) { return bias ? norm.bias : norm.weight; }

  const antiphon_Spec spec_;
  Pool pool_;
  Stock stock_;  // holds packed weights
  Decoder<T> decoder_;
  RowBuffer<TermOf<T>> inputs_;  // used by `multiply`, as is `kept_`
  Memory kept_;
  // The last member, so that it ends before what it uses. With one thread it does not stay awake: a single computing
  // core leaves memory and the other cores to others anyway (see `stay_awake`).
  Runner runner_{pool_.threads() > 1};
};

}  // namespace antiphon
