// LoRA adapters: low-rank products that are added to the products of a layer's matrices.
//
//     y = x Wᵀ + (x Aᵀ) Bᵀ        A [rank][in], B [out][rank]; the adapter's scale is part of B
//
// A slot holds the adapter of some of a step's rows. First the threads share the rows' inner products x Aᵀ; then the
// second product is added where the sums of W's panels are complete, before bias and activation. Each row is computed
// by itself and its sums have a fixed order, so a row's result does not depend on the rows beside it, and rows without
// an adapter are computed as if there were none. W may be quantized.
#pragma once

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlp.h"

namespace antiphon {

// A stacked matrix (query, key, value) has an inner product for each part.
constexpr long kLoraParts = 3;
// Into how many parts the ranks of a row's inner products are divided among threads.
constexpr long kRankParts = 4;
// How many ranks are computed at once, so that a row's numbers are loaded once for all of them.
constexpr long kRanksTogether = 4;

// The ranks that a half of a panel uses, [first, end), and where in B they begin, in vectors of 16 numbers.
struct LoraRange {
  int32_t first, end, place;
};

// What an adapter adds to one matrix. The memory is the caller's.
template <class T>
struct LoraDelta {
  long rank = 0;         // 0: nothing
  const T* a = nullptr;  // [rank][terms], terms as in the matrix: `in` padded with zeros
  // The ranks that the first half of panel 0 uses, each 16 columns in the order of the panel; then those of its second
  // half, of panel 1 and so on.
  const T* b = nullptr;
  const LoraRange* ranges = nullptr;  // [panels][2]

  const LoraRange& range(long panel, long half) const { return ranges[panel * 2 + half]; }
  // Returns what `b` has for panels [first, end).
  std::pair<const T*, const T*> panels(long first, long end) const {
    const LoraRange& last = range(end - 1, 1);
    return {b + range(first, 0).place * kLanes, b + (last.place + last.end - last.first) * kLanes};
  }
};

enum class LoraTarget : long { qkv, o, up, down };

inline LoraTarget lora_target(const std::string& name) {
  static const std::array<std::string, 4> names = {"qkv", "o", "up", "down"};
  for (size_t i = 0; i < names.size(); i++)
    if (name == names[i]) return (LoraTarget)i;
  throw std::invalid_argument("adapters change no matrix " + name);
}

template <class T>
using LoraLayer = std::array<LoraDelta<T>, 4>;

// The rows of a batch (see batch.h) that have adapters.
struct LoraRows {
  std::vector<int64_t> slots;  // of each row; -1: no adapter
  std::vector<long> adapted;   // the rows that have one
  std::vector<long> firsts;    // of each adapter, the first row that has it

  void add(int64_t slot) {
    const long row = (long)slots.size();
    if (slot >= 0) {
      const auto has_it = [&](long first) { return slots[(size_t)first] == slot; };
      const bool again = row > 0 && slots.back() == slot;  // the rows of a prompt follow each other
      if (!again && std::none_of(firsts.begin(), firsts.end(), has_it)) firsts.push_back(row);
      adapted.push_back(row);
    }
    slots.push_back(slot);
  }
  void clear() { slots.clear(), adapted.clear(), firsts.clear(); }
};

// A matrix that adapters change, and the terms of their A for it; without terms none.
struct LoraPlace {
  long layer = 0;
  LoraTarget target = LoraTarget::qkv;
  long terms = 0;
};

// The products of all adapters with one matrix, for the rows of a batch. While the rows are multiplied with W, which
// takes long and few bytes, it prefetches from memory each adapter's B for the panels at hand, and a part of its A for
// the matrix at `next`.
template <class T>
class LoraProduct {
 public:
  LoraProduct(const std::vector<std::vector<LoraLayer<T>>>& slots, const LoraPlace& place, const LoraPlace& next,
              const LoraRows& rows, Rows<float> inner, long panels)
      : slots_(slots), place_(place), next_(next), rows_(rows), inner_(inner), panels_(panels) {}

  // What is prefetched while some panels are multiplied; see NoBackground.
  class Task {
   public:
    Task(const LoraProduct& of, const long* rows, const long* rows_end, long first, long end, long steps)
        : of_(of), rows_(rows), count_(rows_end - rows), first_(first), end_(end) {
      long lines = 0;
      for (long i = 0; i < 2 * count_; i++) {
        const auto stretch = this->stretch(i);
        lines += (stretch.second - stretch.first + 63) / 64;
      }
      lines_ = (lines + steps - 1) / std::max(steps, 1L);
    }

    void step() {
      for (long left = lines_; left > 0; left--, at_ += 64) {
        while (at_ >= at_end_) {
          if (next_ == 2 * count_) return;
          const auto stretch = this->stretch(next_++);
          at_ = stretch.first, at_end_ = stretch.second;
        }
        __builtin_prefetch(at_, 0, 2);
      }
    }

