// Operations on single rows between matrix products: norms, activations, rotation.
#pragma once

#include "abi.h"
#include "weights.h"

namespace antiphon {

enum class NormKind : int64_t { rms, rms_plus_one, layer };
enum class ActivationKind : int64_t { silu, gelu, gelu_tanh, relu, swigluoai, relu2, xielu };

// An activation. The numbers are those of xielu (see `xielu`), which each layer has its own of.
struct Activation {
  ActivationKind kind;
  float positive = 0, negative = 0, slope = 0, limit = 0;
  float gate_scale = 1, scale = 1;  // factors on gates, and on products with them
};

template <class T>
Activation activation_of(const antiphon_Spec& spec, const Layer<T>& layer) {
  const std::vector<float>& numbers = layer.xielu;
  if (numbers.empty()) return {(ActivationKind)spec.activation};
  return {(ActivationKind)spec.activation, numbers.at(0), numbers.at(1), numbers.at(2), numbers.at(3)};
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The same of 16 numbers: max(x, 0) + log(1 + u) with u = exp(-|x|), where log(1 + u) = 2 artanh(u / (2 + u)), whose
// series ends below the precision of a float for arguments up to a third.
inline Vec softplus(Vec x) {
  const Vec u = exp(select(x < 0.0f, x, -x)), r = u / (2.0f + u), square = r * r;
  Vec series = square * (1.0f / 15) + 1.0f / 13;
  series = series * square + 1.0f / 11;
  series = series * square + 1.0f / 9;
  series = series * square + 1.0f / 7;
  series = series * square + 1.0f / 5;
  series = series * square + 1.0f / 3;
  series = series * square + 1.0f;
  return max(x, Vec{}) + 2.0f * r * series;
}

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

// Returns positive x² + slope x for x > 0, else negative (exp(min(x, limit)) - 1 - x) + slope x.
inline Vec xielu(const Activation& a, Vec x) {
  const Vec m = min(x, broadcast(a.limit));
  // exp(m) - 1 - m, which is small beside its terms near 0, where its series is exact.
  Vec series = broadcast(1.0f / 720) * m + 1.0f / 120;
  series = series * m + 1.0f / 24;
  series = series * m + 1.0f / 6;
  series = (series * m + 0.5f) * m * m;
  const Vec rest = select(m < -0.25f, exp(m) - 1.0f - m, series);
  return select(x > 0.0f, a.positive * x * x, a.negative * (rest + (m - x))) + a.slope * x;
}

// `T` is the type that the result is rounded to.
template <class T>
inline Vec activate(const Activation& a, Vec x) {
  switch (a.kind) {
    case ActivationKind::silu:
      return x * sigmoid<sizeof(T) == sizeof(Bf16)>(x);
    case ActivationKind::gelu:
      return 0.5f * x * (1.0f + erf(x * 0.70710678f));
    case ActivationKind::gelu_tanh:
      return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    case ActivationKind::relu:
      return max(x, Vec{});
    case ActivationKind::relu2:
      return max(x, Vec{}) * max(x, Vec{});
    case ActivationKind::xielu:
      return xielu(a, x);
    case ActivationKind::swigluoai:  // see `gated`
      break;
  }
  return x;
}

// Returns act(gate) up; of swigluoai gate sigmoid(1.702 gate) (up + 1) with both cut off at 7.
template <class T>
inline Vec gated(const Activation& a, Vec gate, Vec up) {
  if (a.gate_scale != 1.0f || a.scale != 1.0f) return activate<T>(a, gate * a.gate_scale) * up * a.scale;
  if (a.kind != ActivationKind::swigluoai) return activate<T>(a, gate) * up;
  const Vec limit = broadcast(7.0f), cut = min(gate, limit);
  return cut * sigmoid<sizeof(T) == sizeof(Bf16)>(cut * 1.702f) * (max(min(up, limit), -limit) + 1.0f);
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
