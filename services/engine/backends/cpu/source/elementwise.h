// Operations on single rows between matrix products: norms, activations, rotation.
#pragma once

#include "weights.h"

namespace antiphon {

enum class NormKind : int64_t { rms, rms_plus_one, layer };
enum class Activation : int64_t { silu, gelu, gelu_tanh, relu, swigluoai };

// Returns the mean of the squares of `count` floats. The last vector is padded with zeros.
inline float mean_square(const float* x, long count) {
  Vec total = {};
  for (long i = 0; i < count; i += kLanes) {
    const Vec v = load_some(x + i, std::min(kLanes, count - i));
    total += v * v;
  }
  return sum_lanes(total) / (float)count;
}

inline float mean(const float* x, long count) {
  Vec total = {};
  for (long i = 0; i < count; i += kLanes) total += load_some(x + i, std::min(kLanes, count - i));
  return sum_lanes(total) / (float)count;
}

inline float variance(const float* x, long count, float middle) {
  Vec total = {};
  for (long i = 0; i < count; i += kLanes) {
    const long some = std::min(kLanes, count - i);
    const Vec v = load_some(x + i, some) - middle;
    total += select(lane_numbers() < (int32_t)some, v * v, Vec{});
  }
  return sum_lanes(total) / (float)count;
}

// Writes the norm of x to y, which may be x. The weight of a `rms_plus_one` norm already includes the one.
template <class T>
void apply_norm(const Norm& norm, NormKind kind, float eps, const float* x, T* y, long count) {
  float middle = 0, scale;
  if (kind == NormKind::layer) {
    middle = mean(x, count);
    scale = 1.0f / std::sqrt(variance(x, count, middle) + eps);
  } else {
    scale = 1.0f / std::sqrt(mean_square(x, count) + eps);
  }
  for (long i = 0; i < count; i += kLanes) {
    const long some = std::min(kLanes, count - i);
    Vec v = (load_some(x + i, some) - middle) * scale * load_some(norm.weight.data() + i, some);
    if (!norm.bias.empty()) v += load_some(norm.bias.data() + i, some);
    store_some(y + i, v, some);
  }
}

template <class T>
void copy_floats(const float* from, T* to, long count) {
  for (long i = 0; i < count; i += kLanes) {
    const long some = std::min(kLanes, count - i);
    store_some(to + i, load_some(from + i, some), some);
  }
}

// `T` is the type that the result is rounded to.
template <class T>
inline Vec activate(Activation kind, Vec x) {
  switch (kind) {
    case Activation::silu:
      return x * sigmoid<sizeof(T) == sizeof(Bf16)>(x);
    case Activation::gelu:
      return 0.5f * x * (1.0f + erf(x * 0.70710678f));
    case Activation::gelu_tanh:
      return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    case Activation::relu:
      return max(x, Vec{});
    case Activation::swigluoai:  // see `gated`
      break;
  }
  return x;
}

// Returns act(gate) up; of swigluoai gate sigmoid(1.702 gate) (up + 1) with both cut off at 7.
template <class T>
inline Vec gated(Activation kind, Vec gate, Vec up) {
  if (kind != Activation::swigluoai) return activate<T>(kind, gate) * up;
  const Vec limit = broadcast(7.0f), cut = min(gate, limit);
  return cut * sigmoid<sizeof(T) == sizeof(Bf16)>(cut * 1.702f) * (max(min(up, limit), -limit) + 1.0f);
}

// Computes the cosines and sines of one position, [pairs] each.
inline void make_angles(const Rope& rope, int64_t position, float* cosines, float* sines) {
  for (size_t i = 0; i < rope.frequencies.size(); i++) {
    const float angle = (float)position * rope.frequencies[i];
    cosines[i] = std::cos(angle) * rope.scale;
    sines[i] = std::sin(angle) * rope.scale;
  }
}

inline void rotate(const Rope& rope, const float* __restrict cosines, const float* __restrict sines, float* x) {
  const long pairs = (long)rope.frequencies.size();
  if (!rope.interleaved && pairs % kLanes == 0) {
    for (long i = 0; i < pairs; i += kLanes) {
      const Vec a = load(x + i), b = load(x + pairs + i), c = load(cosines + i), s = load(sines + i);
      store(x + i, a * c - b * s);
      store(x + pairs + i, b * c + a * s);
    }
    return;
  }
  const long next = rope.interleaved ? 2 : 1, partner = rope.interleaved ? 1 : pairs;
  for (long i = 0; i < pairs; i++) {
    float& a = x[i * next];
    float& b = x[i * next + partner];
    const float turned = a * cosines[i] - b * sines[i];
    b = b * cosines[i] + a * sines[i];
    a = turned;
  }
}

}  // namespace antiphon
