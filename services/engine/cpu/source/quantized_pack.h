// Packs weights of 8 or 4 bits from the checkpoint's layout [out][in] into panels. Called by weights.h.
#pragma once

#include <stdexcept>
#include <vector>

#include "abi.h"
#include "memory.h"
#include "quantized.h"

namespace antiphon {

// Owns packed weights; `quantized` points into them.
class PackedQuantized {
 public:
  Quantized quantized;

  // `rows` has the checkpoint's row of each column of the panels, -1 for padding.
  PackedQuantized(Pool& pool, const antiphon_Quantized& from, const std::vector<long>& rows, long in)
      : from_(from), rows_(rows), in_(in), panels_((long)rows.size() / kPanel) {
    shape();
    data_ = Memory((size_t)quantized.bytes(panels_ * quantized.terms));
    scales_ = floats(quantized.groups);
    if (has_zeros()) offsets_ = floats(quantized.groups);
    if (quantized.kind == Kind::int8_dynamic) totals_ = floats(1);
    pool.run([&](int) {
      pool.share(panels_, 1, [&](long first, long last) {
        for (long p = first; p < last; p++) pack_panel(p);
      });
    });
    quantized.data = data_.as<uint8_t>();
    quantized.scales = scales_.as<float>();
    quantized.offsets = offsets_.as<float>();
    quantized.totals = totals_.as<int32_t>();
  }

  size_t bytes() const { return data_.bytes() + scales_.bytes() + offsets_.bytes() + totals_.bytes(); }
  bool same_shape(const PackedQuantized& other) const {
    return quantized.kind == other.quantized.kind && quantized.group == other.quantized.group &&
           !quantized.offsets == !other.quantized.offsets;
  }

 private:
  void shape() {
    Quantized& q = quantized;
    if (from_.kind < 0 || from_.kind > (int64_t)Kind::int4) throw std::invalid_argument("no such kind of weights");
    q.kind = (Kind)from_.kind;
    q.row_terms = round_up(in_, kTermsMultiple);
    q.terms = round_up(in_, q.kind == Kind::int8_dynamic ? kByteTermsMultiple : kTermsMultiple);
    if (q.kind == Kind::int8_dynamic && from_.group)
      throw std::invalid_argument("int8_dynamic has one scale per output, no groups");
    q.group = q.terms;
    if (q.kind == Kind::int8_dynamic && q.terms > kSumTermsMax)
      throw std::invalid_argument("sums of so many products of whole numbers do not fit");
    if (q.kind == Kind::int4) shape_levels();
    if (q.kind == Kind::int4 || (q.kind == Kind::int8 && has_groups())) shape_groups();
  }

  // Determines the groups. Groups longer than kGroupMax, or one for all terms, are divided into several with the same
  // scale.
  void shape_groups() {
    Quantized& q = quantized;
    if (from_.group < in_ && (from_.group <= 0 || from_.group % kTermsMultiple))
      throw std::invalid_argument("groups must have a multiple of 32 terms");
    q.group = kGroupMax;
    while (from_.group < in_ && from_.group % q.group) q.group /= 2;
    q.groups = (q.terms + q.group - 1) / q.group;
  }

  void shape_levels() {
    Quantized& q = quantized;
    for (long i = 0; i < 2 * kLevels; i++) {
      const float level = from_.levels ? from_.levels[i % kLevels] : (float)(i % kLevels) - kMiddle;
      q.table[i] = to_bf16(level).bits;
      q.levels[i % kLevels] = level;
    }
    q.whole_levels = !from_.levels;
  }

  // Without given levels, the levels are i - 8 and already include a zero of 8, so `zero` returns the difference.
  bool has_zeros() const { return quantized.kind == Kind::int4 && from_.zeros; }
  float zero(long row, long group) const {
    return from_.zeros[row * given_groups() + group] - (from_.levels ? 0.0f : kMiddle);
  }
  // Whether an output has several scales. int8 without groups is given with a group of 0.
  bool has_groups() const { return from_.group < in_ && (quantized.kind == Kind::int4 || from_.group != 0); }
  long given_groups() const { return has_groups() ? (in_ + from_.group - 1) / from_.group : 1; }

  Memory floats(long groups) const { return Memory((size_t)(panels_ * groups * kPanel) * sizeof(float)); }

  void pack_panel(long p) {
    for (long j = 0; j < kPanel; j++) {
      const long row = rows_[p * kPanel + j];
      if (row < 0) continue;
      quantized.kind == Kind::int4 ? pack_levels(p, j, row) : pack_bytes(p, j, row);
    }
  }

  void pack_bytes(long p, long j, long row) {
    const int8_t* from = static_cast<const int8_t*>(from_.weight) + row * in_;
    uint8_t* to = data_.as<uint8_t>() + quantized.bytes(p * quantized.terms) + 4 * j;
    int32_t total = 0;
    for (long k = 0; k < in_; k++) {
      to[k / 4 * 4 * kPanel + k % 4] = (uint8_t)from[k];
      total += from[k];
    }
    pack_scales(p, j, row);
    if (quantized.kind == Kind::int8_dynamic) totals_.as<int32_t>()[p * kPanel + j] = total;
  }

  void pack_levels(long p, long j, long row) {
    uint32_t* to = data_.as<uint32_t>() + p * quantized.terms * kPanel / 8 + j;
    for (long k = 0; k < in_; k++) to[k / 8 * kPanel] |= place(row, k) << (k % 8 / 2 * 4 + k % 2 * 16);
    pack_scales(p, j, row);
  }

  void pack_scales(long p, long j, long row) {
    for (long g = 0; g < quantized.groups; g++) {
      const long given = has_groups() ? g * quantized.group / from_.group : 0;
      const long at = (p * quantized.groups + g) * kPanel + j;
      const float scale = from_.scales[row * given_groups() + given];
      scales_.as<float>()[at] = scale;
      if (has_zeros()) offsets_.as<float>()[at] = scale * zero(row, given);
    }
  }

  // Returns the index of a weight's level, 0 to 15.
  uint32_t place(long row, long k) const {
    const uint8_t* from = static_cast<const uint8_t*>(from_.weight);
    const uint32_t bits = from_.two_a_byte ? from[row * ((in_ + 1) / 2) + k / 2] >> (k % 2 * 4) : from[row * in_ + k];
    return (bits ^ (from_.has_sign ? (uint32_t)kMiddle : 0)) & 15;
  }

  static constexpr float kMiddle = 8;
  static constexpr long kSumTermsMax = 1L << 16;

  const antiphon_Quantized& from_;
  const std::vector<long>& rows_;
  const long in_, panels_;
  Memory data_, scales_, offsets_, totals_;
};

}  // namespace antiphon
