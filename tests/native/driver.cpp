// Runs small random models through the C interface: the same sequences alone on one thread, and in mixed steps on
// several. The logits must be the same to the last bit, whatever lay in the cache before. Prints, for each model, a few
// logits and their average size, and exits with 1 where something differs.
//
//     driver [threads]
//
// Made with sanitizers by test_sanitizers.py. With -Wl,--wrap=mmap,--wrap=munmap,--wrap=madvise the library's memory
// comes from the heap, where reading past its end is seen.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "abi.h"

#if defined(WRAP_MEMORY)
#include "heap.h"
#endif

namespace {

enum Norm { rms, rms_plus_one, layer_norm };
enum Activation { silu, gelu, gelu_tanh, relu, swigluoai, relu2, xielu };
enum Residual { sequential, parallel, normed };

// What a model has beyond its spec.
struct Shape {
  const char* name;
  antiphon_Spec spec;
  int64_t window = 0, rotary_pairs = 0, positions = 0;
  bool interleaved = false, slopes = false, biases = false, own_mlp_norm = true, tied = false;
  bool corrected = false, sinks = false, parts = false;  // parts: queries and keys have 4 bits, values 8
  bool own_heads = false;  // layers have heads of their own, and the last one reads the keys of the one before it
};

antiphon_Spec spec(int64_t hidden, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t inner, int64_t block) {
  antiphon_Spec s = {};
  s.vocab_size = 331, s.hidden_size = hidden, s.num_layers = 2;
  s.num_heads = heads, s.num_kv_heads = kv_heads, s.head_dim = head_dim;
  s.intermediate_size = inner, s.block_size = block;
  s.gated_mlp = 1, s.norm_eps = 1e-6f, s.embedding_scale = 1, s.expert_scale = 1, s.logits_scale = 1;
  s.attended_scale = s.mlp_gate_scale = s.mlp_scale = s.mix_gate_scale = s.step_scale = 1;
  s.query_scale = 1 / std::sqrt((float)head_dim);
  return s;
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  Shape gated{"gated", spec(50, 4, 2, 12, 37, 16)};
  gated.rotary_pairs = 6, gated.spec.qk_norm = 1, gated.tied = true;
  all.push_back(gated);

  Shape eight{"a cache of 8 bits", spec(50, 4, 2, 12, 37, 64)};
  eight.rotary_pairs = 6, eight.spec.cache = 1;
  all.push_back(eight);
  Shape small{"small blocks of 8 bits", spec(70, 4, 4, 32, 64, 1)};
  small.rotary_pairs = 6, small.spec.cache = 2;
  all.push_back(small);

  Shape plain{"plain", spec(33, 3, 3, 11, 70, 1)};
  plain.spec.gated_mlp = 0, plain.spec.norm = layer_norm, plain.spec.activation = gelu, plain.biases = true;
  plain.positions = 300, plain.spec.learned_position_offset = 2;
  all.push_back(plain);

  Shape numbered{"numbers of an activation, queries that grow", spec(70, 4, 2, 64, 110, 16)};
  numbered.spec.gated_mlp = 0, numbered.spec.activation = xielu, numbered.rotary_pairs = 32;
  numbered.spec.query_growth_length = 7, numbered.spec.query_growth_rate = 0.1f;
  all.push_back(numbered);
  Shape squared{"squares", spec(33, 3, 3, 11, 70, 1)};
  squared.spec.activation = relu2, squared.spec.gated_mlp = 0, squared.rotary_pairs = 3;
  all.push_back(squared);

  Shape both{"parallel", spec(64, 5, 1, 40, 96, 64)};
  both.spec.residual = parallel, both.spec.norm = layer_norm, both.spec.activation = gelu_tanh, both.biases = true;
  both.spec.gated_mlp = 0, both.rotary_pairs = 5, both.interleaved = true;
  all.push_back(both);

  Shape shared{"parallel with one norm", both.spec};
  shared.spec.shared_norm = 1, shared.own_mlp_norm = false, shared.slopes = true, shared.spec.activation = relu;
  all.push_back(shared);

  Shape capped{"normed", spec(72, 6, 2, 18, 65, 128)};
  capped.spec.residual = normed, capped.spec.norm = rms_plus_one, capped.spec.activation = gelu_tanh;
  capped.spec.attention_softcap = 4, capped.spec.logits_softcap = 6, capped.spec.embedding_scale = 8.5f;
  capped.window = 20, capped.rotary_pairs = 9;
  all.push_back(capped);

  Shape experts{"experts", spec(40, 2, 1, 20, 24, 32)};
  experts.spec.num_experts = 7, experts.spec.experts_per_token = 3, experts.spec.expert_size = 21;
  experts.spec.shared_expert_size = 35, experts.rotary_pairs = 10;
  all.push_back(experts);

  Shape chunks{"chunks, weighted inputs of experts", spec(40, 2, 1, 20, 24, 32)};
  chunks.spec.num_experts = 5, chunks.spec.experts_per_token = 2, chunks.spec.expert_size = 21;
  chunks.spec.shared_expert_size = 21, chunks.spec.expert_scoring = 1, chunks.spec.weighted_inputs = 1;
  chunks.spec.query_growth_length = 7, chunks.spec.query_growth_rate = 0.1f, chunks.spec.query_growth_first = 1;
  chunks.spec.query_growth_unrotated = 1, chunks.spec.chunked_windows = 1, chunks.window = 37;
  all.push_back(chunks);

  Shape grouped{"experts in groups", spec(40, 2, 1, 20, 24, 32)};
  grouped.spec.num_experts = 9, grouped.spec.experts_per_token = 4, grouped.spec.expert_size = 21;
  grouped.spec.expert_scoring = 1, grouped.spec.expert_groups = 3, grouped.spec.chosen_groups = 2;
  grouped.spec.shared_expert_size = 35, grouped.spec.expert_scale = 1.5f, grouped.spec.normalise_experts = 1;
  grouped.spec.activation = swigluoai, grouped.corrected = true, grouped.biases = true, grouped.sinks = true;
  grouped.spec.qk_norm = 3, grouped.rotary_pairs = 10;
  all.push_back(grouped);

  Shape latents{"latents", spec(50, 5, 1, 26, 37, 16)};
  latents.spec.latent_rank = 20, latents.spec.latent_nope = 7, latents.spec.latent_value = 9;
  latents.spec.query_rank = 11, latents.spec.latent_eps = 1e-6f, latents.rotary_pairs = 3, latents.interleaved = true;
  all.push_back(latents);

  Shape rounded{"latents of 8 bits", spec(41, 40, 1, 80, 37, 64)};
  rounded.spec.latent_rank = 64, rounded.spec.latent_nope = 33, rounded.spec.latent_value = 5;
  rounded.spec.latent_eps = 1e-6f, rounded.rotary_pairs = 8, rounded.spec.cache = 1;
  all.push_back(rounded);

  Shape panels{"heads of whole panels", spec(70, 4, 2, 64, 1100, 32)};
  panels.tied = true, panels.rotary_pairs = 32, panels.spec.qk_norm = 1, panels.biases = true, panels.window = 50;
  all.push_back(panels);

  Shape parts{"queries, keys and values of different kinds", spec(70, 4, 2, 64, 110, 32)};
  parts.parts = true, parts.rotary_pairs = 32, parts.biases = true;
  all.push_back(parts);

  Shape own{"heads, inputs and experts of Gemma 4", spec(50, 4, 2, 24, 37, 16)};
  own.own_heads = true, own.rotary_pairs = 6, own.spec.num_layers = 3, own.spec.qk_norm = 1, own.spec.value_norm = 1;
  own.spec.residual = normed, own.spec.activation = gelu_tanh, own.spec.group = 4;
  own.spec.input_size = 9, own.spec.input_rows = 300, own.spec.input_scale = 3;
  own.spec.num_experts = 5, own.spec.experts_per_token = 2, own.spec.expert_size = 21, own.spec.normalise_experts = 1;
  own.spec.experts_beside = 1, own.spec.expert_groups = own.spec.chosen_groups = own.spec.best_of_group = 1;
  all.push_back(own);
  Shape streams{"streams and cut gates of Gemma 3n", own.spec};
  streams.own_heads = true, streams.rotary_pairs = 6, streams.spec.num_experts = streams.spec.experts_beside = 0;
  streams.spec.num_streams = 3, streams.spec.side_rank = 5, streams.spec.cuts_gates = 1;
  all.push_back(streams);
  Shape drafting{"a draft layer", spec(50, 4, 2, 12, 37, 16)};
  drafting.rotary_pairs = 6, drafting.spec.qk_norm = 1, drafting.tied = true, drafting.spec.norm = rms_plus_one;
  drafting.spec.num_layers = 3, drafting.spec.num_draft_layers = 1;
  all.push_back(drafting);
  Shape expert_drafts{"a draft layer over latents", latents.spec};
  expert_drafts.rotary_pairs = 3, expert_drafts.spec.num_layers = 3, expert_drafts.spec.num_draft_layers = 1;
  expert_drafts.spec.num_experts = 5, expert_drafts.spec.experts_per_token = 2, expert_drafts.spec.expert_size = 19;
  all.push_back(expert_drafts);

  Shape group{"a group of 40", spec(31, 40, 1, 8, 33, 8)};
  group.spec.num_experts = 3, group.spec.experts_per_token = 1, group.spec.expert_size = 40;
  group.spec.normalise_experts = 1, group.window = 33, group.slopes = true;
  all.push_back(group);
  return all;
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2862933555777941757u + 3037000493u) {}
  // Evenly between -1 and 1.
  float next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(state_ >> 32) / 2147483648.0f;
  }

 private:
  uint64_t state_;
};

