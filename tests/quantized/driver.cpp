// Runs quantized matrices of odd sizes, each alone on one thread and together on several, under sanitizers.
//
//     driver [threads]
//
// Rows and weights lie in memory that ends where they end; with -Wl,--wrap=mmap,--wrap=munmap,--wrap=madvise the library's
// own memory comes from the heap too. Prints what was run; exits with 1 where a result is far from the plain sum, or where
// a row's depends on the rows beside it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../native/heap.h"
#include "linear.h"
#include "quantized_pack.h"

namespace {

using namespace antiphon;

std::mt19937 random_bits(7);

// A weight as a checkpoint has it, and the numbers that it stands for.
struct Weight {
  antiphon_Quantized given = {};
  long out, in;
  std::vector<uint8_t> bytes;
  std::vector<float> scales, zeros, plain;
  std::vector<int32_t> order;

  // With `reversed`, the terms are stored in the reversed order of the inputs.
  Weight(Kind kind, long out, long in, long group, bool with_zeros, bool reversed)
      : out(out), in(in), plain(out * in) {
    const bool nibbles = has_levels(kind);
    for (long k = 0; k < in && reversed; k++) order.push_back((int32_t)(in - 1 - k));
    const long width = nibbles ? (in + 1) / 2 : in, groups = group ? (in + group - 1) / group : 1;
    for (long i = 0; i < out * width; i++) bytes.push_back((uint8_t)random_bits());
    for (long i = 0; i < out * groups; i++) scales.push_back((float)(random_bits() % 100 + 1) * 1e-3f);
    for (long i = 0; i < out * groups && with_zeros; i++) zeros.push_back((float)(random_bits() % 16));
    given = {(int64_t)kind, group, nibbles, 0, in, bytes.data(), scales.data(), with_zeros ? zeros.data() : nullptr, nullptr,
             reversed ? order.data() : nullptr};
    for (long n = 0; n < out; n++)
      for (long k = 0; k < in; k++) {
        const long g = n * groups + (group ? k / group : 0);
        const float place = (float)(bytes[n * width + (nibbles ? k / 2 : k)] >> (k % 2 * 4) & 15);
        const float number = nibbles ? place - (with_zeros ? zeros[g] : 8.0f) : (float)(int8_t)bytes[n * width + k];
        plain[n * in + (reversed ? in - 1 - k : k)] = number * scales[g];
      }
  }
};

template <class T>
class Run {
 public:
  Run(Pool& pool, const Weight& weight) : pool_(pool), weight_(weight), panels_(round_up(weight.out, kPanel) / kPanel) {
    std::vector<long> rows(panels_ * kPanel);
    for (long n = 0; n < (long)rows.size(); n++) rows[n] = n < weight.out ? n : -1;
    packed_ = std::make_unique<PackedQuantized>(pool, stock_, weight.given, rows, weight.in);
    linear_.out = weight.out, linear_.in = weight.in, linear_.panels = panels_;
    linear_.terms = round_up(weight.in, kTermsMultiple);
    linear_.quantized = &packed_->quantized;
  }

  // y [rows][panels * 32]
  std::vector<float> multiply(const std::vector<TermOf<T>>& x, long rows) {
    std::vector<float> kept(kept_size(rows, linear_)), y(rows * panels_ * kPanel);
    const Inputs<T> from{const_cast<TermOf<T>*>(x.data()), linear_.terms};
    pool_.run([&](int) {
      antiphon::multiply(pool_, linear_, from, rows, kept.data(), [&](long row, long panel, const float* sums) {
        std::memcpy(&y[(row * panels_ + panel) * kPanel], sums, kPanel * sizeof(float));
      });
    });
    return y;
  }

  std::vector<TermOf<T>> random_rows(long rows) const {
    std::vector<TermOf<T>> x(rows * linear_.terms, TermOf<T>{});
    for (long r = 0; r < rows; r++)
      for (long k = 0; k < weight_.in; k++) assign(x[r * linear_.terms + k], (float)(random_bits() % 2001) / 1000 - 1);
    return x;
  }

  bool close(const std::vector<TermOf<T>>& x, const std::vector<float>& y, long rows) const {
    // Weights in groups of 16 are rounded to the type of the rows.
    const bool rounds = packed_->quantized.group < kTermsMultiple && sizeof(TermOf<T>) < sizeof(float);
    const double share = packed_->quantized.kind == Kind::int8_dynamic || packed_->quantized.kind == Kind::int4_dynamic ? 1.0 / 127 : rounds ? 1.0 / 256 : 1e-5;
    for (long r = 0; r < rows; r++)
      for (long n = 0; n < weight_.out; n++) {
        double sum = 0, size = 1e-6;
        for (long k = 0; k < weight_.in; k++) {
          const double term = (double)to_float(x[r * linear_.terms + k]) * weight_.plain[n * weight_.in + k];
          sum += term, size += std::fabs(weight_.plain[n * weight_.in + k]);
        }
        if (!(std::fabs(sum - y[r * panels_ * kPanel + n]) <= share * size)) return false;
      }
    return true;
  }

  long columns() const { return panels_ * kPanel; }
  long terms() const { return linear_.terms; }

 private:
  Pool& pool_;
  const Weight& weight_;
  const long panels_;
  Stock stock_;
  std::unique_ptr<PackedQuantized> packed_;
  Linear<T> linear_;
};

template <class T>
bool check(Pool& alone, Pool& pool, const Weight& weight, long rows) {
  Run<T> one(alone, weight), many(pool, weight);
  const std::vector<TermOf<T>> x = many.random_rows(rows);
  const std::vector<float> y = many.multiply(x, rows);
  bool good = many.close(x, y, rows);
  for (long r = 0; r < rows; r += 1 + rows / 3) {
    const std::vector<TermOf<T>> row(x.begin() + r * one.terms(), x.begin() + (r + 1) * one.terms());
    good &= !std::memcmp(one.multiply(row, 1).data(), &y[r * one.columns()], one.columns() * sizeof(float));
  }
  std::printf("kind %d, %ld x %ld, group %ld, %ld rows of %zu bytes: %s\n", (int)weight.given.kind, weight.out, weight.in,
              (long)weight.given.group, rows, sizeof(T), good ? "good" : "WRONG");
  return good;
}

}  // namespace

int main(int count, char** arguments) {
#if defined(__AMX_BF16__)
  if (!allow_tiles()) return 2;
#endif
  Pool alone(1), pool(count > 1 ? std::atoi(arguments[1]) : 3);
  bool good = true;
  const long sizes[][3] = {{1, 1, 1}, {33, 50, 5}, {40, 131, 70}, {7, 2100, 270}};
  for (const auto& size : sizes)
    for (const Kind kind : {Kind::int8, Kind::int8_dynamic, Kind::int4, Kind::int4_dynamic})
      for (const long group : {0L, 16L, 32L, 64L, 128L, 4096L}) {
        if (has_levels(kind) ? !group || group == 16 : kind == Kind::int8_dynamic ? group > 0 : group == 64) continue;
        for (const bool reversed : {false, true}) {
          if (reversed && group != 32) continue;
          const Weight weight(kind, size[0], size[1], group, has_levels(kind) && group != 64, reversed);
          good &= check<Bf16>(alone, pool, weight, size[2]) & check<float>(alone, pool, weight, size[2]);
        }
      }
  return good ? 0 : 1;
}
