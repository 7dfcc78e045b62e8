// The bfloat16 decoder, in a compilation unit of its own, so that both decoders can be compiled at the same time.
#include "model_of.h"

namespace antiphon {

std::unique_ptr<Model> make_bf16_model(const antiphon_Spec& spec) { return std::make_unique<ModelOf<Bf16>>(spec); }

}  // namespace antiphon
