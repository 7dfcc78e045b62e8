// A mixture of experts: the router chooses experts for each token, tokens are sorted by expert, the matrices of all
// chosen experts are multiplied in one pass, and each token's outputs are added up, weighted, in the router's order, so
// that the sum does not depend on the other tokens.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <numeric>
#include <utility>

#include "gates.h"
#include "mlp.h"

namespace antiphon {

enum class Scoring : int64_t { softmax, sigmoid };

struct ExpertShape {
  long count = 0, per_token = 0, size = 0, shared_size = 0;
  bool normalise = false;
  Scoring scoring = Scoring::softmax;
  long groups = 1, chosen_groups = 1;
  float scale = 1;
  long best_of_group = 2;
  bool gated = true;
  long latent = 0;  // width of what experts read and write; 0: that of the hidden states
  bool weighted_inputs = false;  // weights multiply what experts read, not what they write
};

template <class T>
struct ExpertBuffers {
  RowBuffer<float> scores, outputs, shared_output, shared_gate;
  RowBuffer<TermOf<T>> gathered, inner, shared_inner;
  RowBuffer<TermOf<T>> latents, mixed;  // of each token, what experts read, and the sum of what they write
  std::vector<long> chosen;    // [tokens][per_token] experts
  std::vector<float> weights;  // [tokens][per_token]
  std::vector<long> place;     // [tokens][per_token] index among the sorted rows
  std::vector<long> token;     // the token of each sorted row
  std::vector<float> share;    // with weighted inputs, the factor on each sorted row
  std::vector<long> start;     // [experts + 1] the first sorted row of each expert
  std::vector<long> active;    // experts with rows; `num_active`: how many, which late threads may read at any time
  std::atomic<long> num_active{0};
};

constexpr float kUnchosen = -3e38f;   // rank of an expert outside of the chosen groups
constexpr float kTotalMin = 1e-20f;  // least number that weights are divided by

// Turns logits into scores: their softmax, or the sigmoid of each.
inline void score(const ExpertShape& shape, float* logits) {
  if (shape.scoring == Scoring::sigmoid) {
    for (long e = 0; e < shape.count; e++) logits[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    return;
  }
  const float highest = *std::max_element(logits, logits + shape.count);
  float total = 0;
  for (long e = 0; e < shape.count; e++) total += std::exp(logits[e] - highest);
  for (long e = 0; e < shape.count; e++) logits[e] = std::exp(logits[e] - highest) / total;
}

// Writes the `count` indices with the highest ranks, the highest first and of equal ones the first.
inline std::vector<long> best(const std::vector<float>& ranks, long count) {
  std::vector<long> order(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + count, order.end(),
                    [&](long a, long b) { return ranks[a] != ranks[b] ? ranks[a] > ranks[b] : a < b; });
  order.resize(count);
  return order;
}

// Leaves only experts of the groups whose `best_of_group` highest ranks have the highest sums.
inline void keep_groups(const ExpertShape& shape, std::vector<float>& ranks) {
  const long size = shape.count / shape.groups;
  std::vector<float> sums(shape.groups);
  for (long g = 0; g < shape.groups; g++) {
    std::vector<float> members(ranks.begin() + g * size, ranks.begin() + (g + 1) * size);
    const long some = std::min(shape.best_of_group, size);
    std::partial_sort(members.begin(), members.begin() + some, members.end(), std::greater<float>());
    for (long i = 0; i < some; i++) sums[g] += members[i];
  }
  std::vector<char> kept(shape.groups);
  for (const long g : best(sums, shape.chosen_groups)) kept[g] = 1;
  for (long e = 0; e < shape.count; e++)
    if (!kept[e / size]) ranks[e] = kUnchosen;
}

// Chooses a token's experts, the best first, and their weights. Overwrites the logits by the scores. `correction`
// [experts] is added to scores for the choice; empty: nothing is.
inline void choose(const ExpertShape& shape, const std::vector<float>& correction, float* logits, long* chosen,
                   float* weights) {
  std::vector<float> ranks(logits, logits + shape.count);  // the softmax has their order
  score(shape, logits);
  if (shape.scoring != Scoring::softmax || !correction.empty() || shape.groups > shape.chosen_groups)
    std::copy(logits, logits + shape.count, ranks.begin());
  for (size_t e = 0; e < correction.size(); e++) ranks[e] += correction[e];
  if (shape.groups > shape.chosen_groups) keep_groups(shape, ranks);
  const std::vector<long> order = best(ranks, shape.per_token);
  float taken = 0;
  for (long i = 0; i < shape.per_token; i++) {
    chosen[i] = order[i];
    weights[i] = logits[order[i]];
    taken += weights[i];
  }
  const float total = shape.normalise ? std::max(taken, kTotalMin) : 1.0f;
  for (long i = 0; i < shape.per_token; i++) weights[i] = weights[i] / total * shape.scale;
}

template <class T>
class Experts {
 public:
  Experts(Pool& pool, const ExpertShape& shape, const Activation& activation, float* kept)
      : pool_(pool), shape_(shape), activation_(activation), kept_(kept) {}

  // Allocates everything that needs memory, before the threads start.
  static void prepare(ExpertBuffers<T>& b, const ExpertShape& shape, long tokens, long hidden) {
    const long rows = tokens * shape.per_token, width = shape.latent ? shape.latent : hidden;
    b.scores.rows(tokens, shape.count);
    b.gathered.rows(rows, width);
    b.inner.rows(rows, shape.size);
    b.outputs.rows(rows, width);
    if (shape.latent) b.latents.rows(tokens, width), b.mixed.rows(tokens, width);
    b.chosen.resize(rows), b.weights.resize(rows), b.place.resize(rows), b.token.resize(rows);
    if (shape.weighted_inputs) b.share.resize(rows);
    b.start.resize(shape.count + 1);
    b.active.reserve(shape.count);
    if (!shape.shared_size) return;
    b.shared_inner.rows(tokens, shape.shared_size);
    b.shared_output.rows(tokens, hidden);
    b.shared_gate.rows(tokens, 1);
  }

  // Returns the number of floats that `kept` must have.
  static long kept_size(const ExpertShape& shape, const Layer<T>& layer, long tokens) {
    long most = 0;
    for (const Packed<T>* packed : {&layer.router, &layer.shared_gate, &layer.expert_in, &layer.expert_out})
      if (packed->matrix) most = std::max(most, antiphon::kept_size(tokens, packed->matrix));
    for (const auto* experts : {&layer.expert_up, &layer.expert_down})
      if (!experts->empty()) {
        const Linear<T>& like = (*experts)[0].matrix;
        const long rows = tokens * shape.per_token;
        most = std::max(most, ordered_size(rows, like) + prepared_size(rows, like));
      }
    return most;
  }

  // `routed`: what the router reads.
  void run(const Layer<T>& layer, ExpertBuffers<T>& b, Inputs<T> x, Inputs<T> routed, long tokens, long hidden,
           const Target& target) {
    const Rows<float> scores = b.scores.get();
    linear(pool_, layer.router.matrix, routed, tokens, kept_, Target{scores, false});
    pool_.share(1, 1, [&](long, long) { sort(layer, b, scores, tokens); });
    if (shape_.shared_size) run_shared(layer, b, x, tokens);
    if (!shape_.latent) {
      multiply_chosen(layer, b, x, tokens, hidden);
      return combine(b, tokens, hidden, [&](long t, long panel, Vec(&sum)[2]) {
        if (shape_.shared_size) add_shared(layer, b, sum, t, panel);
        target.put(t, panel, sum[0], sum[1]);
      });
    }
    const Inputs<T> latents = b.latents.get(), mixed = b.mixed.get();
    multiply(pool_, layer.expert_in.matrix, x, tokens, kept_, [&](long row, long panel, const float* sums) {
      store_pair(latents.row(row) + panel * kPanel, load(sums), load(sums + kLanes));
    });
    multiply_chosen(layer, b, latents, tokens, shape_.latent);
    combine(b, tokens, shape_.latent, [&](long t, long panel, Vec(&sum)[2]) {
      store_pair(mixed.row(t) + panel * kPanel, sum[0], sum[1]);
    });
    multiply(pool_, layer.expert_out.matrix, mixed, tokens, kept_, [&](long t, long panel, const float* sums) {
      Vec sum[2] = {load(sums), load(sums + kLanes)};
      if (shape_.shared_size) add_shared(layer, b, sum, t, panel);
      target.put(t, panel, sum[0], sum[1]);
    });
  }

 private:
  void sort(const Layer<T>& layer, ExpertBuffers<T>& b, Rows<float> scores, long tokens) {
    const long k = shape_.per_token;
    for (long t = 0; t < tokens; t++)
      choose(shape_, layer.router_correction, scores.row(t), &b.chosen[t * k], &b.weights[t * k]);
    for (long i = 0; !layer.expert_scales.empty() && i < tokens * k; i++)
      b.weights[i] *= layer.expert_scales[b.chosen[i]];
    std::fill(b.start.begin(), b.start.end(), 0);
    for (long i = 0; i < tokens * k; i++) b.start[b.chosen[i] + 1]++;
    std::partial_sum(b.start.begin(), b.start.end(), b.start.begin());
    std::vector<long> next(b.start.begin(), b.start.end() - 1);
    for (long i = 0; i < tokens * k; i++) {
      b.place[i] = next[b.chosen[i]]++;
      b.token[b.place[i]] = i / k;
      if (shape_.weighted_inputs) b.share[b.place[i]] = std::exchange(b.weights[i], 1.0f);
    }
    b.active.clear();
    for (long e = 0; e < shape_.count; e++)
      if (b.start[e + 1] > b.start[e]) b.active.push_back(e);
    b.num_active.store((long)b.active.size(), std::memory_order_relaxed);
  }

  void multiply_chosen(const Layer<T>& layer, ExpertBuffers<T>& b, Inputs<T> x, long tokens, long hidden) {
    const long rows = tokens * shape_.per_token;
    const Inputs<T> gathered = b.gathered.get(), inner = b.inner.get();
    const Rows<float> outputs = b.outputs.get();
    pool_.share(rows, 16, [&](long first, long last) {
      for (long r = first; r < last; r++) {
        std::memcpy(gathered.row(r), x.row(b.token[r]), hidden * sizeof(TermOf<T>));
        if (shape_.weighted_inputs)
          multiply_by(gathered.row(r), hidden, [&](long, long) { return broadcast(b.share[r]); });
      }
    });
    each_panel(layer.expert_up, b, gathered, rows, [&](long row, long panel, const float* sums, const Linear<T>& w) {
      put_inner(shape_.gated, activation_, w.bias, panel, sums, inner.row(row) + panel * inner_width(shape_.gated));
    });
    each_panel(layer.expert_down, b, inner, rows, [&](long row, long panel, const float* sums, const Linear<T>& w) {
      put_sums(w.bias, Target{outputs, false}, row, panel, sums);
    });
  }

  // Computes all panels of all chosen experts, shared among the threads.
  template <class Finish>
  void each_panel(const std::vector<Packed<T>>& experts, const ExpertBuffers<T>& b, Inputs<T> x, long rows,
                  Finish&& finish) {
    if (experts[0].matrix.quantized) return each_quantized_panel(experts, b, x, rows, finish);
    const long panels = experts[0].matrix.panels;
    pool_.share(b.num_active.load(std::memory_order_relaxed) * panels, 1, kSideBySide, [&](long first, long last) {
      for (long i = first, some = 1; i < last; i += some) {
        const long expert = b.active[i / panels], p = i % panels, start = b.start[expert];
        const Linear<T>& w = experts[expert].matrix;
        const long end = b.start[expert + 1];
        if (end - start <= kBlockRows) {
          some = std::min(last - i, panels - p);
          multiply_few(end - start, x.row(start), x.stride, w, p, p + some,
                       [&](long row, long panel, const float* sums) { finish(start + row, panel, sums, w); });
          continue;
        }
        some = 1;
        for (long r = start; r < end; r += kPassRows) {
          const auto finish_row = [&](long row, long, const float* sums) { finish(r + row, p, sums, w); };
          Pass<T, decltype(finish_row)>(std::min(kPassRows, end - r), x.row(r), x.stride, finish_row)
              .multiply({w.panel(p), w.terms, p, w.panel(p + 1), false, true}, nullptr);
        }
      }
    });
  }

  // Returns the expert of a sorted row.
  static long expert_of(const ExpertBuffers<T>& b, long row) {
    return std::upper_bound(b.start.begin(), b.start.end(), row) - b.start.begin() - 1;
  }

  // As above, for quantized experts. Rows are prepared once for all experts, whose matrices have the same kind and
  // shape.
  template <class Finish>
  void each_quantized_panel(const std::vector<Packed<T>>& experts, const ExpertBuffers<T>& b, Inputs<T> x, long rows,
                            Finish&& finish) {
    const Linear<T>& like = experts[0].matrix;
    const long panels = like.panels;
    if (like.quantized->order)
      x = order_rows<T>(pool_, x, rows, like.quantized->terms, kept_,
                        [&](long row) { return experts[expert_of(b, row)].matrix.quantized->order; });
    with_kernel<T>(*like.quantized, x, kept_ + ordered_size(rows, like), [&](auto kernel) {
      kernel.prepare(pool_, rows);
      pool_.share(b.num_active.load(std::memory_order_relaxed) * panels, 1, [&](long first, long last) {
        for (long i = first; i < last; i++) {
          const long expert = b.active[i / panels], p = i % panels;
          const Linear<T>& w = experts[expert].matrix;
          multiply_whole(kernel.of(*w.quantized), *w.quantized, b.start[expert], b.start[expert + 1], p,
                         [&](long row, const float* sums) { finish(row, p, sums, w); });
        }
      });
    });
  }

  void run_shared(const Layer<T>& layer, ExpertBuffers<T>& b, Inputs<T> x, long tokens) {
    const Inputs<T> inner = b.shared_inner.get();
    mlp_inner(pool_, layer.shared_up.matrix, shape_.gated, activation_, x, tokens, kept_, inner);
    linear(pool_, layer.shared_down.matrix, inner, tokens, kept_, Target{b.shared_output.get(), false});
    if (layer.shared_gate.matrix)
      linear(pool_, layer.shared_gate.matrix, x, tokens, kept_, Target{b.shared_gate.get(), false});
  }

  // Calls `put(token, panel, sum)` with what the experts of each token have written, weighted and added up.
  template <class Put>
  void combine(ExpertBuffers<T>& b, long tokens, long width, Put&& put) {
    const long k = shape_.per_token;
    const Rows<float> outputs = b.outputs.get();
    pool_.share(tokens, 4, [&](long first, long last) {
      for (long t = first; t < last; t++)
        for (long panel = 0; panel < round_up(width, kPanel) / kPanel; panel++) {
          Vec sum[2] = {};
          for (long i = t * k; i < (t + 1) * k; i++) add(sum, outputs.row(b.place[i]), panel, b.weights[i]);
          put(t, panel, sum);
        }
    });
  }

  void add_shared(const Layer<T>& layer, const ExpertBuffers<T>& b, Vec (&sum)[2], long t, long panel) const {
    const float gate = layer.shared_gate.matrix ? sigmoid(broadcast(*b.shared_gate.get().row(t)))[0] : 1.0f;
    add(sum, b.shared_output.get().row(t), panel, gate);
  }

  static void add(Vec (&sum)[2], const float* row, long panel, float weight) {
    for (long half = 0; half < 2; half++) sum[half] += load(row + panel * kPanel + half * kLanes) * weight;
  }

  Pool& pool_;
  const ExpertShape& shape_;
  const Activation activation_;
  float* const kept_;
};

}  // namespace antiphon
