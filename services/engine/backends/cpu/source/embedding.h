// What the layers of a step start from: the hidden states of its tokens, and what follows from their positions, that is
// the angles of rotary embeddings and the factors on queries.
#pragma once

#include "elementwise.h"

namespace antiphon {

template <class T>
struct Embedding {
  const antiphon_Spec& spec;
  const Weights<T>& weights;
  const antiphon_Step& step;

  // Writes the hidden state of token `t` with this id. An embedding of its own takes the place of the id's, unscaled.
  void put(long t, int64_t id, float* to) const {
    const long width = spec.hidden_size;
    const T* own = step.embeddings ? reinterpret_cast<const T*>(step.embeddings[t]) : nullptr;
    const T* row = own ? own : weights.embedding ? weights.embedding + id * width : nullptr;
    const T* place = weights.positions
                         ? weights.positions + (step.positions[t] + spec.learned_position_offset) * width
                         : nullptr;
    if (!row) weights.head.unpack(id, to);
    const float scale = own ? 1.0f : spec.embedding_scale;
    for (long i = 0; i < width; i++)
      to[i] = (row ? to_float(row[i]) : to[i]) * scale + (place ? to_float(place[i]) : 0.0f);
  }

  // Writes the cosines and sines of all rotary embeddings, one after the other.
  void angles(long t, float* to) const {
    for (const Rope& rope : weights.ropes) {
      const size_t pairs = rope.frequencies.size();
      for (size_t i = 0; i < pairs; i++) {
        const bool spatial = step.spatial && !rope.axes.empty();
        const int64_t position = spatial ? step.spatial[rope.axes[i] * step.num_tokens + t] : step.positions[t];
        const float angle = (float)position * rope.frequencies[i];
        to[i] = std::cos(angle) * rope.scale;
        to[pairs + i] = std::sin(angle) * rope.scale;
      }
      to += 2 * pairs;
    }
  }

  float growth(long t) const {
    return 1.0f + spec.query_growth_rate * std::log(1.0f + (float)((step.positions[t] + spec.query_growth_first) /
                                                              spec.query_growth_length));
  }
};

}  // namespace antiphon
