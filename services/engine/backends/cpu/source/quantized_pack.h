// Packs weights of 8 or 4 bits from the checkpoint's layout [out][in] into panels. Called by weights.h.
#pragma once

#include <stdexcept>
#include <vector>

#include "abi.h"
#include "memory.h"
#include "quantized.h"

namespace antiphon {

// The beginning of a packed matrix. Data, scales, offsets, totals and order follow, each at a cache line.
struct PackedHeader {
  int64_t kind, in, panels, terms, row_terms, group, groups, has_offsets, has_order, whole_levels;
  float levels[kLevels];
};

// Packed weights in memory of the model's stock, or where the caller keeps them; `quantized` points into them.
class PackedQuantized {
 public:
  Quantized quantized;

  // `rows` has the checkpoint's row of each column of the panels, -1 for padding.
  PackedQuantized(Pool& pool, Stock& stock, const antiphon_Quantized& from, const std::vector<long>& rows, long in);

  // Uses what `packed` returned for a matrix of the same shape, which is kept elsewhere for as long as this object is
  // used.
  PackedQuantized(const void* packed, size_t bytes, long panels, long in) : in_(in), panels_(panels) {
    PackedHeader header;
    if (bytes < sizeof header) throw std::invalid_argument("a packed matrix is too short");
    std::memcpy(&header, packed, sizeof header);
    Quantized& q = quantized;
    q.panels = panels;
    q.kind = (Kind)header.kind, q.terms = header.terms, q.row_terms = header.row_terms;
    q.group = header.group, q.groups = header.groups, q.whole_levels = header.whole_levels != 0;
    std::copy_n(header.levels, kLevels, q.levels);
    fill_table();
    place(static_cast<const char*>(packed), header.has_offsets != 0, header.has_order != 0);
    if (header.in != in || header.panels != panels || bytes != bytes_)
      throw std::invalid_argument("a packed matrix has another shape");
  }

  // Returns the packed form, `bytes` long.
  const void* packed() const { return packed_; }
  size_t bytes() const { return bytes_; }
  bool same_shape(const PackedQuantized& other) const {
    return quantized.kind == other.quantized.kind && quantized.group == other.quantized.group &&
           !quantized.offsets == !other.quantized.offsets && quantized.terms == other.quantized.terms &&
           !quantized.order == !other.quantized.order;
  }

 private:
  // Sets the pointers for a packed form that begins at `base`, and its size.
  void place(const char* base, bool has_offsets, bool has_order) {
    size_t at = 0;
    const auto put = [&](size_t bytes) {
      const char* const from = base + at;
      at += (bytes + 63) / 64 * 64;
      return from;
    };
    const size_t floats = (size_t)(panels_ * kPanel) * sizeof(float), all = floats * (size_t)quantized.groups;
    packed_ = put(sizeof(PackedHeader));
    quantized.data = (const uint8_t*)put((size_t)quantized.bytes(panels_ * quantized.terms));
    quantized.scales = (const float*)put(all);
    quantized.offsets = has_offsets ? (const float*)put(all) : nullptr;
    quantized.totals = quantized.kind == Kind::int8_dynamic ? (const int32_t*)put(floats) : nullptr;
    quantized.order = has_order ? (const int32_t*)put((size_t)quantized.terms * sizeof(int32_t)) : nullptr;
    bytes_ = at;
  }

  void fill_table() {
    for (long i = 0; i < 2 * kLevels; i++) quantized.table[i] = to_bf16(quantized.levels[i % kLevels]).bits;
  }

  class Packer;

  const long in_, panels_;
  const char* packed_ = nullptr;
  size_t bytes_ = 0;
};

// Makes the packed form of a matrix.
class PackedQuantized::Packer {
 public:
  Packer(PackedQuantized& to, const antiphon_Quantized& from, const std::vector<long>& rows)
      : to_(to), quantized_(to.quantized), from_(from), rows_(rows), in_(from.order ? from.columns : to.in_) {}

  void pack(Pool& pool, Stock& stock) {
    shape();
    to_.place(nullptr, has_zeros(), has_order());
    char* const memory = static_cast<char*>(stock.take(to_.bytes_));
    to_.place(memory, has_zeros(), has_order());
    write_header(memory);
    if (has_order()) write_order();
    pool.run([&](int) {
      pool.share(to_.panels_, 1, [&](long first, long last) {
        for (long p = first; p < last; p++) pack_panel(p);
      });
    });
  }

 private:
  void write_header(char* to) const {
    const Quantized& q = quantized_;
    PackedHeader header{(int64_t)q.kind, to_.in_,     to_.panels_, q.terms,        q.row_terms, q.group,
                        q.groups,        has_zeros(), has_order(), q.whole_levels, {}};
    std::copy_n(q.levels, kLevels, header.levels);
    std::memcpy(to, &header, sizeof header);
  }

  void write_order() {
    int32_t* const to = const_cast<int32_t*>(quantized_.order);
    for (long k = 0; k < quantized_.terms; k++) {
      to[k] = k < in_ ? from_.order[k] : -1;
      if (to[k] >= to_.in_) throw std::invalid_argument("the order of a matrix's terms has inputs that are not there");
    }
  }

