// Matrix products with bias, and a layer's gated or plain MLP. The mixture of experts is in experts.h.
#pragma once

#include "elementwise.h"

namespace antiphon {

// Where a result is written: added to what is there, or replacing it.
struct Target {
  Rows<float> rows;
  bool add;

  void put(long row, long panel, Vec left, Vec right) const { put_at(row, panel * kPanel, left, right); }
  void put_at(long row, long column, Vec left, Vec right) const {
    float* to = rows.row(row) + column;
    store(to, add ? load(to) + left : left);
    store(to + kLanes, add ? load(to + kLanes) + right : right);
  }
};

inline Vec with_bias(const float* bias, long column, Vec v) { return bias ? v + load(bias + column) : v; }

// Writes a panel's sums with its bias.
inline void put_sums(const float* bias, const Target& target, long row, long panel, const float* sums) {
  target.put(row, panel, with_bias(bias, panel * kPanel, load(sums)),
             with_bias(bias, panel * kPanel + kLanes, load(sums + kLanes)));
}

// y = x Wᵀ + b
template <class T>
void linear(Pool& pool, const Linear<T>& w, Inputs<T> x, long rows, float* kept, const Target& target) {
  multiply(pool, w, x, rows, kept,
           [&](long row, long panel, const float* sums) { put_sums(w.bias, target, row, panel, sums); });
}

// Writes the result of a panel of 16 gates and their partners: act(gate) * partner, 16 columns.
template <class T>
void put_gated(const Activation& activation, const float* bias, long panel, const float* sums, T* to) {
  const Vec gate = with_bias(bias, panel * kPanel, load(sums));
  const Vec up = with_bias(bias, panel * kPanel + kLanes, load(sums + kLanes));
  store(to, gated<T>(activation, gate, up));
}

template <class T>
void put_plain(const Activation& activation, const float* bias, long panel, const float* sums, T* to) {
  for (long half = 0; half < kPanel; half += kLanes)
    store(to + half, activate<T>(activation, with_bias(bias, panel * kPanel + half, load(sums + half))));
}

// Returns the number of columns that result from a panel.
inline long inner_width(bool gated) { return gated ? kLanes : kPanel; }

template <class T>
void put_inner(bool gated, const Activation& activation, const float* bias, long panel, const float* sums, T* to) {
  if (gated)
    put_gated(activation, bias, panel, sums, to);
  else
    put_plain(activation, bias, panel, sums, to);
}

template <class T>
void mlp_inner(Pool& pool, const Linear<T>& up, bool gated, const Activation& activation, Inputs<T> x, long rows,
               float* kept, Inputs<T> inner) {
  multiply(pool, up, x, rows, kept, [&](long row, long panel, const float* sums) {
    put_inner(gated, activation, up.bias, panel, sums, inner.row(row) + panel * inner_width(gated));
  });
}

// Returns the columns of a matrix of gates and what they are multiplied with.
inline long gated_columns(long inner) { return 2 * round_up(inner, kPanel); }

// The same for a gated MLP whose gates g become max(0, g - mean(g) - cut * deviation(g)) before the activation. `sums`
// has up to kPassRows rows of all columns.
template <class T>
void mlp_inner_cut(Pool& pool, const Linear<T>& up, float cut, const Activation& activation, Inputs<T> x, long rows,
                   float* kept, Rows<float> sums, Inputs<T> inner) {
  const long width = up.out / 2;
  const auto some = [&](long d) { return std::min(kLanes, width - d); };
  const long most = even_part(rows, kPassRows);
  for (long first = 0; first < rows; first += most) {
    const long count = std::min(most, rows - first);
    linear(pool, up, x.from(first), count, kept, Target{sums, false});
    pool.each(count, [&](long row) {
      const float* const gates = sums.row(row);  // 16 of them, then the 16 numbers that they are multiplied with
      Vec total = {}, squares = {};
      for (long d = 0; d < width; d += kLanes) total += load_some(gates + 2 * d, some(d));
      const float middle = sum_lanes(total) / (float)width;
      for (long d = 0; d < width; d += kLanes) {
        const Vec off = load_some(gates + 2 * d, some(d)) - middle;
        squares += select(lane_numbers() < (int32_t)some(d), off * off, Vec{});
      }
      const float least = middle + std::sqrt(sum_lanes(squares) / (float)width) * cut;
      TermOf<T>* const to = inner.row(first + row);
      for (long d = 0; d < round_up(width, kPanel); d += kLanes)
        store(to + d, activate<T>(activation, max(load(gates + 2 * d) - least, Vec{})) * load(gates + 2 * d + kLanes));
    });
  }
}

}  // namespace antiphon
