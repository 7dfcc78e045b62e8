// Reads floats from the standard input. Writes, for each 8-bit type of the KV cache, their codes, and then what all 256
// codes stand for, in float32 and in bfloat16. The counts are such that no vector is whole at the end.
#include <cstdio>
#include <vector>

#include "float8.h"

using namespace antiphon;

namespace {

template <class Number>
void write(const std::vector<Number>& numbers) {
  fwrite(numbers.data(), sizeof(Number), numbers.size(), stdout);
}

template <class Eight>
void convert_all(const std::vector<float>& given) {
  std::vector<Eight> codes(given.size()), all(256);
  for (size_t i = 0; i < given.size(); i += kLanes) store(&codes[i], load(&given[i]));
  write(codes);
  for (int code = 0; code < 256; code++) all[code].bits = (uint8_t)code;
  std::vector<float> floats(256);
  std::vector<Bf16> halves(256);
  for (long first : {0, 45}) {
    const long count = first ? 256 - first : 45;
    expander<Eight>().expand(&all[first], count, &floats[first]);
    expander<Eight>().expand(&all[first], count, &halves[first]);
  }
  write(floats), write(halves);
}

}  // namespace

int main() {
  std::vector<float> given;
  float some[kLanes];
  while (fread(some, sizeof some, 1, stdin) == 1) given.insert(given.end(), some, some + kLanes);
  convert_all<E4m3>(given);
  convert_all<E5m2>(given);
}
