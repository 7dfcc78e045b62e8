// A weight matrix, plain or quantized, and the product of rows with it. The kind is examined here, once for all panels.
//
// A kernel is the product with quantized weights (quantized_weights.h, quantized_rows.h, quantized_nibbles.h), created for one matrix and
// one set of rows. It prepares the rows, adds up terms of a panel, and converts complete sums to floats. Rows that are
// multiplied with several matrices of one shape are prepared once. If the terms of a matrix are in another order than its
// inputs, rows are copied in this order first. A quantized matrix may consist of several of different kinds, whose
// panels follow each other (`Quantized::below`): they are multiplied one after the other.
#pragma once

#include "quantized_nibbles.h"
#include "quantized_rows.h"
#include "quantized_scaled.h"

namespace antiphon {

template <class T>
struct Linear : Matrix<T> {
  const Quantized* quantized = nullptr;  // set instead of `data` if the weights are quantized

  explicit operator bool() const { return this->data || quantized; }
};

// Calls `work` with a kernel of the matrix, which must be quantized.
template <class T, class Work>
void with_kernel(const Quantized& w, Inputs<T> x, float* prepared, Work&& work) {
  switch (w.kind) {
    case Kind::int8:
      if (w.group < kTermsMultiple) return work(ScaledKernel<T>(w, x, prepared));
      if (w.groups > 1 || w.offsets) return work(GroupedKernel<T, ByteNumbers>(w, x, prepared));
      return work(Int8Kernel<T>(w, x, prepared));
    case Kind::int8_dynamic:
      return work(Int8DynamicKernel<T>(w, x, prepared));
    case Kind::int4:
      return work(GroupedKernel<T, LevelNumbers>(w, x, prepared));
    case Kind::int4_dynamic:
      return work(Int4DynamicKernel<T>(w, x, prepared));
  }
}

// Returns the number of floats that rows prepared for one matrix take.
template <class T>
long prepared_size(long rows, const Quantized& w) {
  long size = 0;
  with_kernel<T>(w, {}, nullptr,
                 [&](const auto& kernel) { size = round_up(kernel.prepared_floats(rows, w), kLanes); });
  return size;
}

template <class T>
long prepared_size(long rows, const Linear<T>& w) {
  return w.quantized ? prepared_size<T>(rows, *w.quantized) : 0;
}

// Returns the number of floats that rows in the order of a matrix's terms take; 0 if that is the order of its inputs.
template <class T>
long ordered_size(long rows, const Quantized& w) {
  if (!w.order) return 0;
  const long bytes = rows * row_stride<TermOf<T>>(w.terms) * (long)sizeof(TermOf<T>);
  return round_up(bytes / (long)sizeof(float), kLanes);
}

template <class T>
long ordered_size(long rows, const Linear<T>& w) {
  return w.quantized ? ordered_size<T>(rows, *w.quantized) : 0;
}

// Copies rows in the order of the terms of a matrix, shared among the threads. `order_of(row)` returns `Quantized::order`
// of the matrix of a row; `kept` has `ordered_size` floats. Returns the copies.
template <class T, class OrderOf>
Inputs<T> order_rows(Pool& pool, Inputs<T> x, long rows, long terms, float* kept, OrderOf&& order_of) {
  constexpr long kSpan = 512;
  const Inputs<T> to{reinterpret_cast<TermOf<T>*>(kept), row_stride<TermOf<T>>(terms)};
  const long spans = (terms + kSpan - 1) / kSpan;
  pool.share(rows * spans, std::max(1L, rows * spans / (4 * pool.threads())), [&](long first, long last) {
    for (long i = first; i < last; i++) {
      const long row = i / spans, begin = i % spans * kSpan;
      const int32_t* const order = order_of(row);
      const TermOf<T>* const from = x.row(row);
      TermOf<T>* const copy = to.row(row);
      for (long k = begin; k < std::min(begin + kSpan, terms); k++)
        copy[k] = order[k] < 0 ? TermOf<T>{} : from[order[k]];
    }
  });
  return to;
}

// As `terms_at_once`, rounded up to whole groups of any kind.
template <class Kernel>
long quantized_terms_at_once(long rows, const Quantized& w) {
  return round_up(terms_at_once(rows, w.terms, Kernel::kSize), kGroupMax);
}

// Returns the number of floats that `multiply` needs: for rows in order, prepared rows, then partial sums.
template <class T>
long kept_size(long rows, const Linear<T>& w) {
  if (!w.quantized) return kept_size(rows, static_cast<const Matrix<T>&>(w));
  if (!rows) return 0;
  long most = 0;
  for (const Quantized* q = w.quantized; q; q = q->below) {
    long size = ordered_size<T>(rows, *q) + prepared_size<T>(rows, *q);
    with_kernel<T>(*q, {}, nullptr, [&](const auto& kernel) {
      const long step = quantized_terms_at_once<std::decay_t<decltype(kernel)>>(std::min(rows, kPassRows), *q);
      if (step < q->terms) size += q->panels * kPassRows * kPanel;
    });
    most = std::max(most, size);
  }
  return most;
}

// Multiplies up to kPassRows rows by a part of a panel. The sums stay in `kept` [rows][32] unless these are the last
// terms.
template <class Kernel, class Finish>
void multiply_part(const Kernel& kernel, typename Kernel::Product& product, const Part& part, bool last, float* kept,
                   Finish&& finish) {
  alignas(64) float block[kPassRows * kPanel];
  float* sums = kept ? kept : block;
  kernel.add(product, part, sums);
  if (!last) return;
  for (long r = part.first; r < part.first + part.rows; r++, sums += kPanel) {
    kernel.complete(r, part.p, sums);
    finish(r, sums);
  }
}

// Multiplies up to Kernel::kFew rows, from `first_row` on, by panels [first, end).
template <class Kernel, class Finish>
void multiply_few_rows(const Kernel& kernel, long first_row, long rows, long first, long end, Finish&& finish) {
  alignas(64) float sums[Kernel::kFew * kPanel];
  for (long p = first; p < end; p++) {
    kernel.add_few(first_row, rows, p, sums);
    for (long r = 0; r < rows; r++) {
      kernel.complete(first_row + r, p, sums + r * kPanel);
      finish(first_row + r, p, sums + r * kPanel);
    }
  }
}

// Multiplies rows [first, end) by a whole panel.
template <class Kernel, class Finish>
void multiply_whole(const Kernel& kernel, const Quantized& w, long first, long end, long p, Finish&& finish) {
  if constexpr (Kernel::kFew > 0)
    if (end - first <= Kernel::kFew)
      return multiply_few_rows(kernel, first, end - first, p, p + 1,
                               [&](long row, long, const float* sums) { finish(row, sums); });
  typename Kernel::Product product;
  for (; first < end; first += kPassRows)
    multiply_part(kernel, product, {first, std::min(kPassRows, end - first), p, 0, w.terms}, true, nullptr, finish);
}

// Returns how many panels a thread takes at a time. Every thread gets the same number of portions, because panels are
// few.
inline long even_portion(long panels, long panel_bytes, long threads) {
  const long portions = round_up(std::max(4 * threads, panels * panel_bytes / kPortionBytes), threads);
  return (panels + portions - 1) / portions;
}

template <class Kernel, class Finish>
void multiply_all(Pool& pool, Kernel kernel, const Quantized& w, long panels, long rows, float* kept, Finish&& finish) {
  kernel.prepare(pool, rows);
  if constexpr (Kernel::kFew > 0)
    if (rows <= Kernel::kFew)
      return pool.share(panels, even_portion(panels, w.bytes(w.terms), pool.threads()),
                        [&](long first, long end) { multiply_few_rows(kernel, 0, rows, first, end, finish); });
  for (long start = 0; start < rows; start += kPassRows) {
    const long count = std::min(kPassRows, rows - start), step = quantized_terms_at_once<Kernel>(count, w);
    for (long k = 0; k < w.terms; k += step) {
      const long terms = std::min(step, w.terms - k);
      const long portion = even_portion(panels, w.bytes(terms), pool.threads());
      pool.share(panels, portion, [&](long first, long end) {
        typename Kernel::Product product;
        for (long p = first; p < end; p++)
          multiply_part(kernel, product, {start, count, p, k, terms}, k + terms == w.terms,
                        step < w.terms ? kept + p * kPassRows * kPanel : nullptr,
                        [&](long row, const float* sums) { finish(row, p, sums); });
      });
    }
  }
}

// Multiplies all rows by all panels, shared among the threads; see matrix.h. `kept` has `kept_size` floats. Products
// with quantized weights prefetch nothing in the background.
template <class T, class Finish, class Background = NoBackground>
void multiply(Pool& pool, const Linear<T>& w, Inputs<T> x, long rows, float* kept, Finish&& finish,
              const Background& background = {}) {
  if (!w.quantized) return multiply(pool, static_cast<const Matrix<T>&>(w), x, rows, kept, finish, background);
  long before = 0;  // panels of the matrices above
  for (const Quantized* q = w.quantized; q; before += q->panels, q = q->below) {
    const Inputs<T> from = q->order ? order_rows<T>(pool, x, rows, q->terms, kept, [&](long) { return q->order; }) : x;
    float* const prepared = kept + ordered_size<T>(rows, *q);
    with_kernel<T>(*q, from, prepared, [&](const auto& kernel) {
      multiply_all(pool, kernel, *q, q->panels, rows, prepared + prepared_size<T>(rows, *q),
                   [&](long row, long panel, const float* sums) { finish(row, before + panel, sums); });
    });
  }
}

}  // namespace antiphon
