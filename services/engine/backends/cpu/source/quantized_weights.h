// Products of weights of 8 or 4 bits with rows of the usual type: a piece of a panel is unpacked into the L1 cache and
// multiplied with all rows, like a panel that is not quantized; up to kFew rows are multiplied as in quantized_few.h. A
// kernel is created for one matrix and one set of rows; see linear.h.
#pragma once

#include "pool.h"
#include "quantized_few.h"

namespace antiphon {

constexpr long kUnpackedTerms = 256;

// Multiplies blocks of rows, one after the other. Tiles are configured again only if the number of rows changes.
template <class Term>
class BlockProduct {
 public:
  void multiply(long rows, const Term* x, long stride, const Term* panel, long terms, float* sums, bool resume,
                Ahead& ahead) {
    if (rows != shaped_) BlockShape<Term>(rows).use();
    shaped_ = rows;
    Block<Term>::template multiply<Stays::panel, Halves::beside>(rows, x, stride, panel, terms, sums, resume, ahead);
  }

 private:
  long shaped_ = 0;
};

// Calls `work(piece, weights of the piece, ahead)` for the pieces of a part. `ahead` prefetches what is read later,
// evenly while a piece is unpacked and while each block of rows is multiplied with it.
template <class Term, class Work>
void each_piece(const Quantized& w, const Part& part, Work&& work) {
  for (long at = 0; at < part.terms; at += kUnpackedTerms) {
    const Part piece{part.first, part.rows, part.p, part.k + at, std::min(kUnpackedTerms, part.terms - at)};
    const uint8_t* from = w.panel(piece.p, piece.k);
    const long bytes = w.bytes(piece.terms),
               asks = piece.terms / kTermsMultiple + Block<Term>::asks(part.rows, piece.terms);
    Ahead ahead(from + kPrefetchBytes, bytes, bytes / 64 / asks + 1);
    work(piece, from, ahead);
  }
}

// Adds a part to the sums [rows][32], which continue those of the terms before the part, if any. `unpack(piece, from,
// panel, ahead)` unpacks a piece into `panel`, with which all rows are multiplied.
template <class T, class Unpack>
void add_unpacked(BlockProduct<TermOf<T>>& product, const Quantized& w, const Inputs<T>& x, const Part& part,
                  float* sums, Unpack&& unpack) {
  typedef TermOf<T> Term;
  alignas(64) Term panel[kUnpackedTerms * kPanel];
  each_piece<Term>(w, part, [&](const Part& piece, const uint8_t* from, Ahead& ahead) {
    unpack(piece, from, panel, ahead);
    for (long r = 0; r < piece.rows; r += kBlockRows)
      product.multiply(std::min(kBlockRows, piece.rows - r), x.row(piece.first + r) + piece.k, x.stride, panel,
                       piece.terms, sums + r * kPanel, piece.k > 0, ahead);
  });
}

template <class T>
class Int8Kernel {
 public:
  typedef TermOf<T> Term;
  typedef BlockProduct<Term> Product;
  static constexpr long kSize = sizeof(Term);  // bytes of a term of a row
  static constexpr long kFew = kFewRows<Term, ByteNumbers>;
  static long prepared_floats(long, const Quantized&) { return 0; }

  Int8Kernel(const Quantized& w, Inputs<T> x, float*) : w_(&w), x_(x) {}
  // Returns a kernel of the same rows and another matrix.
  Int8Kernel of(const Quantized& w) const {
    Int8Kernel other = *this;
    other.w_ = &w;
    return other;
  }

  void prepare(Pool&, long) const {}

  // Adds a part to the sums [rows][32], which continue those of the terms before the part, if any.
  void add(Product& product, const Part& part, float* sums) const {
    const auto put = [this](const Part& piece, const uint8_t* from, Term* to, Ahead& ahead) {
      unpack(ByteNumbers<Term>(*w_), from, piece.terms, to, ahead);
    };
    add_unpacked<T>(product, *w_, x_, part, sums, put);
  }

  // Multiplies up to kFew rows, from `first` on, by a whole panel: sums [rows][32].
  void add_few(long first, long rows, long p, float* sums) const {
    multiply_few_packed<Term, kFew>(
        *w_, ByteNumbers<Term>(*w_), rows, x_.row(first), x_.stride, p,
        [=](long, long row, long half, Vec some) { store(sums + row * kPanel + half * kLanes, some); });
  }

  void complete(long, long p, float* sums) const {
    for (long half = 0; half < kPanel; half += kLanes)
      store(sums + half, load(sums + half) * (1 / FourTerms<Term>::kTimes) * load(w_->scale(p, 0) + half));
  }