// Numbers of the model's type as bytes.
class Numbers {
 public:
  Numbers(Random& random, bool wide, int64_t count, float size) : bytes_(count * (wide ? 4 : 2)) {
    for (int64_t i = 0; i < count; i++) {
      const float x = random.next() * size;
      uint32_t bits;
      memcpy(&bits, &x, 4);
      const uint16_t upper = (uint16_t)(bits >> 16);
      if (wide)
        memcpy(&bytes_[4 * i], &x, 4);
      else
        memcpy(&bytes_[2 * i], &upper, 2);
    }
  }
  // Makes each byte a positive number of 8 bits below 1.
  void to_eight() {
    for (char& byte : bytes_) byte &= 0x1f;
  }
  void* data() { return bytes_.data(); }

 private:
  std::vector<char> bytes_;
};

void check(int failed) {
  if (!failed) return;
  fprintf(stderr, "%s\n", antiphon_error());
  exit(1);
}

constexpr int64_t kBlocksTokens = 1280;  // of the whole cache

class Model {
 public:
  Model(const Shape& shape, bool wide, int64_t threads, uint64_t garbage) : shape_(shape), wide_(wide), random_(7) {
    shape_.spec.wide = wide, shape_.spec.threads = threads;
    model_ = antiphon_new(&shape_.spec);
    if (!model_) check(1);
    load();
    Random other(garbage);
    const int64_t blocks = kBlocksTokens / shape_.spec.block_size;
    const int64_t count = blocks * antiphon_block_bytes(model_) / (wide ? 4 : 2);
    for (int64_t layer = 0; layer < shape_.spec.num_layers; layer++)
      for (const char* name : {"keys", "values"}) {
        if (borrows(layer)) {
          check(antiphon_set_table(model_, layer, name, kept_[kept_.size() - 2].data()));
          if (*name == 'v') check(antiphon_set_table(model_, layer, name, kept_.back().data()));
          continue;
        }
        Numbers garbage(other, wide, count, 50);
        if (shape_.spec.cache) garbage.to_eight();
        table(layer, name, std::move(garbage));
      }
  }
  ~Model() { antiphon_free(model_); }
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  void step(const antiphon_Step& step) { check(antiphon_launch(model_, &step)), check(antiphon_collect(model_)); }

