// A model behind the C interface, for any type of numbers. Implemented by ModelOf<T> in model_of.h.
#pragma once

#include <memory>

#include "abi.h"

namespace antiphon {

class Model {
 public:
  virtual ~Model() = default;
  virtual void set_matrix(int64_t layer, const char* name, int64_t expert, const void* weight, int64_t out, int64_t in,
                          const float* bias) = 0;
  virtual void set_packed(int64_t layer, const char* name, int64_t expert, const void* packed,
                          int64_t quantized_bytes, int64_t out, int64_t in, const float* bias) = 0;
  virtual const void* packed(int64_t layer, const char* name, int64_t expert, int64_t& bytes) = 0;
  virtual void set_quantized(int64_t layer, const char* name, int64_t expert, const antiphon_Quantized& weight,
                             int64_t out, int64_t in, const float* bias) = 0;
  virtual void set_lora(int64_t slot, int64_t layer, const char* name, const antiphon_Lora& delta) = 0;
  virtual void set_vector(int64_t layer, const char* name, const float* values, int64_t count) = 0;
  virtual void set_table(int64_t layer, const char* name, const void* table) = 0;
  virtual void set_heads(int64_t layer, int64_t kv_heads, int64_t head_dim, int64_t stride, bool borrows) = 0;
  virtual void set_window(int64_t layer, int64_t window, int64_t group) = 0;
  virtual void set_rope(int64_t layer, const float* frequencies, const int64_t* axes, int64_t pairs, bool interleaved,
                        float scale) = 0;
  virtual int64_t block_bytes() const = 0;
  virtual int64_t weight_bytes() const = 0;
  virtual int64_t prompt_tokens() const = 0;
  virtual int64_t reserve(int64_t tokens, int64_t logits) = 0;
  virtual void launch(const antiphon_Step& step) = 0;
  virtual void collect() = 0;
  virtual void multiply(int64_t layer, const char* name, int64_t expert, const void* x, int64_t x_stride, int64_t rows,
                        float* y, int64_t y_stride) = 0;
};

std::unique_ptr<Model> make_bf16_model(const antiphon_Spec& spec);
std::unique_ptr<Model> make_float_model(const antiphon_Spec& spec);

}  // namespace antiphon
