// A state space with one decay for each head (Mamba 2): a state [state][dim] for each head. models/recurrent_kinds.py
// has the formula (StateSpace) and the layout of states.
//
// A token's row has gates z and values x of all heads, B and C of each group of heads, and a number of each head. A
// slot has the last inputs of the convolution, then the states.
#pragma once

#include "recurrent.h"

namespace antiphon {

// Where a state space has its norm: of the products with the gates, before them, or nowhere.
enum class SpaceNorm : int64_t { gated, before_gates, none };

struct SpaceShape {
  long heads, dim, state, groups, taps;
  float eps, least, most;
  SpaceNorm norm = SpaceNorm::gated;
  float gate_scale = 1, step_scale = 1;

  long width() const { return heads * dim; }
  long shared() const { return groups * state; }
  long channels() const { return width() + 2 * shared(); }
  StatePlaces places() const {
    StatePlaces found{0, taps * channels(), state, dim};
    found.size = found.first + heads * found.tiles() * found.tile_size();
    return found;
  }
};

template <class T>
class StateSpace {
 public:
  StateSpace(Pool& pool, const SpaceShape& shape) : pool_(pool), s_(shape), places_(shape.places()) {}

  // Overwrites `in`. Writes to `to` the inputs of the layer's last matrix.
  void run(const Layer<T>& layer, const StateMoves& moves, Rows<float> in, long tokens, Inputs<T> to) const {
    const long parts = (s_.channels() + kPart - 1) / kPart;
    pool_.share(moves.num_sequences * parts, 1, [&](long item, long end) {
      for (; item < end; item++) convolve(layer, moves, item / parts, item % parts * kPart, in);
    });
    const long tiles = s_.heads * places_.tiles();
    pool_.share(moves.num_sequences * tiles, 1, [&](long item, long end) {
      for (; item < end; item++) attend(layer, moves, item / tiles, item % tiles, in);
    });
    pool_.share(tokens * s_.groups, 1, [&](long item, long end) {
      for (; item < end; item++) {
        const long t = item / s_.groups;
        finish(layer, item % s_.groups, in.row(t), to.row(t));
      }
    });
  }

 private:
  // Channels of the convolution that a thread takes at a time.
  static constexpr long kPart = kChannels / 2;

  // Replaces some channels of x, B and C, from `first` on, by their convolution and silu.
  void convolve(const Layer<T>& layer, const StateMoves& moves, long sequence, long first, Rows<float> in) const {
    const long count = std::min(kPart, s_.channels() - first);
    alignas(64) float sums[kPart];
    Window window(s_.taps, s_.channels(), places_.size, first, count);
    window.read(layer.states, moves.sources[sequence]);
    const auto token = [&](long t) {
      float* row = in.row(t) + s_.width() + first;
      window.next(layer.conv, layer.conv_bias, row, sums);
      for (long i = 0; i < count; i += kLanes) {
        const long some = std::min(kLanes, count - i);
        const Vec x = load_some(sums + i, some);
        store_some(row + i, x * sigmoid(x), some);
      }
    };
    moves.walk(sequence, token, [&](int64_t slot) { window.write(layer.states, slot); });
  }

  // Takes a tile of the heads' states through the tokens. What C reads of it, and D x, replace the values x.
  void attend(const Layer<T>& layer, const StateMoves& moves, long sequence, long tile, Rows<float> in) const {
    StateTile state(places_, tile);
    const long head = tile / places_.tiles(), first = tile % places_.tiles() * kStateColumns;
    const long group = head / (s_.heads / s_.groups);
    const float speed = layer.decay[head], bias = layer.decay_bias[head], skip = layer.skip[head];
    const auto token = [&](long t) {
      float *row = in.row(t), *value = row + s_.width() + head * s_.dim + first;
      const float *inner = row + 2 * s_.width() + group * s_.state, *outer = inner + s_.shared();
      const float time = row[s_.width() + s_.channels() + head] * s_.step_scale + bias;
      const float kept = std::min(std::max(softplus(time), s_.least), s_.most);
      StateTile::Columns x, added, read;
      state.load_columns(value, x);
      for (long v = 0; v < StateTile::kVecs; v++) added[v] = kept * x[v];
      const float decay = std::exp(speed * kept);
      state.advance([&](long) { return decay; }, inner, added, outer, read);
      for (long v = 0; v < StateTile::kVecs; v++) read[v] += skip * x[v];
      state.store_columns(value, read);
    };
    state.read(layer.states, moves.sources[sequence]);
    moves.walk(sequence, token, [&](int64_t slot) { state.write(layer.states, slot); });
  }

  // Multiplies what the heads of a group have read by silu of their gates, and norms them together.
  void finish(const Layer<T>& layer, long group, float* row, TermOf<T>* to) const {
    const long count = s_.width() / s_.groups, from = group * count;
    float* read = row + s_.width() + from;
    float scale = 1;
    if (s_.norm == SpaceNorm::before_gates) scale = 1.0f / std::sqrt(mean_square(read, count) + s_.eps);
    for (long i = 0; i < count; i += kLanes) {
      const long some = std::min(kLanes, count - i);
      const Vec z = load_some(row + from + i, some) * s_.gate_scale;
      store_some(read + i, load_some(read + i, some) * (z * sigmoid(z)), some);
    }
    if (s_.norm == SpaceNorm::gated) scale = 1.0f / std::sqrt(mean_square(read, count) + s_.eps);
    for (long i = 0; i < count; i += kLanes) {
      const long some = std::min(kLanes, count - i);
      const Vec normed = load_some(read + i, some) * scale;
      store_some(to + from + i, normed * load_some(layer.mix_norm.data() + from + i, some), some);
    }
  }

  Pool& pool_;
  SpaceShape s_;
  StatePlaces places_;
};

}  // namespace antiphon