 private:
  void load() {
    const antiphon_Spec& s = shape_.spec;
    if (!shape_.tied) table(-1, "embedding", Numbers(random_, wide_, s.vocab_size * s.hidden_size, 1));
    if (shape_.positions) table(-1, "positions", Numbers(random_, wide_, (shape_.positions + 2) * s.hidden_size, 1));
    norm(-1, "final_norm");
    matrix(-1, "head", 0, s.vocab_size, s.hidden_size);
    if (shape_.slopes) vector(-1, "slopes", s.num_heads, 0.05f, 0.1f);
    for (int64_t layer = 0; layer < s.num_layers; layer++) load_layer(layer);
    if (!s.input_size) return;
    table(-1, "inputs", Numbers(random_, wide_, s.input_rows * s.num_layers * s.input_size, 1));
    matrix(-1, "inputs.in", 0, s.num_layers * s.input_size, s.hidden_size);
    vector(-1, "inputs_norm", s.input_size, 0.3f, 1);
    for (int64_t i = 0; i < s.num_streams - 1; i++)
      for (const char* name : {"streams.in", "streams.out"}) matrix(-1, name, i, s.hidden_size, s.hidden_size);
  }

  bool borrows(int64_t layer) const { return shape_.own_heads && layer == 2; }
  int64_t kv_heads(int64_t layer) const { return shape_.own_heads && layer == 0 ? 1 : shape_.spec.num_kv_heads; }
  int64_t head_dim(int64_t layer) const { return shape_.own_heads && layer > 0 ? 12 : shape_.spec.head_dim; }

