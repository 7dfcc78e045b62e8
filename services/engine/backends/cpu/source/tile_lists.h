// The tiles of a step's attention, in the order in which the threads take them.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "pool.h"

namespace antiphon {

// Fewer rows of latents do not share the work of making values of a unit's keys.
constexpr long kLatentRows = 8;

// The tiles of layers with `group` query heads for each key head. `singles`: the only token of a span gets tiles of
// several heads, which lie side by side in each block of the cache.
class TileList {
 public:
  TileList(long kv_heads, long group, long threads, bool singles, bool latent)
      : group(group), kv_heads_(kv_heads), threads_(threads), singles_(singles), latent_(latent) {}

  bool is_for(long kv_heads, long query_heads) const { return kv_heads == kv_heads_ && query_heads == group; }

  // `asked_tokens`: those whose final hidden states are requested; `all_asked`: they are all tokens.
  void list(const std::vector<Span>& spans, long tokens, const std::vector<int64_t>& asked_tokens, bool all_asked) {
    all.clear();
    // Prompts: all rows with one key head come before those with the next; the last rows, which see the most keys, come
    // first.
    const long most = tile_rows(tokens);
    for (long head = 0; head < kv_heads_; head++)
      for (const Span& span : spans) {
        if (alone(span)) continue;
        const long rows = span.count * group;
        for (long row = (rows - 1) / most * most; row >= 0; row -= most)
          all.push_back({&span, head, 1, row, std::min(most, rows - row)});
      }
    const long parts = single_row_parts(spans);
    for (const Span& span : spans) {
      if (!alone(span)) continue;
      for (long part = 0; part < parts; part++) {
        const long first = kv_heads_ * part / parts;
        all.push_back({&span, first, kv_heads_ * (part + 1) / parts - first, 0, group});
      }
    }
    list_asked(tokens, asked_tokens, all_asked);
  }

  const long group;
  std::vector<Tile> all, asked;  // of all tokens; of the last layer

 private:
  bool alone(const Span& span) const { return singles_ && span.count == 1; }

  // Returns how many rows a tile has at most. Over latents, the heads of a few tokens are divided among the threads.
  long tile_rows(long tokens) const {
    if (!latent_) return kTile;
    const long fair = (tokens * group + threads_ - 1) / threads_;
    return std::min(round_up(fair, kLatentRows), kTile);
  }

  // Returns into how many tiles the heads of a single token are divided: as few as keep all threads busy until the end.
  long single_row_parts(const std::vector<Span>& spans) const {
    const long single = std::count_if(spans.begin(), spans.end(), [this](const Span& span) { return alone(span); });
    const long least = (kv_heads_ + kHeadsTogether - 1) / kHeadsTogether;
    return std::min(std::max(least, 8 * threads_ / std::max(single, 1L)), kv_heads_);
  }

  // Lists the tiles of the last layer. Tokens that are not requested only need their keys and values there. Tiles of
  // single tokens are listed in any case, because they write the keys and values of their token.
  void list_asked(long tokens, const std::vector<int64_t>& asked_tokens, bool all_asked) {
    if (all_asked) {
      asked = all;
      return;
    }
    std::vector<char> wanted(tokens);
    for (const int64_t t : asked_tokens) wanted[t] = 1;
    asked.clear();
    for (const Tile& tile : all) {
      const long first = tile.span->first + tile.first_row / group;
      const long last = tile.span->first + (tile.first_row + tile.rows - 1) / group;
      if (alone(*tile.span) || std::any_of(&wanted[first], &wanted[last] + 1, [](char is) { return is; }))
        asked.push_back(tile);
    }
  }

  long kv_heads_, threads_;
  bool singles_, latent_;
};

}  // namespace antiphon