   private:
    // First each adapter's B, then its part of A.
    std::pair<const char*, const char*> stretch(long i) const {
      const bool second = i < count_;
      const long row = rows_[second ? i : i - count_];
      const LoraDelta<T>& delta = second ? of_.of(row, of_.place_) : of_.of(row, of_.next_);
      if (!delta.rank) return {};
      if (second) {
        const auto b = delta.panels(first_, end_);
        return {(const char*)b.first, (const char*)b.second};
      }
      const long lines = (delta.rank * of_.next_.terms * (long)sizeof(T) + 63) / 64;
      const char* const a = (const char*)delta.a;
      return {a + lines * first_ / of_.panels_ * 64, a + lines * end_ / of_.panels_ * 64};
    }

    const LoraProduct& of_;
    const long* const rows_;
    const long count_, first_, end_;
    long lines_ = 0, next_ = 0;
    const char *at_ = nullptr, *at_end_ = nullptr;
  };

  Task begin(long row, long row_end, long first, long end, long steps) const {
    const auto &rows = rows_.firsts;
    const long *all = rows.data(), *all_end = all + rows.size();
    if (first == end) return {*this, all, all, first, end, steps};
    return {*this, std::lower_bound(all, all_end, row), std::lower_bound(all, all_end, row_end), first, end, steps};
  }

  // Computes x Aᵀ for all rows that have adapters; called by every thread. `terms`: those of the matrix.
  void prepare(Pool& pool, Inputs<T> x, long terms) const {
    pool.share((long)rows_.adapted.size() * kRankParts, 1, [&](long first, long last) {
      for (long i = first; i < last; i++) {
        const long row = rows_.adapted[i / kRankParts], part = i % kRankParts;
        const LoraDelta<T>& delta = of(row);
        const long end = delta.rank * (part + 1) / kRankParts;
        for (long r = delta.rank * part / kRankParts; r < end; r += kRanksTogether)
          dots(delta.a + r * terms, x.row(row), terms, std::min(kRanksTogether, end - r), inner_.row(row) + r);
      }
    });
  }

  // Returns the sums of a row and a panel with the adapter's product, in `to` unless the row has none.
  const float* added(long row, long panel, const float* sums, float* to) const {
    if (rows_.slots[row] < 0) return sums;
    const LoraDelta<T>& delta = of(row);
    if (!delta.rank) return sums;
    const float* inner = inner_.row(row);
    for (long half = 0; half < 2; half++) {
      const LoraRange& range = delta.range(panel, half);
      const T* b = delta.b + range.place * kLanes;
      Vec sum = {};
      for (long r = range.first; r < range.end; r++, b += kLanes) sum += broadcast(inner[r]) * load(b);
      store(to + half * kLanes, load(sums + half * kLanes) + sum);
    }
    return to;
  }

 private:
  const LoraDelta<T>& of(long row) const { return of(row, place_); }
  const LoraDelta<T>& of(long row, const LoraPlace& place) const {
    return slots_[rows_.slots[row]][place.layer][(long)place.target];
  }

  static void dots(const T* a, const TermOf<T>* x, long terms, long count, float* to) {
    Vec sums[kRanksTogether] = {};
    for (long k = 0; k < terms; k += kLanes) {
      const Vec v = load(x + k);
      for (long r = 0; r < count; r++) sums[r] += v * load(a + r * terms + k);
    }
    for (long r = 0; r < count; r++) to[r] = sum_lanes(sums[r]);
  }

  const std::vector<std::vector<LoraLayer<T>>>& slots_;
  const LoraPlace place_, next_;
  const LoraRows& rows_;
  const Rows<float> inner_;
  const long panels_;
};

// As `linear` in mlp.h, with adapters.
template <class T>
void linear(Pool& pool, const Linear<T>& w, Inputs<T> x, long rows, float* kept, const Target& target,
            const LoraProduct<T>& lora) {
  lora.prepare(pool, x, w.terms);
  multiply(pool, w, x, rows, kept, [&](long row, long panel, const float* sums) {
    alignas(64) float sum[kPanel];
    put_sums(w.bias, target, row, panel, lora.added(row, panel, sums, sum));
  }, lora);
}

// As `mlp_inner` in mlp.h, with adapters.
template <class T>
void mlp_inner(Pool& pool, const Linear<T>& up, bool gated, const Activation& activation, Inputs<T> x, long rows,
               float* kept, Inputs<T> inner, const LoraProduct<T>& lora) {
  lora.prepare(pool, x, up.terms);
  multiply(pool, up, x, rows, kept, [&](long row, long panel, const float* sums) {
    alignas(64) float sum[kPanel];
    put_inner(gated, activation, up.bias, panel, lora.added(row, panel, sums, sum),
              inner.row(row) + panel * inner_width(gated));
  }, lora);
}

}  // namespace antiphon