  void load_ending(int64_t layer) {
    const antiphon_Spec& s = shape_.spec;
    matrix(layer, "input_gate", 0, s.input_size, s.hidden_size);
    matrix(layer, "input_out", 0, s.hidden_size, s.input_size);
    norm(layer, "input_after");
    if (s.num_streams) return load_streams(layer);
    vector(layer, "scale", 1, 0.1f, 1);
    for (const char* name : {"experts_norm", "router_norm", "after_experts", "after_mlp"}) norm(layer, name);
    vector(layer, "expert_scales", s.num_experts, 0.3f, 1);
  }

  void load_streams(int64_t layer) {
    const antiphon_Spec& s = shape_.spec;
    matrix(layer, "side.in", 0, s.side_rank, s.hidden_size);
    matrix(layer, "side.out", 0, s.hidden_size, s.side_rank);
    norm(layer, "side_after");
    vector(layer, "stream_router", s.num_streams * s.hidden_size, 0.1f, 0);
    vector(layer, "stream_predict", s.num_streams * s.num_streams * s.num_streams, 0.5f, 0);
    vector(layer, "stream_correct", s.num_streams * s.num_streams, 0.5f, 0);
    vector(layer, "stream_scale", s.hidden_size, 0.3f, 1);
    if (layer < 2) vector(layer, "gate_cut", 1, 0.5f, 1);
  }

  void load_layer(int64_t layer) {
    const antiphon_Spec& s = shape_.spec;
    norm(layer, "input_norm");
    if (layer >= s.num_layers - s.num_draft_layers) {
      for (const char* name : {"draft_embedding_norm", "draft_hidden_norm", "draft_norm"}) norm(layer, name);
      matrix(layer, "draft_input", 0, s.hidden_size, 2 * s.hidden_size);
    }
    if (shape_.own_mlp_norm) norm(layer, "mlp_norm");
    if (s.residual == normed) norm(layer, "after_attention_norm"), norm(layer, "after_mlp_norm");
    if (s.latent_rank) {
      load_latents(layer);
    } else if (shape_.parts) {
      quantized(layer, "qkv", 0, 2, 32, s.num_heads * s.head_dim, s.hidden_size);
      quantized(layer, "qkv", 1, 2, 64, s.num_kv_heads * s.head_dim, s.hidden_size);
      quantized(layer, "qkv", 2, 0, 16, s.num_kv_heads * s.head_dim, s.hidden_size);
      matrix(layer, "o", 0, s.hidden_size, s.num_heads * s.head_dim);
    } else {
      const int64_t more = borrows(layer) ? 0 : 2 * kv_heads(layer);
      matrix(layer, "qkv", 0, (s.num_heads + more) * head_dim(layer), s.hidden_size);
      matrix(layer, "o", 0, s.hidden_size, s.num_heads * head_dim(layer));
    }
    if (shape_.own_heads)
      check(antiphon_set_heads(model_, layer, kv_heads(layer), head_dim(layer), 2 * 32 * s.block_size, borrows(layer)));
    if (s.activation == xielu) vector(layer, "xielu", 4, 0.1f, 0.5f);
    if (shape_.sinks) vector(layer, "sinks", s.num_heads, 2, 0);
    if (s.qk_norm) vector(layer, "qk_norm", (s.num_heads + kv_heads(layer)) * head_dim(layer), 0.3f, 1);
    if (layer == 1 || !s.num_experts || s.experts_beside) {
      matrix(layer, "up", 0, s.intermediate_size * (s.gated_mlp ? 2 : 1), s.hidden_size);
      matrix(layer, "down", 0, s.hidden_size, s.intermediate_size);
    }
    if (layer != 1 && s.num_experts) load_experts(layer);
    if (s.input_size) load_ending(layer);
    if (shape_.window && layer == 0) check(antiphon_set_window(model_, layer, shape_.window, 1));
    if (shape_.rotary_pairs) set_rope(layer);
  }

