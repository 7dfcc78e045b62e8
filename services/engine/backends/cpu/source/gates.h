// Gates on what attention gives: a token's values times a function of gates, one for each value or for each head.
#pragma once

#include "elementwise.h"

namespace antiphon {

enum class GateKind : int64_t { sigmoid, softplus };

inline Vec gate_factors(GateKind kind, const float* gates, long some) {
  if (kind == GateKind::sigmoid) return sigmoid(load_some(gates, some));
  alignas(64) float values[kLanes] = {};
  for (long j = 0; j < some; j++) values[j] = softplus(gates[j]);
  return load(values);
}

// Multiplies `count` numbers; `factors(i, some)` returns those of some numbers from i on.
template <class S, class Factors>
void multiply_by(S* x, long count, Factors&& factors) {
  for (long i = 0; i < count; i += kLanes) {
    const long some = std::min(kLanes, count - i);
    alignas(64) float values[kLanes] = {};
    for (long j = 0; j < some; j++) values[j] = to_float(x[i + j]);
    store_some(x + i, load(values) * factors(i, some), some);
  }
}

// Multiplies the values of a token, `each` of them for each of its gates.
template <class S>
void apply_gates(GateKind kind, const float* gates, long count, long each, S* values) {
  if (each == 1)
    return multiply_by(values, count, [&](long i, long some) { return gate_factors(kind, gates + i, some); });
  for (long g = 0; g < count; g++) {
    const Vec factor = broadcast(gate_factors(kind, gates + g, 1)[0]);
    multiply_by(values + g * each, each, [&](long, long) { return factor; });
  }
}

}  // namespace antiphon
