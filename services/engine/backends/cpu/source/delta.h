// The delta rules: linear attention over a state [key_dim][value_dim] for each value head.
// models/recurrent_kinds.py has the formulas (GatedDelta, ChannelDelta) and the layout of states.
//
// A token's row has queries and keys of `key_heads` heads, values of `value_heads` heads and gates of the values; its
// row of gates has b and a of each value head. With a decay for each channel, a dimension of keys, its row of gates has
// two narrow vectors, of which products make the numbers a and the gates, and then b of each head. A slot has the last
// inputs of the convolution, then the states.
#pragma once

#include "mlp.h"
#include "recurrent.h"

namespace antiphon {

struct DeltaShape {
  long key_heads, value_heads, key_dim, value_dim, taps;
  float eps;
  long rank = 0;  // width of the narrow vectors; 0: decays are those of heads

  long keys() const { return key_heads * key_dim; }
  long values() const { return value_heads * value_dim; }
  long channels() const { return 2 * keys() + values(); }
  StatePlaces places() const {
    StatePlaces found{0, taps * channels(), key_dim, value_dim};
    found.size = found.first + value_heads * found.tiles() * found.tile_size();
    return found;
  }
};

// What the products make of the narrow vectors of each token.
template <class T>
struct DeltaBuffers {
  RowBuffer<TermOf<T>> narrow;      // both vectors, each padded as the input of a product
  RowBuffer<float> decays, gates;  // [heads][key_dim] factors on the rows of states; [heads][value_dim]

  static long padded(const DeltaShape& shape) { return round_up(shape.rank, kTermsMultiple); }

  void prepare(const DeltaShape& shape, long tokens) {
    if (!shape.rank) return;
    narrow.rows(tokens, 2 * padded(shape));
    decays.rows(tokens, shape.keys()), gates.rows(tokens, shape.values());
  }
};

template <class T>
class Delta {
 public:
  Delta(Pool& pool, const DeltaShape& shape, DeltaBuffers<T>& buffers, float* kept)
      : pool_(pool), s_(shape), places_(shape.places()), b_(buffers), kept_(kept) {}

  // Overwrites `in`. Writes to `to` the inputs of the layer's last matrix.
  void run(const Layer<T>& layer, const StateMoves& moves, Rows<float> in, Rows<float> gates, long tokens,
           Inputs<T> to) const {
    if (s_.rank) make_gates(layer, gates, tokens);
    const long units = 2 * s_.key_heads + s_.value_heads;
    pool_.share(moves.num_sequences * units, 1, [&](long item, long end) {
      for (; item < end; item++) convolve(layer, moves, item / units, item % units, in);
    });
    const long tiles = s_.value_heads * places_.tiles();
    pool_.share(moves.num_sequences * tiles, 1, [&](long item, long end) {
      for (; item < end; item++) attend(layer, moves, item / tiles, item % tiles, in, gates);
    });
    pool_.share(tokens, 1, [&](long t, long end) {
      for (; t < end; t++)
        for (long head = 0; head < s_.value_heads; head++) {
          const float* row = in.row(t);
          finish(layer, head, row, s_.rank ? b_.gates.get().row(t) : row + s_.channels(), to.row(t));
        }
    });
  }

 private:
  // Makes the decays and gates of channels of the narrow vectors.
  void make_gates(const Layer<T>& layer, Rows<float> gates, long tokens) const {
    const Inputs<T> narrow = b_.narrow.get();
    const long second = DeltaBuffers<T>::padded(s_);
    const Rows<float> decays = b_.decays.get();
    pool_.share(tokens, 1, [&](long t, long end) {
      for (; t < end; t++) {
        copy_floats(gates.row(t), narrow.row(t), s_.rank);
        copy_floats(gates.row(t) + s_.rank, narrow.row(t) + second, s_.rank);
      }
    });
    linear(pool_, layer.mix_decay.matrix, narrow, tokens, kept_, Target{decays, false});
    linear(pool_, layer.mix_out_gate.matrix, Inputs<T>{narrow.data + second, narrow.stride}, tokens, kept_,
           Target{b_.gates.get(), false});
    pool_.share(tokens, 1, [&](long t, long end) {
      for (; t < end; t++)
        for (long head = 0; head < s_.key_heads; head++)
          make_decays(layer.decay[head], layer.decay_bias.data() + head * s_.key_dim,
                      decays.row(t) + head * s_.key_dim);
    });
  }

