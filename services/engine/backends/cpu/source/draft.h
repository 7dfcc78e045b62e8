// The inputs of a draft layer: of each token, the normed embedding of the token after it, and the token's normed hidden
// state, which the pass before has kept: a step of the model those of all its tokens, a draft pass those of the tokens
// whose logits it computed, both behind their last norm.
#pragma once

#include "elementwise.h"
#include "pool.h"

namespace antiphon {

template <class T>
class DraftInputs {
 public:
  // Allocates memory for steps of `tokens` tokens. What was kept stays if there is enough.
  void prepare(const antiphon_Spec& spec, long tokens) {
    if (!spec.num_draft_layers) return;
    hidden_ = hidden_buffer_.rows(tokens, spec.hidden_size);
    both_ = both_buffer_.rows(tokens, 2 * spec.hidden_size);
  }

  // Keeps the norm of a hidden state as the given row.
  void keep(const antiphon_Spec& spec, const Norm& norm, const float* hidden, long row) {
    apply_norm(norm, (NormKind)spec.norm, spec.norm_eps, hidden, hidden_.row(row), spec.hidden_size);
  }

  // Makes the inputs of the layer from the tokens' embeddings.
  Inputs<T> join(Pool& pool, const antiphon_Spec& spec, const Layer<T>& layer, const antiphon_Step& step,
                 Rows<float> embedded) const {
    const long width = spec.hidden_size;
    const auto norm = [&](const Norm& norm, const float* from, TermOf<T>* to) {
      apply_norm(norm, (NormKind)spec.norm, spec.norm_eps, from, to, width);
    };
    pool.share(step.num_tokens, 1, [&](long first, long last) {
      for (long t = first; t < last; t++) {
        norm(layer.draft_embedding_norm, embedded.row(t), both_.row(t));
        norm(layer.draft_hidden_norm, hidden_.row(step.sources[t]), both_.row(t) + width);
      }
    });
    return both_;
  }

 private:
  RowBuffer<float> hidden_buffer_;
  RowBuffer<TermOf<T>> both_buffer_;
  Rows<float> hidden_;
  Inputs<T> both_;
};

}  // namespace antiphon
