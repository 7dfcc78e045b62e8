// The C interface: calls the model and turns exceptions into messages.
#include "abi.h"

#include <exception>
#include <string>

#include "kv_copy.h"
#include "model.h"
#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

using antiphon::Model;

namespace {

thread_local std::string last_error;

template <class Call>
int guarded(Call&& call) {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

Model& of(antiphon_Model* model) { return *reinterpret_cast<Model*>(model); }
const Model& of(const antiphon_Model* model) { return *reinterpret_cast<const Model*>(model); }

}  // namespace

extern "C" {

const char* antiphon_error(void) { return last_error.c_str(); }

int antiphon_usable(void) {
#if defined(__AMX_BF16__)
  return antiphon::allow_tiles();
#else
  return 1;
#endif
}

antiphon_Model* antiphon_new(const antiphon_Spec* spec) {
  Model* model = nullptr;
  guarded(
      [&] { model = (spec->wide ? antiphon::make_float_model(*spec) : antiphon::make_bf16_model(*spec)).release(); });
  return reinterpret_cast<antiphon_Model*>(model);
}

void antiphon_free(antiphon_Model* model) { delete &of(model); }

int antiphon_set_matrix(antiphon_Model* model, int64_t layer, const char* name, int64_t expert, const void* weight,
                        int64_t out, int64_t in, const float* bias) {
  return guarded([&] { of(model).set_matrix(layer, name, expert, weight, out, in, bias); });
}

int antiphon_set_packed(antiphon_Model* model, int64_t layer, const char* name, int64_t expert, const void* packed,
                        int64_t quantized_bytes, int64_t out, int64_t in, const float* bias) {
  return guarded([&] { of(model).set_packed(layer, name, expert, packed, quantized_bytes, out, in, bias); });
}

const void* antiphon_packed(antiphon_Model* model, int64_t layer, const char* name, int64_t expert, int64_t* bytes) {
  const void* packed = nullptr;
  guarded([&] { packed = of(model).packed(layer, name, expert, *bytes); });
  return packed;
}

int antiphon_set_quantized(antiphon_Model* model, int64_t layer, const char* name, int64_t expert,
                           const antiphon_Quantized* weight, int64_t out, int64_t in, const float* bias) {
  return guarded([&] { of(model).set_quantized(layer, name, expert, *weight, out, in, bias); });
}

int antiphon_set_lora(antiphon_Model* model, int64_t slot, int64_t layer, const char* name,
                      const antiphon_Lora* delta) {
  return guarded([&] { of(model).set_lora(slot, layer, name, *delta); });
}

int antiphon_set_vector(antiphon_Model* model, int64_t layer, const char* name, const float* values, int64_t count) {
  return guarded([&] { of(model).set_vector(layer, name, values, count); });
}

int antiphon_set_table(antiphon_Model* model, int64_t layer, const char* name, const void* table) {
  return guarded([&] { of(model).set_table(layer, name, table); });
}

int antiphon_set_heads(antiphon_Model* model, int64_t layer, int64_t kv_heads, int64_t head_dim, int64_t stride,
                       int64_t borrows) {
  return guarded([&] { of(model).set_heads(layer, kv_heads, head_dim, stride, borrows != 0); });
}

int antiphon_set_window(antiphon_Model* model, int64_t layer, int64_t window, int64_t group) {
  return guarded([&] { of(model).set_window(layer, window, group); });
}

int antiphon_set_rope(antiphon_Model* model, int64_t layer, const float* frequencies, const int64_t* axes,
                      int64_t pairs, int64_t interleaved, float scale) {
  return guarded([&] { of(model).set_rope(layer, frequencies, axes, pairs, interleaved != 0, scale); });
}

int64_t antiphon_block_bytes(const antiphon_Model* model) { return of(model).block_bytes(); }

int64_t antiphon_weight_bytes(const antiphon_Model* model) { return of(model).weight_bytes(); }

int64_t antiphon_prompt_tokens(const antiphon_Model* model) { return of(model).prompt_tokens(); }

int64_t antiphon_reserve(antiphon_Model* model, int64_t tokens, int64_t logits) {
  int64_t bytes = -1;
  guarded([&] { bytes = of(model).reserve(tokens, logits); });
  return bytes;
}

int antiphon_launch(antiphon_Model* model, const antiphon_Step* step) {
  return guarded([&] { of(model).launch(*step); });
}

int antiphon_collect(antiphon_Model* model) {
  return guarded([&] { of(model).collect(); });
}

int antiphon_multiply(antiphon_Model* model, int64_t layer, const char* name, int64_t expert, const void* x,
                      int64_t x_stride, int64_t rows, float* y, int64_t y_stride) {
  return guarded([&] { of(model).multiply(layer, name, expert, x, x_stride, rows, y, y_stride); });
}

void antiphon_copy_block(void* const* pieces, int64_t count, int64_t piece_bytes, void* whole, int to_pieces,
                         uint64_t* sums) {
  if (to_pieces)
    antiphon::copy_block<true>((char* const*)pieces, count, piece_bytes, (char*)whole, sums);
  else
    antiphon::copy_block<false>((char* const*)pieces, count, piece_bytes, (char*)whole, sums);
}

}  // extern "C"
