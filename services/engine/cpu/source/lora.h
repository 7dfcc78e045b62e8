// LoRA adapters: low-rank products that are added to the products of a layer's matrices.
//
//     y = x Wᵀ + (x Aᵀ) Bᵀ        A [rank][in], B [out][rank]; the adapter's scale is part of B
//
// A slot holds the adapter of some of a step's rows. First the threads share the rows' inner products x Aᵀ; then the
// second product is added where the sums of W's panels are complete, before bias and activation. Each row is computed
// by itself and its sums have a fixed order, so a row's result does not depend on the rows beside it, and rows without
// an adapter are computed as if there were none. W may be quantized.
#pragma once

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "mlp.h"

namespace antiphon {

// A stacked matrix (query, key, value) has an inner product for each part.
constexpr long kLoraParts = 3;
// Into how many parts the ranks of a row's inner products are divided among threads.
constexpr long kRankParts = 4;
// How many ranks are computed at once, so that a row's numbers are loaded once for all of them.
constexpr long kRanksTogether = 4;

// What an adapter adds to one matrix. The memory is the caller's.
template <class T>
struct LoraDelta {
  long rank = 0;                    // 0: nothing
  const T* a = nullptr;             // [rank][terms], terms as in the matrix: `in` padded with zeros
  const T* b = nullptr;             // [panels][rank][32], columns in the order of the matrix's panels
  const int32_t* ranges = nullptr;  // [panels][2][2]: for each half of a panel, the first rank that is not zero, and the
                                    // one behind the last
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

  void add(int64_t slot) {
    if (slot >= 0) adapted.push_back((long)slots.size());
    slots.push_back(slot);
  }
  void clear() { slots.clear(), adapted.clear(); }
};

// The products of all adapters with one matrix, for the rows of a batch.
template <class T>
class LoraProduct {
 public:
  LoraProduct(const std::vector<std::vector<LoraLayer<T>>>& slots, long layer, LoraTarget target, const LoraRows& rows,
              Rows<float> inner)
      : slots_(slots), layer_(layer), target_(target), rows_(rows), inner_(inner) {}

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
      const int32_t* range = delta.ranges + (panel * 2 + half) * 2;
      const T* b = delta.b + (panel * delta.rank + range[0]) * kPanel + half * kLanes;
      Vec sum = {};
      for (long r = range[0]; r < range[1]; r++, b += kPanel) sum += broadcast(inner[r]) * load(b);
      store(to + half * kLanes, load(sums + half * kLanes) + sum);
    }
    return to;
  }

 private:
  const LoraDelta<T>& of(long row) const { return slots_[rows_.slots[row]][layer_][(long)target_]; }

  static void dots(const T* a, const TermOf<T>* x, long terms, long count, float* to) {
    Vec sums[kRanksTogether] = {};
    for (long k = 0; k < terms; k += kLanes) {
      const Vec v = load(x + k);
      for (long r = 0; r < count; r++) sums[r] += v * load(a + r * terms + k);
    }
    for (long r = 0; r < count; r++) to[r] = sum_lanes(sums[r]);
  }

  const std::vector<std::vector<LoraLayer<T>>>& slots_;
  const long layer_;
  const LoraTarget target_;
  const LoraRows& rows_;
  const Rows<float> inner_;
};

// As `linear` in mlp.h, with adapters.
template <class T>
void linear(Pool& pool, const Linear<T>& w, Inputs<T> x, long rows, float* kept, const Target& target,
            const LoraProduct<T>& lora) {
  lora.prepare(pool, x, w.terms);
  multiply(pool, w, x, rows, kept, [&](long row, long panel, const float* sums) {
    alignas(64) float sum[kPanel];
    put_sums(w.bias, target, row, panel, lora.added(row, panel, sums, sum));
  });
}

// As `mlp_inner` in mlp.h, with adapters.
template <class T>
void mlp_inner(Pool& pool, const Linear<T>& up, bool gated, Activation kind, Inputs<T> x, long rows, float* kept,
               Inputs<T> inner, const LoraProduct<T>& lora) {
  lora.prepare(pool, x, up.terms);
  multiply(pool, up, x, rows, kept, [&](long row, long panel, const float* sums) {
    alignas(64) float sum[kPanel];
    put_inner(gated, kind, up.bias, panel, lora.added(row, panel, sums, sum),
              inner.row(row) + panel * inner_width(gated));
  });
}

}  // namespace antiphon