  void load_latents(int64_t layer) {
    const antiphon_Spec& s = shape_.spec;
    const int64_t queries = s.num_heads * (s.latent_nope + s.head_dim - s.latent_rank);
    matrix(layer, "qkv", 0, (s.query_rank ? s.query_rank : queries) + s.head_dim, s.hidden_size);
    if (s.query_rank) {
      vector(layer, "q_latent_norm", s.query_rank, 0.3f, 1);
      matrix(layer, "q_up", 0, queries, s.query_rank);
    }
    vector(layer, "latent_norm", s.latent_rank, 0.3f, 1);
    for (int64_t head = 0; head < s.num_heads; head++) {
      matrix(layer, "latent.key", head, s.latent_rank, s.latent_nope);
      matrix(layer, "latent.value", head, s.latent_value, s.latent_rank);
    }
    matrix(layer, "o", 0, s.hidden_size, s.num_heads * s.latent_value);
  }

  void load_experts(int64_t layer) {
    const antiphon_Spec& s = shape_.spec;
    matrix(layer, "router", 0, s.num_experts, s.hidden_size);
    if (shape_.corrected) vector(layer, "router.correction", s.num_experts, 0.1f, 0);
    for (int64_t expert = 0; expert < s.num_experts; expert++) {
      matrix(layer, "experts.up", expert, 2 * s.expert_size, s.hidden_size);
      matrix(layer, "experts.down", expert, s.hidden_size, s.expert_size);
    }
    if (!s.shared_expert_size) return;
    matrix(layer, "shared.up", 0, 2 * s.shared_expert_size, s.hidden_size);
    matrix(layer, "shared.down", 0, s.hidden_size, s.shared_expert_size);
    if (!shape_.corrected) matrix(layer, "shared.gate", 0, 1, s.hidden_size);
  }

  void set_rope(int64_t layer) {
    std::vector<float> frequencies;
    for (int64_t i = 0; i < shape_.rotary_pairs; i++)
      frequencies.push_back(std::pow(100.0f * (float)(layer + 1), -(float)i / (float)shape_.rotary_pairs));
    check(antiphon_set_rope(model_, layer, frequencies.data(), nullptr, shape_.rotary_pairs, shape_.interleaved, 1.1f));
  }

  void norm(int64_t layer, const std::string& name) {
    vector(layer, name, shape_.spec.hidden_size, 0.3f, 1);
    if (shape_.spec.norm == layer_norm) vector(layer, name + ".bias", shape_.spec.hidden_size, 0.3f, 0);
  }

  void vector(int64_t layer, const std::string& name, int64_t count, float size, float middle) {
    std::vector<float> values(count);
    for (float& value : values) value = random_.next() * size + middle;
    check(antiphon_set_vector(model_, layer, name.c_str(), values.data(), count));
  }

  void matrix(int64_t layer, const char* name, int64_t expert, int64_t out, int64_t in) {
    Numbers weight(random_, wide_, out * in, 3 / std::sqrt((float)in));
    std::vector<float> bias(out);
    for (float& value : bias) value = random_.next();
    check(antiphon_set_matrix(model_, layer, name, expert, weight.data(), out, in,
                              shape_.biases ? bias.data() : nullptr));
  }

  // One part of a matrix, int8 (kind 0) or int4 (kind 2), in groups.
  void quantized(int64_t layer, const char* name, int64_t part, int64_t kind, int64_t group, int64_t out, int64_t in) {
    std::vector<uint8_t> weight(out * in);
    for (uint8_t& value : weight) value = (uint8_t)(int)(random_.next() * 127);
    std::vector<float> scales(out * ((in + group - 1) / group)), bias(out);
    for (float& value : scales) value = (random_.next() + 2) / std::sqrt((float)in) / (kind ? 8 : 127);
    for (float& value : bias) value = random_.next();
    antiphon_Quantized from = {};
    from.kind = kind, from.group = group, from.columns = in, from.weight = weight.data(), from.scales = scales.data();
    check(antiphon_set_quantized(model_, layer, name, part, &from, out, in, shape_.biases ? bias.data() : nullptr));
  }

  void table(int64_t layer, const char* name, Numbers numbers) {
    kept_.push_back(std::move(numbers));
    check(antiphon_set_table(model_, layer, name, kept_.back().data()));
  }

