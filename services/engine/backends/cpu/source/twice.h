// Vectors that consist of several registers: two halves, each of them a register or again two halves.
//
// The compiler also supports vectors wider than a register, but keeps them in memory. `Twice` has the operators that
// the compiler provides for vectors of one register, so that the same code works on both. A plain number stands for a
// vector filled with it. Used where registers are smaller than vec.h's vectors.
#pragma once

#include <cstring>
#include <type_traits>

namespace antiphon {

template <class Half>
struct Twice {
  typedef std::decay_t<decltype(Half{}[0])> Element;
  typedef Twice<decltype(Half{} < Half{})> Mask;
  static constexpr long kHalf = sizeof(Half) / sizeof(Element);

  Twice() : low{}, high{} {}
  Twice(Half low, Half high) : low(low), high(high) {}
  Twice(Element x) : low(x - Half{}), high(x - Half{}) {}
  // Reinterprets the bits.
  template <class Other>
  explicit Twice(const Twice<Other>& bits) : low((Half)bits.low), high((Half)bits.high) {}

  Element operator[](long i) const { return i < kHalf ? low[i] : high[i - kHalf]; }

  Twice operator-() const { return {-low, -high}; }
  Twice operator~() const { return {~low, ~high}; }
  Twice& operator+=(const Twice& b) { return *this = *this + b; }
  Twice& operator-=(const Twice& b) { return *this = *this - b; }

  friend Twice operator+(const Twice& a, const Twice& b) { return {a.low + b.low, a.high + b.high}; }
  friend Twice operator-(const Twice& a, const Twice& b) { return {a.low - b.low, a.high - b.high}; }
  friend Twice operator*(const Twice& a, const Twice& b) { return {a.low * b.low, a.high * b.high}; }
  friend Twice operator/(const Twice& a, const Twice& b) { return {a.low / b.low, a.high / b.high}; }
  friend Twice operator&(const Twice& a, const Twice& b) { return {a.low & b.low, a.high & b.high}; }
  friend Twice operator|(const Twice& a, const Twice& b) { return {a.low | b.low, a.high | b.high}; }
  friend Twice operator<<(const Twice& a, int bits) { return {a.low << bits, a.high << bits}; }
  friend Twice operator>>(const Twice& a, int bits) { return {a.low >> bits, a.high >> bits}; }
  friend Mask operator<(const Twice& a, const Twice& b) { return {a.low < b.low, a.high < b.high}; }
  friend Mask operator>(const Twice& a, const Twice& b) { return {a.low > b.low, a.high > b.high}; }
  friend Mask operator<=(const Twice& a, const Twice& b) { return {a.low <= b.low, a.high <= b.high}; }
  friend Mask operator>=(const Twice& a, const Twice& b) { return {a.low >= b.low, a.high >= b.high}; }
  friend Mask operator!=(const Twice& a, const Twice& b) { return {a.low != b.low, a.high != b.high}; }

  Half low, high;
};

// The basic functions of vec.h, for vectors of one register, and below for `Twice`, half by half.
template <class V>
struct Parts {
  static V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  static void put(void* to, V v) { std::memcpy(to, &v, sizeof v); }
  template <class From>
  static V convert(From v) {
    return __builtin_convertvector(v, V);
  }
  template <class Mask>
  static V select(Mask mask, V yes, V no) {
    return mask ? yes : no;
  }
};

template <class Half>
struct Parts<Twice<Half>> {
  typedef Twice<Half> V;

  static V load(const void* from) {
    return {Parts<Half>::load(from), Parts<Half>::load((const char*)from + sizeof(Half))};
  }
  static void put(void* to, const V& v) {
    Parts<Half>::put(to, v.low);
    Parts<Half>::put((char*)to + sizeof(Half), v.high);
  }
  template <class From>
  static V convert(const From& v) {
    return {Parts<Half>::convert(v.low), Parts<Half>::convert(v.high)};
  }
  template <class Mask>
  static V select(const Mask& mask, const V& yes, const V& no) {
    return {Parts<Half>::select(mask.low, yes.low, no.low), Parts<Half>::select(mask.high, yes.high, no.high)};
  }
};

}  // namespace antiphon