 private:
  const Quantized* w_;
  Inputs<T> x_;
};

// Weights in groups, each with a scale of its own: int4, and int8 with groups. `Numbers` unpacks them.
template <class T, template <class> class Numbers>
class GroupedKernel {
 public:
  typedef TermOf<T> Term;
  typedef BlockProduct<Term> Product;
  static constexpr long kSize = sizeof(Term);
  static constexpr long kFew = kFewRows<Term, Numbers>;
  // Each row's sums over groups are prepared if there are zeros to subtract.
  static long prepared_floats(long rows, const Quantized& w) { return w.offsets ? rows * w.groups : 0; }

  GroupedKernel(const Quantized& w, Inputs<T> x, float* prepared) : w_(&w), x_(x), totals_(prepared) {}
  // Returns a kernel of the same rows and another matrix.
  GroupedKernel of(const Quantized& w) const {
    GroupedKernel other = *this;
    other.w_ = &w;
    return other;
  }

  void prepare(Pool& pool, long rows) const {
    if (!w_->offsets) return;
    pool.share(rows, std::max(1L, rows / (4 * pool.threads())), [&](long first, long last) {
      for (long r = first; r < last; r++)
        for (long g = 0; g < w_->groups; g++) totals_[r * w_->groups + g] = total(r, g);
    });
  }

  // As above. Parts are whole groups, except for the last one.
  void add(Product& product, const Part& part, float* sums) const {
    alignas(64) Term panel[kUnpackedTerms * kPanel];
    const Numbers<Term> numbers(*w_);
    each_piece<Term>(*w_, part, [&](const Part& piece, const uint8_t* from, Ahead& ahead) {
      unpack(numbers, from, piece.terms, panel, ahead);
      for (long r = 0; r < piece.rows; r += kBlockRows) {
        const long rows = std::min(kBlockRows, piece.rows - r);
        add_groups(product, {piece.first + r, rows, piece.p, piece.k, piece.terms}, panel, sums + r * kPanel, ahead);
      }
    });
  }

  // As above.
  void add_few(long first, long rows, long p, float* sums) const {
    multiply_few_packed<Term, kFew>(*w_, Numbers<Term>(*w_), rows, x_.row(first), x_.stride, p,
                              [=](long g, long row, long half, Vec some) {
                                float* sum = sums + row * kPanel + half * kLanes;
                                add_to(sum, first + row, g, scaling(p, g, half * kLanes), some);
                              });
  }

  void complete(long, long, float*) const {}

 private:
  // Scale and offset of 16 columns.
  struct Scaling {
    Vec scale, offset;
  };

  Scaling scaling(long p, long g, long half) const {
    return {load(w_->scale(p, g) + half) * (1 / Numbers<Term>::kTimes),
            w_->offsets ? load(w_->offset(p, g) + half) : Vec{}};
  }

  // Adds the sums of a group to those of the groups before it.
  void add_to(float* sum, long row, long g, const Scaling& by, Vec fresh) const {
    Vec v = g ? load(sum) : Vec{};
    if (w_->offsets) v -= by.offset * totals_[row * w_->groups + g];
    store(sum, v + fresh * by.scale);
  }

  float total(long row, long g) const {
    const Term* x = x_.row(row) + g * w_->group;
    Vec sum = {};
    for (long k = 0; k < std::min(w_->group, w_->terms - g * w_->group); k += kLanes) sum += load(x + k);
    return sum_lanes(sum);
  }

  // The sums of a group are read only while those of the next group are computed, since tiles take time to be written
  // to memory.
  void add_groups(Product& product, const Part& part, const Term* panel, float* sums, Ahead& ahead) const {
    alignas(64) float fresh[2][kBlockRows * kPanel];
    long g = part.k / w_->group;
    const long first = g;
    for (long k = 0; k < part.terms; k += w_->group, g++) {
      product.multiply(part.rows, x_.row(part.first) + part.k + k, x_.stride, panel + k * kPanel,
                       std::min(w_->group, part.terms - k), fresh[g & 1], false, ahead);
      if (g > first) add_scaled(part, g - 1, fresh[~g & 1], sums);
    }
    add_scaled(part, g - 1, fresh[~g & 1], sums);
  }

  void add_scaled(const Part& part, long g, const float* fresh, float* sums) const {
    for (long half = 0; half < kPanel; half += kLanes) {
      const Scaling by = scaling(part.p, g, half);
      for (long r = 0; r < part.rows; r++)
        add_to(sums + r * kPanel + half, part.first + r, g, by, load(fresh + r * kPanel + half));
    }
  }

  const Quantized* w_;
  Inputs<T> x_;
  float* totals_;
};

}  // namespace antiphon
