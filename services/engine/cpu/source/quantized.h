// Weights in 8 or 4 bits: what a matrix of each kind means and how it lies in memory.
//
//     int8          y[n] = scale[n] * sum over k of x[k] * q[n][k]
//     int8_dynamic  the same with x in 8 bits too: x[k] = row_scale * i[k], the largest i of a row being 127 in size
//     int4          y[n] = sum over groups g of scale[n][g] * sum over k in g of x[k] * (level[q[n][k]] - zero[n][g])
//
// Products of whole numbers are exact: int8 and whole levels are bfloat16 numbers, scales come in after the sums, in
// float32, and int8_dynamic adds up in int32. So a row's result does not depend on the rows beside it, on threads or on
// how terms are cut up. A sum of n float32 terms is off by at most (n + 8) 2^-23 of the sum of their sizes; a row in 8
// bits by half a row_scale for each weight, times its size. Columns lie in panels of 32 as in matrix.h.
//
//     8 bits  a panel is [terms / 4][32][4] bytes
//     4 bits  a panel is [terms / 8][32] words; a word's eight terms have their bits at 0, 16, 4, 20, 8, 24, 12, 28, so
//             that a shift gives two consecutive terms of 16 columns where bfloat16 pairs have them
#pragma once

#include "matrix.h"

namespace antiphon {

enum class Kind : int64_t { int8, int8_dynamic, int4 };

// How far ahead of what is being unpacked memory is asked for.
constexpr long kPrefetchBytes = 8 << 10;

// Terms of 8-bit panels are padded to a step of the integer tiles, those of 4-bit ones to a word.
constexpr long kByteTermsMultiple = 64;
constexpr long kLevels = 16;
// The longest group: a multiple of all, so that parts of matrices are whole groups.
constexpr long kGroupMax = 128;

struct Quantized {
  Kind kind = Kind::int8;
  long terms = 0, row_terms = 0;  // of a panel, of a row with its padding
  long groups = 1, group = 0;     // `group`: terms of one
  const uint8_t* data = nullptr;
  const float* scales = nullptr;                 // [panels][groups][32]
  const float* offsets = nullptr;                // [panels][groups][32], scale * zero, or null: there are no zeros
  const int32_t* totals = nullptr;               // [panels][32], sum of q: of int8_dynamic
  bool whole_levels = true;                      // level[i] = i - 8
  float levels[kLevels] = {};                    // numbers that bfloat16 has
  alignas(64) uint16_t table[2 * kLevels] = {};  // their bits, twice

  long bytes(long count) const { return count * kPanel / (kind == Kind::int4 ? 2 : 1); }
  const uint8_t* panel(long p, long first_term) const { return data + bytes(p * terms + first_term); }
  const float* scale(long p, long g) const { return scales + (p * groups + g) * kPanel; }
  const float* offset(long p, long g) const { return offsets + (p * groups + g) * kPanel; }
  const int32_t* total(long p) const { return totals + p * kPanel; }
};

// What a kernel adds up at once: rows [first, first + rows) times terms [k, k + terms) of panel p.
struct Part {
  long first, rows, p, k, terms;
};

}  // namespace antiphon