  Shape shape_;
  bool wide_;
  Random random_;
  antiphon_Model* model_;
  std::vector<Numbers> kept_;
};

// Tokens [start, end) of a sequence. Which tokens and blocks a sequence has follows from its number.
struct Share {
  int64_t sequence, start, end;
};

constexpr int64_t kSequences = 5, kTokensMost = 140;
typedef std::map<std::pair<int64_t, int64_t>, std::vector<float>> Logits;  // after a position of a sequence

int64_t token(int64_t sequence, int64_t position) { return (sequence * 97 + position * 31 + position % 7) % 331; }

class Step {
 public:
  Step(const std::vector<Share>& shares, const antiphon_Spec& spec)
      : shares_(shares), vocab_(spec.vocab_size), hidden_(spec.hidden_size), drafts_(spec.num_draft_layers > 0) {
    const int64_t of_each = kBlocksTokens / spec.block_size / kSequences;
    starts_.push_back(0);
    for (const Share& share : shares) {
      for (int64_t p = share.start; p < share.end; p++) {
        ids_.push_back(token(share.sequence, p)), positions_.push_back(p);
        next_.push_back(token(share.sequence, p + 1));
      }
      const int64_t end = (int64_t)ids_.size();
      for (const int64_t t : {starts_.back(), end - 1}) earlier_.push_back(t);
      for (const int64_t t : {end - 1, end}) last_.push_back(t);
      starts_.push_back((int64_t)ids_.size());
      logit_tokens_.push_back((int64_t)ids_.size() - 1);
      rows_.push_back((int64_t)rows_.size());
    }
    // Blocks interleave; they run backwards, and forwards in the second group of tables, which layers with a window use.
    for (const bool backwards : {true, false})
      for (const Share& share : shares)
        for (int64_t b = 0; b < of_each; b++)
          tables_.push_back((backwards ? of_each - 1 - b : b) * kSequences + share.sequence);
    logits_.resize(shares.size() * vocab_), sums_.resize(shares.size() * hidden_);
    best_.resize(shares.size()), best_logit_.resize(shares.size()), log_total_.resize(shares.size());
  }

  void run(Model& model, Logits& to) {
    antiphon_Step s = {};
    s.num_tokens = (int64_t)ids_.size(), s.num_sequences = (int64_t)shares_.size();
    s.num_logits = s.num_rows = s.num_sequences;
    s.table_width = (int64_t)tables_.size() / 2 / s.num_sequences;
    s.ids = ids_.data(), s.positions = positions_.data(), s.query_start_loc = starts_.data();
    s.block_tables = tables_.data(), s.logit_tokens = logit_tokens_.data(), s.logit_rows = rows_.data();
    s.logits = logits_.data(), s.best = best_.data(), s.best_logit = best_logit_.data();
    s.log_total = log_total_.data();
    s.num_spans = s.num_sequences, s.spans = earlier_.data(), s.sums = sums_.data();
    model.step(s);
    for (size_t i = 0; i < shares_.size(); i++) {
      std::vector<float> row(logits_.begin() + i * vocab_, logits_.begin() + (i + 1) * vocab_);
      row.push_back(best_logit_[i]), row.push_back(log_total_[i]), row.push_back((float)best_[i]);
      to[{shares_[i].sequence, shares_[i].end}] = row;
    }
    s.num_logits = s.num_rows = 0;  // the same step again, with the hidden states of the last tokens in place of logits
    s.spans = last_.data();
    model.step(s);
    for (size_t i = 0; i < shares_.size(); i++) {
      std::vector<float>& row = to[{shares_[i].sequence, shares_[i].end}];
      row.insert(row.end(), sums_.begin() + i * hidden_, sums_.begin() + (i + 1) * hidden_);
    }
    if (drafts_) draft(model, s, to);
    if (shares_.size() == 1) return;
    s.num_spans = 0;  // once more, without samples and spans, changes nothing
    model.step(s);
  }

