// The interface between Python and this library: plain C, mirrored field by field in native.py.
#pragma once

#include <cstdint>

extern "C" {

// A decoder, as described in services/engine/models/description.py. Kinds are indices into the lists of names there.
struct antiphon_Spec {
  int64_t vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size;
  int64_t block_size, threads;
  int64_t norm;                                   // rms, rms_plus_one, layer
  int64_t activation;                             // silu, gelu, gelu_tanh, relu, swigluoai
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
  // Latent attention: widths of a latent, of the parts of a query that are not rotated, of a value, and of the latent
  // of queries (0: there is none). Rank 0: the model has keys and values. `head_dim` is the width of a row.
  int64_t latent_rank, latent_nope, latent_value, query_rank;
  float norm_eps, query_scale, attention_softcap, logits_softcap, logits_scale, embedding_scale, expert_scale;
  float latent_eps;  // of the norms of latents
};

// A step: `num_tokens` tokens of `num_sequences` sequences, one sequence after the other.
struct antiphon_Step {
  int64_t num_tokens, num_sequences, num_logits, num_rows, table_width, num_spans;
  const int64_t* ids;  // [num_tokens], or -1 - i for `best[i]` of the last step that had logits
  const int64_t* positions;
  const int64_t* query_start_loc;  // [num_sequences + 1]
  const int64_t* block_tables;     // [num_sequences][table_width]
  const int64_t* logit_tokens;     // [num_logits] tokens of the step after which a token is sampled
  const int64_t* logit_rows;       // [num_logits] row of `logits` to write; -1: only `best` to `log_total` are wanted
  float* logits;                   // [num_rows][vocab_size]
  int64_t* best;                   // [num_logits] the most likely token, the first of equal ones
  float* best_logit;               // [num_logits]
  float* log_total;                // [num_logits] log of the sum of exp(logit)
  const int64_t* spans;            // [num_spans][2] first and end: tokens of the step after which none is sampled
  float* sums;                     // [num_spans][hidden_size] sums of the spans' hidden states behind the final norm
  const int64_t* lora;             // [num_tokens] the slot of each token's adapter, or -1; null: no token has one
  const int64_t* embeddings;       // [num_tokens] address of the token's own embedding [hidden_size] of the model's
                                   // type, or 0 for that of its id; null: no token has its own
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
// "values"; of latents only the keys, which are the rows), whose type the spec says. Without an embedding table, the rows
// of the head are used, which then must not have 8 or 4 bits.
int antiphon_set_table(antiphon_Model* model, int64_t layer, const char* name, const void* table);
int antiphon_set_window(antiphon_Model* model, int64_t layer, int64_t window);
int antiphon_set_rope(antiphon_Model* model, int64_t layer, const float* frequencies, int64_t pairs,
                      int64_t interleaved, float scale);
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
