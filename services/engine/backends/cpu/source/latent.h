// Latent attention, around the attention of attention.h: the KV cache has one row for each token, which is the key of
// all heads, and whose first `rank` numbers are their value.
//
//     qkv    [queries or their latent | latent | rotated part of the key], sums of the hidden states
//     row    [norm(latent) | rotated part]
//     query  of a head: [W_keyᵀ q | rotated part], where q is the part that is not rotated
//     value  of a head: W_value times what the head attends to
//
// W_key and W_value of each head are matrices of their own, which are not quantized.
#pragma once

#include "heads.h"
#include "mlp.h"

namespace antiphon {

// Sizes of latent attention; rank 0: the model has keys and values.
struct LatentShape {
  long heads = 0, rank = 0, nope = 0, rope = 0, value = 0, query_rank = 0;
  float eps = 0;

  explicit operator bool() const { return rank > 0; }
  long row() const { return rank + rope; }
  long query() const { return nope + rope; }
  // Width of what precedes the row in `qkv`.
  long first() const { return query_rank ? query_rank : heads * query(); }
};

template <class T>
struct LatentBuffers {
  RowBuffer<float> query_sums;                        // [tokens][heads * query], if queries have a latent
  RowBuffer<TermOf<T>> query_latents, plain, values;  // plain: [heads * tokens][nope], one head after the other

  void prepare(const LatentShape& shape, long tokens) {
    if (shape.query_rank) {
      query_sums.rows(tokens, shape.heads * shape.query());
      query_latents.rows(tokens, shape.query_rank);
    }
    plain.rows(shape.heads * tokens, shape.nope);
    values.rows(tokens, shape.heads * shape.value);
  }
};

// Multiplies the rows of each head by the head's matrix, shared among the threads. `rows_of(head)` returns a head's
// rows; `finish(head, row, panel, sums)` gets 32 sums.
template <class T, class RowsOf, class Finish>
void multiply_heads(Pool& pool, const std::vector<Packed<T>>& matrices, long rows, RowsOf&& rows_of, Finish&& finish) {
  const long panels = matrices[0].matrix.panels;
  pool.share((long)matrices.size() * panels, 1, kSideBySide, [&](long first, long last) {
    for (long i = first, some = 1; i < last; i += some) {
      const long head = i / panels, p = i % panels;
      const Matrix<T>& w = matrices[head].matrix;
      const Inputs<T> x = rows_of(head);
      some = rows <= kBlockRows ? std::min(last - i, panels - p) : 1;
      if (rows <= kBlockRows) {
        multiply_few(rows, x.data, x.stride, w, p, p + some,
                     [&](long row, long panel, const float* sums) { finish(head, row, panel, sums); });
        continue;
      }
      for (long r = 0; r < rows; r += kPassRows) {
        const auto finish_row = [&](long row, long, const float* sums) { finish(head, r + row, p, sums); };
        Pass<T, decltype(finish_row)>(std::min(kPassRows, rows - r), x.row(r), x.stride, finish_row)
            .multiply({w.panel(p), w.terms, p, w.panel(p + 1), false, true}, nullptr);
      }
    }
  });
}

// Writes the first numbers of a panel's sums, times `scale`, to the columns of the panel that `to` [width] has.
template <class Term>
void put_columns(Term* to, long width, long panel, const float* sums, float scale) {
  for (long half = 0; half < kPanel; half += kLanes) {
    const long column = panel * kPanel + half, count = std::min(kLanes, width - column);
    if (count > 0) store_some(to + column, load(sums + half) * scale, count);
  }
}

// A step's latent attention but for the attention itself. All threads call the methods together.
template <class T>
class Latents {
 public:
  // `kept`: see `linear`.
  Latents(Pool& pool, const LatentShape& shape, const CacheShape& cache, const Heads<T>& heads, LatentBuffers<T>& b,
          float* kept)
      : pool_(pool), shape_(shape), cache_(cache), heads_(heads), b_(b), kept_(kept) {}

  // Writes the tokens' rows to the cache and their queries to those of `heads`. `span_of(t)` returns the span of token
  // t of the step. Overwrites `qkv`.
  template <class SpanOf>
  void before_attention(const Layer<T>& layer, Rows<float> qkv, long tokens, SpanOf&& span_of) const {
    const Inputs<T> latents = b_.query_latents.get(), plain = b_.plain.get();
    pool_.each(tokens, [&](long t) {
      float* row = qkv.row(t) + shape_.first();
      apply_norm(layer.latent_norm, NormKind::rms, shape_.eps, row, row, shape_.rank);
      if (layer.rope >= 0) heads_.turn(layer.rope, t, row + shape_.rank);
      heads_.keep_row(layer, span_of(t), t, row);
      if (shape_.query_rank)
        apply_norm(layer.query_latent_norm, NormKind::rms, shape_.eps, qkv.row(t), latents.row(t), shape_.query_rank);
    });
    const Rows<float> queries = shape_.query_rank ? b_.query_sums.get() : qkv;
    if (shape_.query_rank) linear(pool_, layer.query_up.matrix, latents, tokens, kept_, Target{queries, false});
    pool_.each(tokens, [&](long t) {
      for (long h = 0; h < shape_.heads; h++) {
        float* query = queries.row(t) + h * shape_.query();
        copy_floats(query, plain.row(h * tokens + t), shape_.nope);
        if (layer.rope >= 0) heads_.turn(layer.rope, t, query + shape_.nope);
        heads_.keep_query(layer, t, h, query + shape_.nope, shape_.rank, shape_.rope);
      }
    });
    multiply_heads(
        pool_, layer.latent_key, tokens, [&](long h) { return plain.from(h * tokens); },
        [&](long h, long t, long panel, const float* sums) {
          put_columns(heads_.query(t, h), shape_.rank, panel, sums, heads_.query_scale(layer, t));
        });
  }

  // Returns the values [rows][heads * value] of rows that attended to [heads][value_dim of the cache].
  Inputs<T> values(const Layer<T>& layer, Inputs<T> attended, long rows) const {
    const Inputs<T> to = b_.values.get();
    multiply_heads(
        pool_, layer.latent_value, rows,
        [&](long h) {
          return Inputs<T>{attended.data + h * cache_.value_dim, attended.stride};
        },
        [&](long h, long row, long panel, const float* sums) {
          put_columns(to.row(row) + h * shape_.value, shape_.value, panel, sums, 1.0f);
        });
    return to;
  }

 private:
  Pool& pool_;
  const LatentShape& shape_;
  const CacheShape& cache_;
  const Heads<T> heads_;
  LatentBuffers<T>& b_;
  float* const kept_;
};

}  // namespace antiphon