  // The step again, without samples, and its draft pass; then a further one for the last tokens.
  void draft(Model& model, antiphon_Step s, Logits& to) {
    s.num_spans = 0, s.keeps = 1;
    model.step(s);
    std::vector<int64_t> sources(ids_.size()), further(shares_.size()), firsts(shares_.size() + 1), positions;
    for (size_t i = 0; i < sources.size(); i++) sources[i] = (int64_t)i;
    for (size_t i = 0; i < firsts.size(); i++) firsts[i] = (int64_t)i;
    s.keeps = 0, s.num_logits = s.num_rows = s.num_sequences, s.ids = next_.data(), s.sources = sources.data();
    model.step(s);
    keep(to);
    for (size_t i = 0; i < further.size(); i++) {
      further[i] = (int64_t)i;
      positions.push_back(shares_[i].end);
    }
    std::vector<int64_t> ids(further.size(), 5);
    s.num_tokens = s.num_sequences, s.ids = ids.data(), s.positions = positions.data();
    s.query_start_loc = firsts.data();
    s.logit_tokens = further.data(), s.sources = further.data();
    model.step(s);
    keep(to);
  }

  void keep(Logits& to) const {
    for (size_t i = 0; i < shares_.size(); i++) {
      std::vector<float>& row = to[{shares_[i].sequence, shares_[i].end}];
      row.insert(row.end(), logits_.begin() + i * vocab_, logits_.begin() + (i + 1) * vocab_);
    }
  }

 private:
  const std::vector<Share> shares_;
  const int64_t vocab_, hidden_;
  const bool drafts_;
  std::vector<int64_t> ids_, next_, positions_, starts_, tables_, logit_tokens_, rows_, best_, earlier_, last_;
  std::vector<float> logits_, best_logit_, log_total_, sums_;
};

// Chunks beside single tokens; sequences come and end at different times.
const std::vector<std::vector<Share>> kMixed = {
    {{0, 0, 33}, {1, 0, 5}},
    {{0, 33, 70}, {2, 0, 1}, {1, 5, 6}, {3, 0, 17}},
    {{2, 1, 130}, {0, 70, 71}, {1, 6, 7}, {3, 17, 34}},
    {{0, 71, 72}, {1, 7, 8}, {2, 130, 131}, {3, 34, 35}},
    {{3, 35, 38}, {2, 131, kTokensMost}, {1, 8, 9}, {0, 72, 73}},
};
// The last of these ends again, each sequence for itself and in as few steps as there can be.
const std::vector<std::vector<Share>> kAlone = {
    {{0, 0, 72}}, {{0, 72, 73}}, {{1, 0, 8}}, {{1, 8, 9}}, {{2, 0, 131}}, {{2, 131, kTokensMost}}, {{3, 0, 38}},
};
// So many rows that threads take them through whole layers by themselves, where the model allows it.
const std::vector<std::vector<Share>> kMany = {
    {{0, 0, 72}, {1, 0, 8}, {2, 0, 131}, {3, 0, 38}, {4, 0, kTokensMost}},
    {{0, 72, 73}, {1, 8, 9}, {2, 131, kTokensMost}},
};

Logits run(const Shape& shape, bool wide, int64_t threads, const std::vector<std::vector<Share>>& steps) {
  Model model(shape, wide, threads, threads);
  Logits logits;
  for (const std::vector<Share>& step : steps) Step(step, shape.spec).run(model, logits);
  return logits;
}

void print(const Shape& shape, bool wide, const Logits& logits) {
  double total = 0;
  int64_t count = 0;
  for (const auto& [place, row] : logits)
    for (float x : row) total += std::fabs(x), count++;
  const std::vector<float>& last = logits.rbegin()->second;
  printf("%s %s: %.6f", shape.name, wide ? "float32" : "bfloat16", total / (double)count);
  for (size_t i = 0; i < last.size(); i += 83) printf(" %.4f", last[i]);
  printf("\n");
}

}  // namespace

int main(int count, char** arguments) {
  const int64_t threads = count > 1 ? atoi(arguments[1]) : 4;
  if (!antiphon_usable()) return 77;
  int different = 0;
  for (const Shape& shape : shapes())
    for (bool wide : {true, false}) {
      const Logits one = run(shape, wide, 1, kAlone);
      print(shape, wide, one);
      for (const auto& steps : {kMixed, kMany}) {
        const Logits others = run(shape, wide, threads, steps);
        for (const auto& [place, row] : one) {
          if (memcmp(row.data(), others.at(place).data(), row.size() * sizeof(float)) == 0) continue;
          fprintf(stderr, "%s: sequence %ld differs at %ld\n", shape.name, (long)place.first, (long)place.second);
          different = 1;
        }
      }
    }
  return different;
}
