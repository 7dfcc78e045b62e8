// The second half of a layer: a gated or plain MLP, or a mixture of gated ones.
#pragma once

#include "elementwise.h"

namespace antiphon {

// Where the result goes: added to what is there, or put there.
struct Target {
  Rows<float> rows;
  bool add;

  void put(long row, long panel, Vec left, Vec right) const {
    float* to = rows.row(row) + panel * kPanel;
    store(to, add ? load(to) + left : left);
    store(to + kLanes, add ? load(to + kLanes) + right : right);
  }
};

inline Vec with_bias(const float* bias, long column, Vec v) { return bias ? v + load(bias + column) : v; }

// y = x Wᵀ + b
template <class T>
void linear(Pool& pool, const Linear<T>& w, Rows<T> x, long rows, float* kept, const Target& target) {
  multiply(pool, w, x, rows, kept, [&](long row, long panel, const float* sums) {
    target.put(row, panel, with_bias(w.bias, panel * kPanel, load(sums)),
               with_bias(w.bias, panel * kPanel + kLanes, load(sums + kLanes)));
  });
}

// What a matrix in turns of 16 gates and partners gives: act(gate) * partner, 16 columns a panel.
template <class T>
void put_gated(Activation kind, const float* bias, T* row, long panel, const float* sums) {
  const Vec gate = with_bias(bias, panel * kPanel, load(sums));
  const Vec up = with_bias(bias, panel * kPanel + kLanes, load(sums + kLanes));
  store(row + panel * kLanes, activate<T>(kind, gate) * up);
}

template <class T>
void put_plain(Activation kind, const float* bias, T* row, long panel, const float* sums) {
  for (long half = 0; half < kPanel; half += kLanes)
    store(row + panel * kPanel + half, activate<T>(kind, with_bias(bias, panel * kPanel + half, load(sums + half))));
}

template <class T>
void mlp_inner(Pool& pool, const Linear<T>& up, bool gated, Activation kind, Rows<T> x, long rows, float* kept,
               Rows<T> inner) {
  multiply(pool, up, x, rows, kept, [&](long row, long panel, const float* sums) {
    if (gated)
      put_gated(kind, up.bias, inner.row(row), panel, sums);
    else
      put_plain(kind, up.bias, inner.row(row), panel, sums);
  });
}

}  // namespace antiphon
