// Layers with a recurrent state: which slots a step reads and writes, the convolution that all of them have, and the
// gated short convolution. delta.h has the delta rules, state_space.h and channel_space.h the state spaces.
//
// A thread takes some channels of one sequence through all of the step's tokens, one token after the other, so that the
// result does not depend on how a sequence's tokens are divided among steps.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "elementwise.h"
#include "pool.h"
#include "weights.h"

namespace antiphon {

// The most channels that a thread takes at a time, and the most inputs before a token that a convolution may read.
constexpr long kChannels = 256, kTapsMax = 15;

// Columns of a head's state that a thread takes through the tokens, which then stay in its fastest cache, and the most
// rows of a state.
constexpr long kStateColumns = 32, kStateDim = kChannels;

enum class Mixer : int64_t { convolution, delta, state_space, channel_space, channel_delta };

// The slots of states that the sequences of a step read and write (kernels/recurrent/moves.py).
struct StateMoves {
  const int64_t *first_tokens, *sources, *starts, *ends, *slots;
  long num_sequences;

  // Calls `token(t)` for each token of a sequence, and after it `save(slot)` for each slot that then is written.
  template <class Token, class Save>
  void walk(long sequence, Token&& token, Save&& save) const {
    long write = starts[sequence];
    for (long t = first_tokens[sequence]; t < first_tokens[sequence + 1]; t++) {
      token(t);
      for (; write < starts[sequence + 1] && ends[write] == t + 1; write++) save(slots[write]);
    }
  }
};

// The last inputs of `count` channels of a convolution, from `first` of `channels` on. In a slot, whose size is `size`,
// they are [taps][channels], the oldest first.
class Window {
 public:
  Window(long taps, long channels, long size, long first, long count)
      : taps_(taps), channels_(channels), size_(size), first_(first), count_(count) {}

  void read(const float* states, int64_t slot) {
    for (long k = 0; k < taps_; k++)
      if (slot < 0)
        std::fill(past_[k], past_[k] + count_, 0.0f);
      else
        std::memcpy(past_[k], states + slot * size_ + k * channels_ + first_, count_ * sizeof(float));
    oldest_ = 0;
  }

  void write(float* states, int64_t slot) const {
    for (long k = 0; k < taps_; k++)
      std::memcpy(states + slot * size_ + k * channels_ + first_, past_[(oldest_ + k) % taps_], count_ * sizeof(float));
  }

  // Computes the convolution up to the next inputs, which `past` then has. kernel [taps + 1][channels].
  void next(const std::vector<float>& kernel, const std::vector<float>& bias, const float* inputs, float* sums) {
    for (long i = 0; i < count_; i++) sums[i] = bias.empty() ? 0.0f : bias[first_ + i];
    for (long k = 0; k < taps_; k++) add(kernel, k, past_[(oldest_ + k) % taps_], sums);
    add(kernel, taps_, inputs, sums);
    std::memcpy(past_[oldest_], inputs, count_ * sizeof(float));
    oldest_ = (oldest_ + 1) % taps_;
  }

 private:
  void add(const std::vector<float>& kernel, long k, const float* values, float* sums) const {
    const float* weights = kernel.data() + k * channels_ + first_;
    for (long i = 0; i < count_; i++) sums[i] += weights[i] * values[i];
  }

  long taps_, channels_, size_, first_, count_, oldest_ = 0;
  alignas(64) float past_[kTapsMax][kChannels];
};

// Where the states of the heads are in a slot, whose size is `size`: from `first` on, the columns of each head in tiles,
// and of each tile the rows one after the other.
struct StatePlaces {
  long size, first, rows, columns;

  long tiles() const { return (columns + kStateColumns - 1) / kStateColumns; }
  long tile_size() const { return rows * kStateColumns; }
};

// Some columns of a head's state, which stay in a core's fastest cache while it takes them through the tokens. Sums
// over the rows are made of kSums parts, as many as have registers, so that additions need not wait for each other.
class StateTile {
 public:
  static constexpr long kVecs = kStateColumns / kLanes;
  typedef Vec Columns[kVecs];

  StateTile(const StatePlaces& places, long tile)
      : rows_(places.rows), size_(places.size), place_(places.first + tile * places.tile_size()),
        count_(std::min(kStateColumns, places.columns - tile % places.tiles() * kStateColumns)) {}

  void read(const float* states, int64_t slot) {
    if (slot < 0)
      std::fill(state_[0], state_[0] + rows_ * kStateColumns, 0.0f);
    else
      std::memcpy(state_[0], states + slot * size_ + place_, rows_ * kStateColumns * sizeof(float));
  }

  void write(float* states, int64_t slot) const {
    std::memcpy(states + slot * size_ + place_, state_[0], rows_ * kStateColumns * sizeof(float));
  }

