// The output projection: computes for each row the most likely token and the logarithm of the sum of exp(logit), and
// stores the logits of the rows for which they are requested. Results of panels are combined in panel order, whichever
// thread computed them.
#pragma once

#include "mlp.h"

namespace antiphon {

// The result of each panel of 32 logits for each row.
struct HeadBuffers {
  RowBuffer<float> highest, total;  // [rows][panels]; total: the sum of exp(logit - highest)
  RowBuffer<int32_t> best;          // [rows][panels], the token with the highest logit

  void prepare(long rows, long panels) {
    highest.rows(rows, panels), total.rows(rows, panels), best.rows(rows, panels);
  }
};

template <class T>
class Head {
 public:
  Head(const Linear<T>& weight, float scale, float softcap, const antiphon_Step& step, HeadBuffers& b, int64_t* given)
      : weight_(weight), scale_(scale), softcap_(softcap), step_(step), given_(given),
        highest_(b.highest.rows(step.num_logits, weight.panels)), total_(b.total.rows(step.num_logits, weight.panels)),
        best_(b.best.rows(step.num_logits, weight.panels)) {}

  void run(Pool& pool, Inputs<T> x, float* kept) const {
    multiply(pool, weight_, x, step_.num_logits, kept,
             [this](long row, long panel, const float* sums) { one_panel(row, panel, sums); });
    pool.share(step_.num_logits, 1, [this](long first, long last) {
      for (long row = first; row < last; row++) one_row(row);
    });
  }

 private:
  Vec logits(long panel, long half, const float* sums) const {
    const long column = panel * kPanel + half * kLanes;
    Vec v = with_bias(weight_.bias, column, load(sums + half * kLanes));
    if (scale_ != 1) v = v * broadcast(scale_);
    if (softcap_ != 0) v = tanh(v / softcap_) * softcap_;
    const long left = weight_.out - column;
    return left >= kLanes ? v : select(lane_numbers() < (int32_t)std::max(left, 0L), v, broadcast(-1e30f));
  }

  void one_panel(long row, long panel, const float* sums) const {
    const Vec left = logits(panel, 0, sums), right = logits(panel, 1, sums);
    const float highest = max_lanes(max(left, right));
    highest_.row(row)[panel] = highest;
    total_.row(row)[panel] = sum_lanes(exp(left - highest) + exp(right - highest));
    best_.row(row)[panel] = (int32_t)(panel * kPanel + first_place(left, right, highest));
    const int64_t to = step_.logit_rows[row];
    if (to < 0) return;
    float* logits = step_.logits + to * weight_.out + panel * kPanel;
    const long count = std::min(kPanel, weight_.out - panel * kPanel);
    store_some(logits, left, std::min(count, kLanes));
    if (count > kLanes) store_some(logits + kLanes, right, count - kLanes);
  }

  static long first_place(Vec left, Vec right, float highest) {
#if defined(__AVX512F__)
    const __m512 value = _mm512_set1_ps(highest);
    const uint32_t low = _mm512_cmpeq_ps_mask((__m512)left, value), high = _mm512_cmpeq_ps_mask((__m512)right, value);
    const uint32_t places = low | high << kLanes;
    return places ? __builtin_ctz(places) : 0;
#endif
    float all[kPanel];
    store(all, left);
    store(all + kLanes, right);
    for (long i = 0; i < kPanel; i++)
      if (all[i] == highest) return i;
    return 0;
  }

  void one_row(long row) const {
    const float* highest = highest_.row(row);
    const long panels = weight_.panels, best = std::max_element(highest, highest + panels) - highest;
    Vec total = {};
    for (long p = 0; p < panels; p += kLanes) {
      const long count = std::min(kLanes, panels - p);
      const Vec part = load_some(total_.row(row) + p, count) * exp(load_some(highest + p, count) - highest[best]);
      total += select(lane_numbers() < (int32_t)count, part, Vec{});
    }
    step_.best[row] = given_[row] = best_.row(row)[best];
    step_.best_logit[row] = highest[best];
    step_.log_total[row] = highest[best] + std::log(sum_lanes(total));
  }

  const Linear<T>& weight_;
  const float scale_, softcap_;
  const antiphon_Step& step_;
  int64_t* const given_;  // [num_logits] a copy of `best` for the next step
  const Rows<float> highest_, total_;
  const Rows<int32_t> best_;
};

}  // namespace antiphon
