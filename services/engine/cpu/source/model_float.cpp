// The float32 decoder: a unit of compilation of its own, so that two can be compiled at once.
#include "model_of.h"

namespace antiphon {

std::unique_ptr<Model> make_float_model(const antiphon_Spec& spec) { return std::make_unique<ModelOf<float>>(spec); }

}  // namespace antiphon
