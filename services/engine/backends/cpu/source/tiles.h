// AMX: eight 1 KiB tile registers, and the product of two of them. Only included where the compiler may use it.
//
// A product takes a tile of rows [m][32] and a tile of pairs [16][16][2] and adds to a tile of sums [m][16]. The number
// of rows is part of the configuration, so that a step of one token costs one row.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace antiphon {

constexpr long kTileRows = 16;
constexpr long kTileTerms = 32;

// Asks the system for permission to use the tile registers, once per process. Returns whether it was granted.
inline bool allow_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// A barrier before tile loads: the compiler does not know what they read, and all stores must come before them.
inline void publish_stores() { asm volatile("" ::: "memory"); }

// A tile configuration: the sums of two blocks of rows in tiles 0..1 and 2..3, rows in 4 and 5, pairs in 6 and 7.
struct TileShape {
  alignas(64) uint8_t bytes[64] = {};

  TileShape(long upper_rows, long lower_rows, long pairs = 16) {
    bytes[0] = 1;
    for (int tile : {0, 1, 4}) set(tile, upper_rows, 64);
    for (int tile : {2, 3, 5}) set(tile, lower_rows ? lower_rows : 1, 64);
    for (int tile : {6, 7}) set(tile, pairs, 64);
    if (pairs < 16)
      for (int tile : {4, 5}) bytes[16 + 2 * tile] = (uint8_t)(4 * pairs);
  }
  void set(int tile, long rows, long row_bytes) {
    bytes[16 + 2 * tile] = (uint8_t)row_bytes;
    bytes[48 + tile] = (uint8_t)rows;
  }
  void use() const { asm volatile("ldtilecfg %0" ::"m"(bytes)); }
};

}  // namespace antiphon
