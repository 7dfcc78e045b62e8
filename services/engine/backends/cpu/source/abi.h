// The interface between Python and this library: plain C, mirrored field by field in native.py.
#pragma once

#include <cstdint>

extern "C" {

// A decoder, as described in services/engine/models/description.py. Kinds are indices into the lists of names there.
struct antiphon_Spec {
  int64_t vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size;
  int64_t block_size, threads;
  int64_t norm;                                   // rms, rms_plus_one, layer
  int64_t activation;                             // silu, gelu, gelu_tanh, relu, swigluoai, relu2, xielu
  int64_t residual;                               // sequential, parallel, normed, post_normed
  int64_t gated_mlp, shared_norm, qk_norm, wide;  // wide: float32 instead of bfloat16
  // qk_norm: 1 norms each head of queries and keys, 2 all heads of queries together, and all of keys,
  // 3 each head after the rotation.
  int64_t learned_position_offset;
  int64_t num_experts, experts_per_token, expert_size, shared_expert_size, normalise_experts;
  int64_t expert_scoring, expert_groups, chosen_groups;  // scoring: softmax, sigmoid
  int64_t cache;                  // type of the KV cache: the model's, float8_e4m3fn, float8_e5m2
  int64_t lora_slots, lora_rank;  // number of adapters of a step, and the largest rank of one; 0: none
  int64_t best_of_group;          // how many of a group's experts its score is the sum of
  int64_t expert_latent;          // width of the inputs and outputs of experts; 0: they are as wide as hidden states
  // Latent attention: widths of a latent, of the parts of a query that are not rotated, of a value, and of the latent
  // of queries (0: there is none). Rank 0: the model has keys and values. `head_dim` is the width of a row.
  int64_t latent_rank, latent_nope, latent_value, query_rank;
  // Layers with a recurrent state in place of attention: those that have a vector "conv" [conv_kernel][channels], and
  // perhaps "conv.bias". Their "qkv" and "o" are `mix_in`, with `mixed_width` outputs, and `mix_out`, with `mixer_width`
  // inputs. Delta rules and state spaces have the vectors "decay", "decay_bias" and "mix_norm", state spaces "skip" too,
  // and states [mix_key_dim][mix_value_dim] of `mix_value_heads` heads; `mix_key_heads` are the groups of a state space.
  // One of channels is a single head with as many values as channels; it has the matrices "mix_select" and "mix_step",
  // with `mix_key_heads` numbers in between. A delta rule of channels has "mix_decay" and "mix_out_gate".
  // conv_kernel 0: no layer has a recurrent state.
  // Gated short convolution, gated delta rule, state space, state space of channels, delta rule of channels.
  int64_t mixer;
  int64_t conv_kernel, mixed_width, mixer_width, mix_key_heads, mix_value_heads, mix_key_dim, mix_value_dim;
  int64_t num_gates;  // the most outputs of a matrix "gate": of a delta rule, or of gates of what attention gives
  int64_t gate_kind;  // function of the gates of what attention gives, one for each value or head: sigmoid, softplus
  int64_t value_norm;             // whether values are normed per head, without a weight
  int64_t group;                  // the most query heads of a layer that read a key head; 0: as the numbers above say
  int64_t input_size, input_rows;  // of layers' inputs (ending.h), and of their table; 0: there are none
  int64_t experts_beside;         // whether layers with experts have an MLP too
  int64_t num_draft_layers;  // 0, or 1: the last layer is a draft layer (draft.h), which only draft passes compute
  // Queries are multiplied by 1 + rate log(1 + floor((position + first) / length)), perhaps only in layers without
  // rotary embedding; length 0: they are not.
  int64_t query_growth_length, query_growth_first, query_growth_unrotated;
  int64_t chunked_windows;  // a token sees the tokens up to itself in its chunk, of a window's length, and none before
  int64_t weighted_inputs;  // the weights of experts multiply what they read, not what they write
  int64_t attends_beside;  // layers with a recurrent state attend too: "mix_in", "mix_out" are beside "qkv" and "o"
  int64_t mix_rank;        // width of the vectors that decays and gates of a delta rule of channels are made of
  // Where a state space has its norm: of the products with the gates, before them, nowhere. Of channels: whether it has.
  int64_t mix_norm_kind;
  int64_t num_streams, side_rank;  // residual streams, and the rank beside attention (streams.h); 0: there is one
  int64_t cuts_gates;              // whether layers may have "gate_cut", by which gates of MLPs become zero (mlp.h)
  float norm_eps, query_scale, attention_softcap, logits_softcap, logits_scale, embedding_scale, expert_scale;
  float latent_eps;  // of the norms of latents
  float query_growth_rate;
  float mix_eps;                // of the norm of what a delta rule or a state space gives
  float step_least, step_most;  // limits of a state space's dt
  float input_scale;            // factor on rows of the table of layers' inputs
  float attended_scale;         // factor on what attention gives
  float mlp_gate_scale, mlp_scale;   // factors on the gates of MLPs that are no experts, and on what they give
  float mix_gate_scale, step_scale;  // factors on the gates of a state space, and on the numbers that dt is made of
};

// A step: `num_tokens` tokens of `num_sequences` sequences, one sequence after the other.
struct antiphon_Step {
  int64_t num_tokens, num_sequences, num_logits, num_rows, table_width, num_spans;
  int64_t keeps;       // whether to keep the hidden states of all tokens for a draft pass, which then is the next step
  const int64_t* ids;  // [num_tokens], or -1 - i for `best[i]` of the last step that had logits
  const int64_t* positions;
  const int64_t* spatial;          // [3][num_tokens] positions in time, row and column; null: all are `positions`
  const int64_t* query_start_loc;  // [num_sequences + 1]
  const int64_t* block_tables;     // [groups][num_sequences][table_width], see antiphon_set_window
  const int64_t* logit_tokens;     // [num_logits] tokens of the step after which a token is sampled
  const int64_t* logit_rows;       // [num_logits] row of `logits` to write; -1: only `best` to `log_total` are wanted
  float* logits;                   // [num_rows][vocab_size]
  int64_t* best;                   // [num_logits] the most likely token, the first of equal ones
  float* best_logit;               // [num_logits]
  float* log_total;                // [num_logits] log of the sum of exp(logit)
  const int64_t* spans;            // [num_spans][2] first and end: tokens of the step after which none is sampled
  float* sums;                     // [num_spans][hidden_size] sums of the spans' hidden states behind the final norm
  const int64_t* lora;             // [num_tokens] the slot of each token's adapter, or -1; null: no token has one
  // The slots of recurrent states, null if the model has none: of sequence s, `state_sources[s]` is read, or -1, and
  // `state_slots[i]` gets the state before token `state_ends[i]` of the step, for i in [state_starts[s],
  // state_starts[s + 1]), in ascending order.
  const int64_t *state_sources, *state_starts, *state_ends, *state_slots;
  const int64_t* embeddings;       // [num_tokens] address of the token's own embedding [hidden_size] of the model's
                                   // type, or 0 for that of its id; null: no token has its own
  const int64_t* sources;          // [num_tokens] null for a step of the model; for a draft pass, whose `ids` are those
                                   // of the tokens after the step's: the row of each token's hidden state among those
                                   // that the step before has kept. It keeps those of its `logit_tokens`
};

// A matrix [out][in] of 8 or 4 bits; quantized.h explains the kinds. Its memory is not needed after the call.
struct antiphon_Quantized {
  int64_t kind;        // int8, int8_dynamic, int4, int4_dynamic
  int64_t group;       // terms (inputs) that share a scale, a multiple of 32 (int8: of 16) or at least `in`; int8: 0 for all of them
  int64_t two_a_byte;  // int4: two terms per byte, the first in the lower half; a row starts at a byte
  int64_t has_sign;    // int4: values are two's complement, -8 to 7, instead of 0 to 15
  int64_t columns;     // stored terms of a row; `in` without `order`
  const void* weight;
  const float* scales;  // [out]; [out][groups] with groups
  const float* zeros;   // int8 with groups: null or [out][groups]; int4: null or [out][groups], on the scale from 0 to 15, or on that of the levels if given
  const float* levels;  // int4: null or [16], see Quantized::levels; null: 0 to 15 minus the zero (8 without `zeros`)
  const int32_t* order;  // null, or [columns]: the input of each stored term; -1: padding. `weight`, and groups, have the stored terms
};

// What a LoRA adapter adds to one matrix; lora.h explains the fields. Its memory is read in place.
struct antiphon_Lora {
  int64_t rank;  // of all parts of a stacked matrix together; 0: nothing is added
  const void* a;
  const void* b;
  const int32_t* ranges;
};

typedef struct antiphon_Model antiphon_Model;

// Returns the message of the last failed call on this thread.
const char* antiphon_error(void);
// Returns whether the system lets this process use the instructions that the library was compiled for.
int antiphon_usable(void);

antiphon_Model* antiphon_new(const antiphon_Spec* spec);
void antiphon_free(antiphon_Model* model);

// Packs and copies a matrix [out][in] of the model's type. Names are those of layout.py ("qkv", "o", "up", "down",
// "router", "experts.up", …); layer -1 is for matrices that belong to no layer. Of latent attention, `expert` is the head
// of "latent.key" [latent_rank][latent_nope] and "latent.value" [latent_value][latent_rank]. Returns 0 on success, as do
// the other functions below that return int.
int antiphon_set_matrix(antiphon_Model* model, int64_t layer, const char* name, int64_t expert, const void* weight,
                        int64_t out, int64_t in, const float* bias);
// Sets a matrix from its packed form, as `antiphon_packed` returned it once. The memory is read in place.
// quantized_bytes: size of the packed form of a matrix of 8 or 4 bits; 0 for other matrices.
int antiphon_set_packed(antiphon_Model* model, int64_t layer, const char* name, int64_t expert, const void* packed,
                        int64_t quantized_bytes, int64_t out, int64_t in, const float* bias);
// Returns a matrix's packed form and its size in bytes; null for a matrix that is not set.
const void* antiphon_packed(antiphon_Model* model, int64_t layer, const char* name, int64_t expert, int64_t* bytes);
// Sets a matrix from weights of 8 or 4 bits. If queries, keys and values are quantized in different ways, "qkv" has up
// to three such parts, in this order and numbered by `expert`; all but the last have whole panels of 32 rows.
int antiphon_set_quantized(antiphon_Model* model, int64_t layer, const char* name, int64_t expert,
                           const antiphon_Quantized* weight, int64_t out, int64_t in, const float* bias);
// Sets what the adapter in a slot adds to a layer's "qkv", "o", "up" or "down". No step may be under way that has tokens
// of this slot.
int antiphon_set_lora(antiphon_Model* model, int64_t slot, int64_t layer, const char* name, const antiphon_Lora* delta);
// Copies a vector of floats.
int antiphon_set_vector(antiphon_Model* model, int64_t layer, const char* name, const float* values, int64_t count);
// Sets a table of the model's type that is read in place ("embedding", "positions"), or a layer's KV cache ("keys",
// "values"; of latents only the keys, which are the rows), whose type the spec says, or the recurrent states of a layer
// ("states", see recurrent.h, delta.h and state_space.h), or the table of layers' inputs ("inputs"). Without an embedding table, the rows
// of the head are used, which then must not have 8 or 4 bits.
int antiphon_set_table(antiphon_Model* model, int64_t layer, const char* name, const void* table);
// Sets the key heads of a layer that differ from the spec's, and the numbers from one block of its cache to the next. A
// layer that borrows reads the cache of an earlier layer, and its "qkv" has queries only.
int antiphon_set_heads(antiphon_Model* model, int64_t layer, int64_t kv_heads, int64_t head_dim, int64_t stride,
                       int64_t borrows);
// Sets a layer's window, and the group of block tables that has its blocks; without this call it is the first.
int antiphon_set_window(antiphon_Model* model, int64_t layer, int64_t window, int64_t group);
// `axes` [pairs]: the position by which each frequency turns, where tokens have three; null: it is the same.
int antiphon_set_rope(antiphon_Model* model, int64_t layer, const float* frequencies, const int64_t* axes,
                      int64_t pairs, int64_t interleaved, float scale);
// Returns the bytes of one layer's keys in one KV block; the values, if there are any, have as many.
int64_t antiphon_block_bytes(const antiphon_Model* model);
int64_t antiphon_weight_bytes(const antiphon_Model* model);
// Returns how many prompt tokens a step should have at most while other sequences wait for it.
int64_t antiphon_prompt_tokens(const antiphon_Model* model);

// Allocates memory for steps of so many tokens and logits; no step may be under way. Returns the bytes that it takes at
// most; -1 if it failed.
int64_t antiphon_reserve(antiphon_Model* model, int64_t tokens, int64_t logits);

// Queues a step behind those under way. Its memory is read and written until the step has been collected.
int antiphon_launch(antiphon_Model* model, const antiphon_Step* step);
// Waits for the oldest step under way.
int antiphon_collect(antiphon_Model* model);
// Multiplies rows by one matrix, without its bias, for tests and measurements: x [rows][x_stride] of the model's type,
// zero from `in` on; y [rows][y_stride]. Strides count elements: x has `in` rounded up to 32, y `out` likewise. Columns
// of gated matrices alternate between 16 gates and the 16 up columns that belong to them.
int antiphon_multiply(antiphon_Model* model, int64_t layer, const char* name, int64_t expert, const void* x,
                      int64_t x_stride, int64_t rows, float* y, int64_t y_stride);

// Copies `count` pieces of `piece_bytes` bytes to `whole`, one after the other; with `to_pieces` from `whole` to the
// pieces. Sets `sums` to the sums of what it copies as a table of 64-bit words, [rows][512]: first those of the columns,
// then those of the rows. Bytes after the last whole row are in no sum.
void antiphon_copy_block(void* const* pieces, int64_t count, int64_t piece_bytes, void* whole, int to_pieces,
                         uint64_t* sums);

}  // extern "C"
