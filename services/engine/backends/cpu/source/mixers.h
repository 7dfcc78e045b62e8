// The mixer of a layer with a recurrent state, of the kind that the spec says.
#pragma once

#include "channel_space.h"
#include "delta.h"
#include "state_space.h"

namespace antiphon {

template <class T>
class Mixers {
 public:
  Mixers(const antiphon_Spec& spec, Pool& pool) : spec_(spec), pool_(pool) {}

  // Allocates everything that needs memory, before the threads start.
  void prepare(long tokens) {
    if (!spec_.conv_kernel) return;
    if (kind() == Mixer::channel_space) channel_buffers_.prepare(channel_shape(), tokens);
    if (kind() == Mixer::channel_delta) delta_buffers_.prepare(delta_shape(), tokens);
  }

  // Writes to `to` the inputs of the layer's last matrix. `in`, which is overwritten, and `gates`: what its first ones
  // give. `kept`: see `linear`.
  void run(const Layer<T>& layer, const StateMoves& moves, Rows<float> in, Rows<float> gates, long tokens, float* kept,
           Inputs<T> to) {
    switch (kind()) {
      case Mixer::convolution:
        return Convolution<T>(pool_, spec_.mixer_width, spec_.conv_kernel).run(layer, moves, in, to);
      case Mixer::delta:
      case Mixer::channel_delta:
        return Delta<T>(pool_, delta_shape(), delta_buffers_, kept).run(layer, moves, in, gates, tokens, to);
      case Mixer::state_space:
        return StateSpace<T>(pool_, space_shape()).run(layer, moves, in, tokens, to);
      case Mixer::channel_space:
        return ChannelSpace<T>(pool_, channel_shape(), channel_buffers_, kept).run(layer, moves, in, tokens, to);
    }
  }

 private:
  Mixer kind() const { return (Mixer)spec_.mixer; }
  long taps() const { return spec_.conv_kernel - 1; }

  DeltaShape delta_shape() const {
    const antiphon_Spec& s = spec_;
    return {s.mix_key_heads, s.mix_value_heads, s.mix_key_dim, s.mix_value_dim, taps(), s.mix_eps, s.mix_rank};
  }
  SpaceShape space_shape() const {
    const antiphon_Spec& s = spec_;
    return {s.mix_value_heads, s.mix_value_dim, s.mix_key_dim, s.mix_key_heads, taps(), s.mix_eps, s.step_least,
            s.step_most, (SpaceNorm)s.mix_norm_kind, s.mix_gate_scale, s.step_scale};
  }
  ChannelShape channel_shape() const {
    const antiphon_Spec& s = spec_;
    return {s.mix_value_dim, s.mix_key_dim, s.mix_key_heads, taps(), s.mix_eps, s.mix_norm_kind != 0};
  }

  const antiphon_Spec& spec_;
  Pool& pool_;
  ChannelBuffers<T> channel_buffers_;
  DeltaBuffers<T> delta_buffers_;
};

}  // namespace antiphon