  // Loads and stores numbers of these columns; those of the padding are zero.
  void load_columns(const float* from, Columns& to) const {
    for (long v = 0; v < kVecs; v++) to[v] = some(v) ? load_some(from + v * kLanes, some(v)) : Vec{};
  }
  template <class Number>
  void store_columns(Number* to, const Columns& from) const {
    for (long v = 0; v < kVecs; v++)
      if (some(v)) store_some(to + v * kLanes, from[v], some(v));
  }

  // Computes stateᵀ x.
  void product(const float* x, Columns& total) const {
    Vec sums[kSums][kVecs] = {};
    each_row([&](long i, long part) {
      for (long v = 0; v < kVecs; v++) sums[part][v] += x[i] * load(state_[i] + v * kLanes);
    });
    add_up(sums, total);
  }

  // Makes the state decay · state + x addedᵀ, and computes stateᵀ y. `decay(i)`: that of a row.
  template <class Decay>
  void advance(Decay&& decay, const float* x, const Columns& added, const float* y, Columns& total) {
    Vec sums[kSums][kVecs] = {};
    each_row([&](long i, long part) {
      for (long v = 0; v < kVecs; v++) {
        const Vec next = decay(i) * load(state_[i] + v * kLanes) + x[i] * added[v];
        store(state_[i] + v * kLanes, next);
        sums[part][v] += y[i] * next;
      }
    });
    add_up(sums, total);
  }

  // As `advance`, where each number of the state has its decay, exp(time of the column · speed). The rows of speeds are
  // `stride` floats apart.
  void advance_by(const Columns& times, const float* speeds, long stride, const float* x, const Columns& added,
                  const float* y, Columns& total) {
    Vec sums[kSums][kVecs] = {};
    each_row([&](long i, long part) {
      Columns speed;
      load_columns(speeds + i * stride, speed);
      for (long v = 0; v < kVecs; v++) {
        const Vec next = exp(times[v] * speed[v]) * load(state_[i] + v * kLanes) + x[i] * added[v];
        store(state_[i] + v * kLanes, next);
        sums[part][v] += y[i] * next;
      }
    });
    add_up(sums, total);
  }

 private:
  static constexpr long kSums = kRegisterLanes == kLanes ? 4 : 2;

  long some(long v) const { return std::max(0L, std::min(kLanes, count_ - v * kLanes)); }

  template <class Row>
  void each_row(Row&& row) const {
    const long whole = rows_ / kSums * kSums;
    for (long i = 0; i < whole; i += kSums)
      for (long part = 0; part < kSums; part++) row(i + part, part);
    for (long i = whole; i < rows_; i++) row(i, 0);
  }

  static void add_up(const Vec (&sums)[kSums][kVecs], Columns& total) {
    for (long v = 0; v < kVecs; v++) {
      total[v] = sums[0][v];
      for (long part = 1; part < kSums; part++) total[v] += sums[part][v];
    }
  }

  long rows_, size_, place_, count_;
  alignas(64) float state_[kStateDim][kStateColumns];
};

// The output of a token's `mix_in` has three parts of `channels` numbers: B, C and x. Writes to `to` C times the
// convolution of B x. A slot has the last `taps` products.
template <class T>
class Convolution {
 public:
  Convolution(Pool& pool, long channels, long kernel) : pool_(pool), channels_(channels), taps_(kernel - 1) {}

  void run(const Layer<T>& layer, const StateMoves& moves, Rows<float> in, Inputs<T> to) const {
    constexpr long kPart = kChannels / 2;
    const long parts = (channels_ + kPart - 1) / kPart;
    pool_.share(moves.num_sequences * parts, 1, [&](long item, long end) {
      for (; item < end; item++) {
        const long first = item % parts * kPart;
        one(layer, moves, item / parts, first, std::min(kPart, channels_ - first), in, to);
      }
    });
  }

 private:
  void one(const Layer<T>& layer, const StateMoves& moves, long sequence, long first, long count, Rows<float> in,
           Inputs<T> to) const {
    alignas(64) float products[kChannels], sums[kChannels];
    Window window(taps_, channels_, taps_ * channels_, first, count);
    window.read(layer.states, moves.sources[sequence]);
    const auto token = [&](long t) {
      const float *b = in.row(t) + first, *c = b + channels_, *x = c + channels_;
      for (long i = 0; i < count; i++) products[i] = b[i] * x[i];
      window.next(layer.conv, layer.conv_bias, products, sums);
      for (long i = 0; i < count; i++) sums[i] *= c[i];
      copy_floats(sums, to.row(t) + first, count);
    };
    moves.walk(sequence, token, [&](int64_t slot) { window.write(layer.states, slot); });
  }

  Pool& pool_;
  long channels_, taps_;
};

}  // namespace antiphon
