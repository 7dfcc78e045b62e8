// Weights of 8 or 4 bits: the meaning of a matrix of each kind, and how it is stored.
//
//     int8          y[n] = scale[n] * sum over k of x[k] * q[n][k]; with groups:
//                   y[n] = sum over groups g of scale[n][g] * sum over k in g of x[k] * (q[n][k] - zero[n][g])
//     int8_dynamic  the same with x in 8 bits too: x[k] = row_scale * i[k], where the largest |i[k]| of a row is 127
//     int4          y[n] = sum over groups g of scale[n][g] * sum over k in g of x[k] * (level[q[n][k]] - zero[n][g])
//     int4_dynamic  the same with x in 8 bits: x[k] = row_scale[g] * i[k], where the largest |i[k]| of a group is 127;
//                   levels are whole numbers from -127 to 127
//
// int8 in groups of 16 terms is multiplied as the numbers that it stands for, rounded to the model's type; see
// quantized_scaled.h. Else products of whole numbers are exact: int8 and whole levels are bfloat16 numbers, scales are applied after the sums,
// in float32, and kinds with x in 8 bits add up in int32. So a row's result does not depend on the rows beside it, on threads or
// on how terms are divided. The error of a sum of n float32 terms is at most (n + 8) 2^-23 times the sum of the terms'
// absolute values; a row in 8 bits has an error of at most half a row_scale times the absolute value of each weight.
// Columns are stored in panels of 32 as in matrix.h.
//
//     8 bits  a panel is [terms / 4][32][4] bytes
//     4 bits  a panel is [terms / 8][32] words; a word's eight terms have their bits at 0, 16, 4, 20, 8, 24, 12, 28, so
//             that a shift gives two consecutive terms of 16 columns where bfloat16 pairs have them; with x in 8 bits,
//             at 0, 8, 16, 24, 4, 12, 20, 28, so that a shift gives four consecutive terms in the word's bytes
#pragma once

#include "matrix.h"

namespace antiphon {

enum class Kind : int64_t { int8, int8_dynamic, int4, int4_dynamic };

// Whether weights have 4 bits, an index among 16 levels.
inline bool has_levels(Kind kind) { return kind == Kind::int4 || kind == Kind::int4_dynamic; }

// How many bytes ahead of the data that is being unpacked memory is prefetched.
constexpr long kPrefetchBytes = 8 << 10;

// Terms of int8_dynamic panels are padded to a multiple of this, a step of the integer tiles; those of the other kinds
// to a multiple of kTermsMultiple.
constexpr long kByteTermsMultiple = 64;
constexpr long kLevels = 16;
// The longest group. It is a multiple of all group sizes, so that parts of matrices are whole groups.
constexpr long kGroupMax = 128;
// The shortest group, of weights of 8 bits; others have at least kTermsMultiple terms.
constexpr long kGroupMin = 16;

// Terms may be stored in another order than that of the inputs, so that terms of a group lie side by side. Rows are then
// copied in this order for a product (see linear.h).
struct Quantized {
  Kind kind = Kind::int8;
  long terms = 0, row_terms = 0;  // padded terms of a panel; of a row
  long panels = 0;                // of this matrix, without those below
  long groups = 1, group = 0;     // `group`: terms of a group; int8 with one scale per column has one group
  const uint8_t* data = nullptr;
  const float* scales = nullptr;                 // [panels][groups][32]
  const float* offsets = nullptr;                // [panels][groups][32], scale * zero; null if there are no zeros
  const int32_t* totals = nullptr;               // int8_dynamic: [panels][32], sum of q
  const int32_t* order = nullptr;                // [terms], the input of each term, -1 for padding; null if terms are inputs
  Quantized* below = nullptr;                    // a matrix of the same inputs whose panels follow; null: there is none
  bool whole_levels = true;                      // level[i] = i - 8
  float levels[kLevels] = {};                    // as given; for products in float32
  alignas(64) uint16_t table[2 * kLevels] = {};  // their bfloat16 bits, rounded, twice; for products in bfloat16

  long bytes(long count) const { return count * kPanel / (has_levels(kind) ? 2 : 1); }
  const uint8_t* panel(long p, long first_term) const { return data + bytes(p * terms + first_term); }
  const float* scale(long p, long g) const { return scales + (p * groups + g) * kPanel; }
  const float* offset(long p, long g) const { return offsets + (p * groups + g) * kPanel; }
  const int32_t* total(long p) const { return totals + p * kPanel; }
};

// What a kernel adds up in one call: rows [first, first + rows) times terms [k, k + terms) of panel p.
struct Part {
  long first, rows, p, k, terms;
};

}  // namespace antiphon