  void shape() {
    Quantized& q = quantized_;
    if (from_.kind < 0 || from_.kind > (int64_t)Kind::int4_dynamic) throw std::invalid_argument("no such kind of weights");
    q.kind = (Kind)from_.kind;
    q.row_terms = round_up(in_, kTermsMultiple);
    q.terms = round_up(in_, q.kind == Kind::int8_dynamic ? kByteTermsMultiple : kTermsMultiple);
    if (q.kind == Kind::int8_dynamic && from_.group)
      throw std::invalid_argument("int8_dynamic has one scale per output, no groups");
    q.group = q.terms;
    if (q.kind == Kind::int8_dynamic && q.terms > kSumTermsMax)
      throw std::invalid_argument("sums of so many products of whole numbers do not fit");
    if (has_levels(q.kind)) shape_levels();
    if (has_levels(q.kind) || (q.kind == Kind::int8 && (has_groups() || from_.zeros))) shape_groups();
  }

  // Determines the groups. Groups longer than kGroupMax, or one for all terms, are divided into several with the same
  // scale.
  void shape_groups() {
    Quantized& q = quantized_;
    const long multiple = q.kind == Kind::int8 ? kGroupMin : kTermsMultiple;
    if (from_.group < in_ && (from_.group <= 0 || from_.group % multiple))
      throw std::invalid_argument("groups must have a multiple of 32 terms, of 16 in 8 bits");
    q.group = kGroupMax;
    while (from_.group < in_ && from_.group % q.group) q.group /= 2;
    q.groups = (q.terms + q.group - 1) / q.group;
  }

  void shape_levels() {
    for (long i = 0; i < kLevels; i++) quantized_.levels[i] = from_.levels ? from_.levels[i] : (float)i - kMiddle;
    to_.fill_table();
    quantized_.whole_levels = !from_.levels;
    if (quantized_.kind == Kind::int4_dynamic)
      for (const float level : quantized_.levels)
        if (!(std::fabs(level) <= kByteMax) || level != std::rint(level))
          throw std::invalid_argument("levels of int4_dynamic must be whole numbers from -127 to 127");
  }

  // Without given levels, those of 4 bits are i - 8 and already include a zero of 8, so `zero` returns the difference.
  bool has_order() const { return from_.order != nullptr; }
  bool has_zeros() const { return quantized_.kind != Kind::int8_dynamic && from_.zeros; }
  float zero(long row, long group) const {
    const bool middle = has_levels(quantized_.kind) && !from_.levels;
    return from_.zeros[row * given_groups() + group] - (middle ? kMiddle : 0.0f);
  }
  // Whether an output has several scales. int8 without groups is given with a group of 0.
  bool has_groups() const { return from_.group < in_ && (has_levels(quantized_.kind) || from_.group != 0); }
  long given_groups() const { return has_groups() ? (in_ + from_.group - 1) / from_.group : 1; }

  void pack_panel(long p) {
    for (long j = 0; j < kPanel; j++) {
      const long row = rows_[p * kPanel + j];
      if (row < 0) continue;
      has_levels(quantized_.kind) ? pack_levels(p, j, row) : pack_bytes(p, j, row);
    }
  }

  void pack_bytes(long p, long j, long row) {
    const int8_t* from = static_cast<const int8_t*>(from_.weight) + row * in_;
    uint8_t* to = data<uint8_t>() + quantized_.bytes(p * quantized_.terms) + 4 * j;
    int32_t total = 0;
    for (long k = 0; k < in_; k++) {
      to[k / 4 * 4 * kPanel + k % 4] = (uint8_t)from[k];
      total += from[k];
    }
    pack_scales(p, j, row);
    if (quantized_.totals) const_cast<int32_t*>(quantized_.totals)[p * kPanel + j] = total;
  }

  void pack_levels(long p, long j, long row) {
    uint32_t* to = data<uint32_t>() + p * quantized_.terms * kPanel / 8 + j;
    const bool bytes = quantized_.kind == Kind::int4_dynamic;
    for (long k = 0; k < in_; k++)
      to[k / 8 * kPanel] |= place(row, k) << (bytes ? k % 4 * 8 + k % 8 / 4 * 4 : k % 8 / 2 * 4 + k % 2 * 16);
    pack_scales(p, j, row);
  }

  void pack_scales(long p, long j, long row) {
    // The terms of the last group may all be padding.
    for (long g = 0; g < quantized_.groups && g * quantized_.group < in_; g++) {
      const long given = has_groups() ? g * quantized_.group / from_.group : 0;
      const long at = (p * quantized_.groups + g) * kPanel + j;
      const float scale = from_.scales[row * given_groups() + given];
      const_cast<float*>(quantized_.scales)[at] = scale;
      if (has_zeros()) const_cast<float*>(quantized_.offsets)[at] = scale * zero(row, given);
    }
  }

  // Returns the index of a weight's level, 0 to 15.
  uint32_t place(long row, long k) const {
    const uint8_t* from = static_cast<const uint8_t*>(from_.weight);
    const uint32_t bits = from_.two_a_byte ? from[row * ((in_ + 1) / 2) + k / 2] >> (k % 2 * 4) : from[row * in_ + k];
    return (bits ^ (from_.has_sign ? (uint32_t)kMiddle : 0)) & 15;
  }

  template <class Word>
  Word* data() const {
    return (Word*)quantized_.data;
  }

  static constexpr float kMiddle = 8, kByteMax = 127;
  static constexpr long kSumTermsMax = 1L << 16;

  PackedQuantized& to_;
  Quantized& quantized_;
  const antiphon_Quantized& from_;
  const std::vector<long>& rows_;
  const long in_;  // terms of a given row
};

inline PackedQuantized::PackedQuantized(Pool& pool, Stock& stock, const antiphon_Quantized& from,
                                        const std::vector<long>& rows, long in)
    : in_(in), panels_((long)rows.size() / kPanel) {
  quantized.panels = panels_;
  Packer(*this, from, rows).pack(pool, stock);
}

}  // namespace antiphon
