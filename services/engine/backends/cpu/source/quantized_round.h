// Rounds terms of a row to whole numbers of 8 bits.
#pragma once

#include "quantized.h"

namespace antiphon {

// If the largest absolute value of the terms is below this, its reciprocal could be infinite, and they count as zeros.
constexpr float kSmallestTerms = 1e-30f;

struct Rounded {
  float scale;    // of the numbers; NaN if a term is NaN or infinite
  int32_t total;  // the sum of the numbers
};

// Scales terms so that their largest absolute value becomes 127, rounds them, and stores them with kMore added.
template <int32_t kMore, class Term>
inline Rounded round_terms(const Term* x, long terms, uint8_t* to) {
  Vec highest = {}, nothing = {};
  for (long k = 0; k < terms; k += kLanes) {
    const Vec v = load(x + k);
    highest = max(max(v, -v), highest);
    nothing += v - v;
  }
  const float size = max_lanes(highest);
  const bool finite = sum_lanes(nothing) == 0;
  if (!finite || size < kSmallestTerms) {
    std::memset(to, kMore, terms);
    return {finite ? 0.0f : std::nanf(""), 0};
  }
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const float times = 127.0f / size;
  IntVec sums = {};
  for (long k = 0; k < terms; k += kLanes) {
    const IntVec whole = convert<IntVec>((load(x + k) * times + magic) - magic);
    put_any(to + k, convert<ByteVec>(whole + kMore));
    sums += whole;
  }
  int32_t total = 0;
  for (long lane = 0; lane < kLanes; lane++) total += sums[lane];
  return {size / 127.0f, total};
}

}  // namespace antiphon