  // Replaces the numbers of a head by the factors that they are made into.
  void make_decays(float speed, const float* bias, float* numbers) const {
    for (long i = 0; i < s_.key_dim; i += kLanes) {
      const long some = std::min(kLanes, s_.key_dim - i);
      const Vec steps = softplus(load_some(numbers + i, some) + load_some(bias + i, some));
      store_some(numbers + i, exp(steps * speed), some);
    }
  }

  // Replaces one head of queries, keys or values by its convolution and silu. Queries and keys then get length one.
  void convolve(const Layer<T>& layer, const StateMoves& moves, long sequence, long unit, Rows<float> in) const {
    const bool is_value = unit >= 2 * s_.key_heads;
    const long count = is_value ? s_.value_dim : s_.key_dim;
    const long first = is_value ? 2 * s_.keys() + (unit - 2 * s_.key_heads) * count : unit * count;
    const float scale = unit < s_.key_heads ? 1.0f / std::sqrt((float)s_.key_dim) : 1.0f;
    alignas(64) float sums[kStateDim];
    Window window(s_.taps, s_.channels(), places_.size, first, count);
    window.read(layer.states, moves.sources[sequence]);
    const auto token = [&](long t) {
      float* row = in.row(t) + first;
      window.next(layer.conv, layer.conv_bias, row, sums);
      Vec total = {};
      for (long i = 0; i < count; i += kLanes) {
        const long some = std::min(kLanes, count - i);
        const Vec x = load_some(sums + i, some), y = x * sigmoid(x);
        total += y * y;
        store_some(row + i, y, some);
      }
      if (is_value) return;
      const float factor = scale / std::sqrt(sum_lanes(total) + 1e-6f);
      for (long i = 0; i < count; i++) row[i] *= factor;
    };
    moves.walk(sequence, token, [&](int64_t slot) { window.write(layer.states, slot); });
  }

  // Takes a tile of the heads' states through the tokens. What the queries read replaces the values.
  void attend(const Layer<T>& layer, const StateMoves& moves, long sequence, long tile, Rows<float> in,
              Rows<float> gates) const {
    StateTile state(places_, tile);
    const long head = tile / places_.tiles(), first = tile % places_.tiles() * kStateColumns;
    const long key_head = head / (s_.value_heads / s_.key_heads);
    const auto token = [&](long t) {
      float* row = in.row(t);
      const float *query = row + key_head * s_.key_dim, *key = query + s_.keys();
      float* value = row + 2 * s_.keys() + head * s_.value_dim + first;
      const float b = gates.row(t)[2 * s_.rank + head], beta = 1.0f / (1.0f + std::exp(-b));
      StateTile::Columns values, known, read;
      state.load_columns(value, values);
      if (s_.rank) {
        const float* decays = b_.decays.get().row(t) + head * s_.key_dim;
        alignas(64) float faded[kStateDim];
        for (long i = 0; i < s_.key_dim; i++) faded[i] = decays[i] * key[i];
        state.product(faded, known);
        for (long v = 0; v < StateTile::kVecs; v++) values[v] = beta * (values[v] - known[v]);
        state.advance([&](long i) { return decays[i]; }, key, values, query, read);
      } else {
        const float speed = gates.row(t)[s_.value_heads + head] + layer.decay_bias[head];
        const float decay = std::exp(layer.decay[head] * softplus(speed));
        state.product(key, known);
        for (long v = 0; v < StateTile::kVecs; v++) values[v] = beta * (values[v] - decay * known[v]);
        state.advance([&](long) { return decay; }, key, values, query, read);
      }
      state.store_columns(value, read);
    };
    state.read(layer.states, moves.sources[sequence]);
    moves.walk(sequence, token, [&](int64_t slot) { state.write(layer.states, slot); });
  }

  // Norms what a head has read, and multiplies it by silu of its gates; those of channels by their sigmoid.
  void finish(const Layer<T>& layer, long head, const float* row, const float* gates, TermOf<T>* to) const {
    const long count = s_.value_dim, from = head * count;
    const float *read = row + 2 * s_.keys() + from, *gate = gates + from;
    const float scale = 1.0f / std::sqrt(mean_square(read, count) + s_.eps);
    for (long i = 0; i < count; i += kLanes) {
      const long some = std::min(kLanes, count - i);
      const Vec z = load_some(gate + i, some), normed = load_some(read + i, some) * scale;
      const Vec factor = s_.rank ? sigmoid(z) : z * sigmoid(z);
      store_some(to + from + i, normed * load_some(layer.mix_norm.data() + i, some) * factor, some);
    }
  }

  Pool& pool_;
  DeltaShape s_;
  StatePlaces places_;
  DeltaBuffers<T>& b_;
  float* const kept_;
};

}  // namespace antiphon
