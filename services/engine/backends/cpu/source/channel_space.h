// A state space with decays for each channel (Mamba 1): a state [state] for each channel. models/recurrent_kinds.py has
// the formula (ChannelSpace) and the layout of states.
//
// A token's row has values x and gates z of all channels. Two products within the layer make B, C and the steps of the
// channels of what the convolution gives. A slot has the last inputs of the convolution, then the states.
#pragma once

#include "mlp.h"
#include "recurrent.h"

namespace antiphon {

struct ChannelShape {
  long channels, state, rank, taps;
  float eps;
  bool normed;

  long selected() const { return rank + 2 * state; }
  StatePlaces places() const {
    StatePlaces found{0, taps * channels, state, channels};
    found.size = found.first + found.tiles() * found.tile_size();
    return found;
  }
};

template <class T>
struct ChannelBuffers {
  RowBuffer<TermOf<T>> values, ranks;  // inputs of the two products
  RowBuffer<float> selected, steps;    // r, B and C of each token; what the steps of the channels are made of

  void prepare(const ChannelShape& shape, long tokens) {
    values.rows(tokens, shape.channels), ranks.rows(tokens, shape.rank);
    selected.rows(tokens, shape.selected()), steps.rows(tokens, shape.channels);
  }
};

template <class T>
class ChannelSpace {
 public:
  ChannelSpace(Pool& pool, const ChannelShape& shape, ChannelBuffers<T>& buffers, float* kept)
      : pool_(pool), s_(shape), places_(shape.places()), b_(buffers), kept_(kept) {}

  // Overwrites `in`. Writes to `to` the inputs of the layer's last matrix.
  void run(const Layer<T>& layer, const StateMoves& moves, Rows<float> in, long tokens, Inputs<T> to) {
    const long parts = (s_.channels + kPart - 1) / kPart;
    pool_.share(moves.num_sequences * parts, 1, [&](long item, long end) {
      for (; item < end; item++) convolve(layer, moves, item / parts, item % parts * kPart, in);
    });
    const Rows<float> selected = b_.selected.get(), steps = b_.steps.get();
    linear(pool_, layer.mix_select.matrix, b_.values.get(), tokens, kept_, Target{selected, false});
    pool_.share(tokens, 1, [&](long t, long end) {
      for (; t < end; t++) take_parts(layer, selected.row(t), b_.ranks.get().row(t));
    });
    linear(pool_, layer.mix_step.matrix, b_.ranks.get(), tokens, kept_, Target{steps, false});
    const long tiles = places_.tiles();
    pool_.share(moves.num_sequences * tiles, 1, [&](long item, long end) {
      for (; item < end; item++) scan(layer, moves, item / tiles, item % tiles, in, to);
    });
  }

 private:
  // Channels of the convolution that a thread takes at a time.
  static constexpr long kPart = kChannels / 2;

  // Replaces some values, from `first` on, by their convolution and silu.
  void convolve(const Layer<T>& layer, const StateMoves& moves, long sequence, long first, Rows<float> in) {
    const long count = std::min(kPart, s_.channels - first);
    alignas(64) float sums[kPart];
    Window window(s_.taps, s_.channels, places_.size, first, count);
    window.read(layer.states, moves.sources[sequence]);
    const auto token = [&](long t) {
      float* row = in.row(t) + first;
      window.next(layer.conv, layer.conv_bias, row, sums);
      for (long i = 0; i < count; i += kLanes) {
        const long some = std::min(kLanes, count - i);
        const Vec x = load_some(sums + i, some), y = x * sigmoid(x);
        store_some(row + i, y, some);
        store_some(b_.values.get().row(t) + first + i, y, some);
      }
    };
    moves.walk(sequence, token, [&](int64_t slot) { window.write(layer.states, slot); });
  }

  // Norms r, B and C of a token, if they are to be normed, and copies r for the next product.
  void take_parts(const Layer<T>& layer, float* row, TermOf<T>* ranks) const {
    long first = 0;
    for (const long count : {s_.rank, s_.state, s_.state}) {
      if (s_.normed) {
        const float scale = 1.0f / std::sqrt(mean_square(row + first, count) + s_.eps);
        for (long i = first; i < first + count; i++) row[i] *= scale * layer.mix_norm[i];
      }
      first += count;
    }
    copy_floats(row, ranks, s_.rank);
  }

  // Takes a tile of the channels' states through the tokens; multiplies what C reads, and D x, by silu of the gates.
  void scan(const Layer<T>& layer, const StateMoves& moves, long sequence, long tile, Rows<float> in, Inputs<T> to) {
    StateTile state(places_, tile);
    const long first = tile * kStateColumns;
    const float* speeds = layer.decay.data() + first;
    StateTile::Columns bias, skip;
    state.load_columns(layer.decay_bias.data() + first, bias);
    state.load_columns(layer.skip.data() + first, skip);
    const auto token = [&](long t) {
      const float *row = in.row(t) + first, *inner = b_.selected.get().row(t) + s_.rank;
      StateTile::Columns x, z, step, added, read;
      state.load_columns(row, x);
      state.load_columns(row + s_.channels, z);
      state.load_columns(b_.steps.get().row(t) + first, step);
      for (long v = 0; v < StateTile::kVecs; v++) {
        step[v] = softplus(step[v] + bias[v]);
        added[v] = step[v] * x[v];
      }
      state.advance_by(step, speeds, s_.channels, inner, added, inner + s_.state, read);
      for (long v = 0; v < StateTile::kVecs; v++) read[v] = (read[v] + skip[v] * x[v]) * (z[v] * sigmoid(z[v]));
      state.store_columns(to.row(t) + first, read);
    };
    state.read(layer.states, moves.sources[sequence]);
    moves.walk(sequence, token, [&](int64_t slot) { state.write(layer.states, slot); });
  }

  Pool& pool_;
  ChannelShape s_;
  StatePlaces places_;
  ChannelBuffers<T>& b_;
  float* const kept_;
};

}  // namespace antiphon
