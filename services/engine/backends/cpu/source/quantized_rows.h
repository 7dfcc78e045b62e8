// Products with rows in 8 bits: each row is scaled so that its largest absolute value becomes 127 and rounded to whole
// numbers, which are then multiplied with the whole numbers of the columns. A kernel as in quantized_weights.h.
#pragma once

#include "pool.h"
#include "quantized_bytes.h"
#include "quantized_round.h"
#include "quantized_unpack.h"

namespace antiphon {

template <class T>
class Int8DynamicKernel {
 public:
  typedef ByteProduct Product;
  static constexpr long kSize = 1;
  static constexpr long kFew = 0;  // its numbers need no unpacking
  static long prepared_floats(long rows, const Quantized& w) { return round_up(rows, kLanes) + rows * stride(w) / 4; }

  Int8DynamicKernel(const Quantized& w, Inputs<T> x, float* prepared) : w_(&w), x_(x), prepared_(prepared) {}
  // Returns a kernel of the same rows and another matrix.
  Int8DynamicKernel of(const Quantized& w) const {
    Int8DynamicKernel other = *this;
    other.w_ = &w;
    return other;
  }

  // Stores the rows' scales, and after them the rows' bytes, in `prepared`.
  void prepare(Pool& pool, long rows) {
    rows_ = rows;
    pool.share(rows, std::max(1L, rows / (4 * pool.threads())), [&](long first, long last) {
      for (long r = first; r < last; r++) prepared_[r] = round_row(x_.row(r), row(r));
    });
  }

  void add(Product& product, const Part& part, float* sums) const {
    int32_t* const totals = reinterpret_cast<int32_t*>(sums);
    if (!part.k) std::memset(totals, 0, part.rows * kPanel * sizeof *totals);
    const long blocks = (part.rows + kBlockRows - 1) / kBlockRows, end = part.k + part.terms;
    for (long k = part.k; k < end; k += kPiece) {
      const long count = std::min(kPiece, end - k), bytes = count * kPanel;
      const uint8_t* panel = w_->panel(part.p, k);
      Ahead ahead(panel + (blocks == 1 ? kPrefetchBytes : bytes), bytes, kStepBytes / 64 / blocks + 1);
      for (long r = 0; r < part.rows; r += kBlockRows)
        product.multiply(std::min(kBlockRows, part.rows - r), row(part.first + r) + k, stride(*w_), panel, count,
                         totals + r * kPanel, ahead);
    }
  }

  void complete(long row, long p, float* sums) const {
    for (long half = 0; half < kPanel; half += kLanes) {
      const IntVec whole = load_any<IntVec>(sums + half) - load_any<IntVec>(w_->total(p) + half) * ByteProduct::kMore;
      store(sums + half, convert<Vec>(whole) * (load(w_->scale(p, 0) + half) * prepared_[row]));
    }
  }

 private:
  // kPiece: terms of a panel that stay in the L1 cache while rows are multiplied with them; kStepBytes: bytes of a
  // panel that a step of the product reads.
  static constexpr long kPiece = 512;
  static constexpr long kStepBytes = kByteTermsMultiple * kPanel;

  static long stride(const Quantized& w) { return w.terms + kByteTermsMultiple; }
  uint8_t* row(long row) const {
    return reinterpret_cast<uint8_t*>(prepared_ + round_up(rows_, kLanes)) + row * stride(*w_);
  }

  // Rounds a row to bytes and returns its scale; see `round_terms`.
  float round_row(const TermOf<T>* x, uint8_t* to) const {
    std::memset(to + w_->row_terms, ByteProduct::kMore, w_->terms - w_->row_terms);
    return round_terms<ByteProduct::kMore>(x, w_->row_terms, to).scale;
  }

  const Quantized* w_;
  Inputs<T> x_;
  float* prepared_;
  long rows_ = 0;
};

}  // namespace antiphon
