// What Python and this library say to each other: plain C, mirrored field by field in native.py.
#pragma once

#include <cstdint>

extern "C" {

// A decoder, as services/engine/models/description.py has it. Kinds are numbers in the order of the names there.
struct antiphon_Spec {
  int64_t vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size;
  int64_t block_size, threads;
  int64_t norm;                                   // rms, rms_plus_one, layer
  int64_t activation;                             // silu, gelu, gelu_tanh, relu
  int64_t residual;                               // sequential, parallel, normed
  int64_t gated_mlp, shared_norm, qk_norm, wide;  // wide: float32 instead of bfloat16
  int64_t learned_position_offset;
  int64_t num_experts, experts_per_token, expert_size, shared_expert_size, normalise_experts;
  float norm_eps, query_scale, attention_softcap, logits_softcap, embedding_scale;
};

// A step: `num_tokens` tokens of `num_sequences` sequences, one after the other.
struct antiphon_Step {
  int64_t num_tokens, num_sequences, num_logits, num_rows, table_width;
  const int64_t* ids;  // -1 - i: what the step before this one gave as `best[i]`
  const int64_t* positions;
  const int64_t* query_start_loc;  // [num_sequences + 1]
  const int64_t* block_tables;     // [num_sequences][table_width]
  const int64_t* logit_tokens;     // [num_logits] tokens of the step after which one is sampled
  const int64_t* logit_rows;       // [num_logits] row of `logits` that gets them; -1: only what follows is wanted
  float* logits;                   // [num_rows][vocab_size]
  int64_t* best;                   // [num_logits] the first of the likeliest tokens
  float* best_logit;               // [num_logits]
  float* log_total;                // [num_logits] log of the sum of exp(logit)
};

// A matrix [out][in] in 8 or 4 bits; see quantized.h for what it means. Nothing of it is needed afterwards.
struct antiphon_Quantized {
  int64_t kind;        // int8, int8_dynamic, int4
  int64_t group;       // of int4: terms with one scale, a multiple of 32 or at least `in`
  int64_t two_a_byte;  // of int4: the first of two terms in a byte's lower half, rows ending with a byte
  int64_t has_sign;    // of int4: two's complement from -8 to 7, otherwise from 0 to 15
  const void* weight;
  const float* scales;  // [out], of int4 [out][groups]
  const float*
      zeros;  // of int4: null or [out][groups], on the scale from 0 to 15, or of the levels where there are some
  const float*
      levels;  // of int4: null or [16], rounded to bfloat16; without them, the numbers from 0 to 15 less the zero
};

typedef struct antiphon_Model antiphon_Model;

// The message of the last call that failed on this thread.
const char* antiphon_error(void);
// Whether this processor and system run what the library was compiled for.
int antiphon_usable(void);

antiphon_Model* antiphon_new(const antiphon_Spec* spec);
void antiphon_free(antiphon_Model* model);

// Matrices [out][in] of the model's type are packed and copied. Names as in layout.py ("qkv", "o", "up", "down",
// "router", "experts.up", …); layer -1 for those of no layer. 0 when it worked.
int antiphon_set_matrix(antiphon_Model* model, int64_t layer, const char* name, int64_t expert, const void* weight,
                        int64_t out, int64_t in, const float* bias);
// The same from what `antiphon_packed` gave for it once, read in place.
int antiphon_set_packed(antiphon_Model* model, int64_t layer, const char* name, int64_t expert, const void* packed,
                        int64_t out, int64_t in, const float* bias);
// A matrix as it is packed, and how many bytes that takes; null for one that has 8 or 4 bits, or is not there.
const void* antiphon_packed(antiphon_Model* model, int64_t layer, const char* name, int64_t expert, int64_t* bytes);
// From weights of 8 or 4 bits.
int antiphon_set_quantized(antiphon_Model* model, int64_t layer, const char* name, int64_t expert,
                           const antiphon_Quantized* weight, int64_t out, int64_t in, const float* bias);
// Vectors of floats, copied.
int antiphon_set_vector(antiphon_Model* model, int64_t layer, const char* name, const float* values, int64_t count);
// Tables of the model's type that are read in place ("embedding", "positions"), and the caches of a layer. Without an
// embedding its rows are those of the head, which then must not have 8 or 4 bits.
int antiphon_set_table(antiphon_Model* model, int64_t layer, const char* name, const void* table);
int antiphon_set_window(antiphon_Model* model, int64_t layer, int64_t window);
int antiphon_set_rope(antiphon_Model* model, int64_t layer, const float* frequencies, int64_t pairs,
                      int64_t interleaved, float scale);
// Bytes of one layer's keys of one block; the values have as many.
int64_t antiphon_block_bytes(const antiphon_Model* model);
int64_t antiphon_weight_bytes(const antiphon_Model* model);
// Prompts' tokens that a step should have at most while others wait for it.
int64_t antiphon_prompt_tokens(const antiphon_Model* model);

// Makes room for steps of so many tokens and logits, while none is under way. Returns the most bytes that it can take;
// -1: it failed.
int64_t antiphon_reserve(antiphon_Model* model, int64_t tokens, int64_t logits);

// Puts a step behind those that are under way; its memory is read and written until it has been collected.
int antiphon_launch(antiphon_Model* model, const antiphon_Step* step);
// Waits for the oldest step under way.
int antiphon_collect(antiphon_Model* model);
// One matrix' product with rows, without its bias, for tests and measurements: x [rows][x_stride] of the model's type,
// zero from `in` on; y [rows][y_stride]. Strides count elements: x has `in` rounded up to 32, y `out` likewise; columns
// of gated matrices are in turns of 16 gates and partners.
int antiphon_multiply(antiphon_Model* model, int64_t layer, const char* name, int64_t expert, const void* x,
                      int64_t x_stride, int64_t rows, float* y, int64_t y_stride);

}  // extern "C"
