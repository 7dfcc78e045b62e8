// The activations of rows that are multiplied by matrices together: all tokens of a step, or at the end of a step only
// the tokens after which one is sampled.
#pragma once

#include <algorithm>

#include "abi.h"
#include "memory.h"

namespace antiphon {

// Returns where a row that has what a layer attends to has what its mixer with a recurrent state computes.
inline long mixed_place(const antiphon_Spec& spec) {
  return spec.attends_beside ? round_up(spec.num_heads * spec.head_dim, kTermsMultiple) : 0;
}

// Returns the width of what a row attends to: the values of all heads, or their latents, padded as in the cache; or of
// what a layer with a recurrent state computes, if that is wider, or behind it.
inline long attended_size(const antiphon_Spec& spec) {
  const long values = spec.latent_rank ? round_up(spec.latent_rank, kTermsMultiple) : spec.head_dim;
  return std::max(spec.num_heads * values, mixed_place(spec) + (long)spec.mixer_width);
}

// Returns the numbers from one residual stream of a row to the next.
inline long stream_width(const antiphon_Spec& spec) { return round_up(spec.hidden_size, kPanel); }

template <class T>
struct Batch {
  long count = 0;
  Rows<float> hidden, branch;
  Inputs<T> normed, other, attended, inner;
  Rows<float> streams;  // [rows][streams * stream_width], see streams.h; null: there is one stream, `hidden`
};

template <class T>
class BatchBuffers {
 public:
  Batch<T> rows(const antiphon_Spec& spec, long count) {
    const long hidden = spec.hidden_size;
    return {count,
            hidden_.rows(count, hidden),
            branch_.rows(count, hidden),
            normed_.rows(count, hidden),
            other_.rows(count, hidden),
            attended_.rows(count, attended_size(spec)),
            inner_.rows(count, spec.intermediate_size),
            spec.num_streams ? streams_.rows(count, spec.num_streams * stream_width(spec)) : Rows<float>{}};
  }

 private:
  RowBuffer<float> hidden_, branch_, streams_;
  RowBuffer<TermOf<T>> normed_, other_, attended_, inner_;
};

// Copies the activations that the end of a layer needs of a row: the hidden state, the attended values, the normed
// inputs and the streams.
template <class T>
void copy_row(const antiphon_Spec& spec, const Batch<T>& from, long row, const Batch<T>& to, long as) {
  std::memcpy(to.hidden.row(as), from.hidden.row(row), spec.hidden_size * sizeof(float));
  std::memcpy(to.attended.row(as), from.attended.row(row), attended_size(spec) * sizeof(TermOf<T>));
  std::memcpy(to.normed.row(as), from.normed.row(row), spec.hidden_size * sizeof(TermOf<T>));
  std::memcpy(to.other.row(as), from.other.row(row), spec.hidden_size * sizeof(TermOf<T>));
  if (spec.num_streams)
    std::memcpy(to.streams.row(as), from.streams.row(row), spec.num_streams * stream_width(spec) * sizeof(float));
}

}  // namespace antiphon
