// The products of tiled_linear.inc in parts, for callers that share the work out themselves (`linear`, the decoder).
//
// `Few` holds the packed activations of all groups of few tokens, `Fold` those of one group of many. Both are filled
// once for a product and then used by all workers; the weights come with each call.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "scratch.h"
#include "tiled_lookup.h"

namespace zt {
namespace ZT_TILES {

constexpr int64_t kBlockRows = 32;
constexpr int64_t kAheadBytes = 512 << 10;   // weights fetched ahead of their use
constexpr int64_t kPrefetchWords = 8;        // words looked up between two prefetch steps
constexpr int64_t kPrefetchColumns = kPrefetchWords * kWordColumns;
constexpr int64_t kMostLines = 64;           // cache lines prefetched in one step
constexpr int64_t kWeightStreams = 8, kSignStreams = 2;  // prefetched side by side
constexpr int64_t kMostBlocks = 4;           // blocks of 32 rows in one piece of work
constexpr int64_t kTokenTiles = 3;           // tiles of tokens multiplied with one tile of weights
constexpr int64_t kWideUnit = 16 * kTokenTiles;  // tokens whose signs are expanded once
constexpr int64_t kFoldBytes = 256 << 10;     // folded weights kept in cache at a time
constexpr int64_t kFoldColumns = 640;        // columns folded at a time: 32 tokens of x stay in the first cache
constexpr int64_t kFoldTokens = 1024;        // tokens multiplied with one folded block

// Up to 48 tokens of one variant and one sign plane, in one of three ways:
// wide: bf16 tiles that the base product has packed already; digits: up to four tokens as int8 digit tiles (AMX only);
// lookup: up to four tokens as tables, `tables_bytes` apart.
enum class Way { wide, digits, lookup };
struct SignUnit {
  Way way;
  int64_t variant, plane, first, tokens;  // first: the slot of the first token
  const uint8_t* data;                    // digit tiles or tables
  float unscale[4];
};

// Prefetches one contiguous region, spread evenly over a number of steps, as several streams side by side: the hardware
// fetches ahead within each page. More lines a step than memory delivers would only make the step wait, so the rest is
// left to the hardware.
struct Prefetcher {
  const uint8_t* at = nullptr;
  int64_t apart = 0, left = 0, per_step = 0;  // bytes between streams; lines to ask for, in all and in a step
  int64_t stream = 0, streams = 1;
  void aim(const void* from, int64_t bytes, int64_t steps, int64_t side_by_side) {
    streams = side_by_side;
    at = static_cast<const uint8_t*>(from);
    const int64_t depth = from ? (bytes + 64 * streams - 1) / (64 * streams) : 0;
    apart = 64 * depth;
    left = depth * streams;
    stream = 0;
    per_step = std::min(kMostLines, (left + steps - 1) / std::max<int64_t>(steps, 1));
  }
  void step() {
    if (left <= 0) return;
    for (int64_t i = 0; i < per_step; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(at + stream * apart), _MM_HINT_T1);
      if (++stream == streams) stream = 0, at += 64;
    }
    left -= per_step;
  }
};

// Base tokens when only the delta term is asked for.
inline bool untouched(const Problem& p, const Group& g) { return g.variant < 0 && !p.w; }

inline __mmask16 rows_mask(int64_t rows) { return rows >= 16 ? 0xffff : __mmask16((1u << std::max<int64_t>(rows, 0)) - 1); }

inline __m512 row_scales(const Bank& bank, int64_t v, int64_t p, int64_t n, __mmask16 live) {
  const float* at = bank.row + v * bank.row_v + p * bank.row_p;
  return bank.row_n ? _mm512_maskz_loadu_ps(live, at + n * bank.row_n) : _mm512_maskz_mov_ps(live, _mm512_set1_ps(*at));
}

// ---- groups of few tokens: exact base product plus sign products ------------------------------------------

// Calls use(row, word) with the 64 sign bits from column 64 * step of 32 rows; missing rows and columns are zero.
template <typename F>
inline __attribute__((always_inline)) void each_word(const uint8_t* sign, int64_t ld, int64_t row_bytes, int64_t rows,
                                                     int64_t step, F use) {
  const int64_t byte = step * 8;
  if (rows == kBlockRows && byte + 8 <= row_bytes) {
    const uint8_t* at = sign + byte;
#pragma GCC unroll 32
    for (int64_t r = 0; r < kBlockRows; ++r, at += ld) {
      uint64_t word;
      std::memcpy(&word, at, 8);
      use(r, word);
    }
  } else {
    for (int64_t r = 0; r < kBlockRows; ++r)
      use(r, r < rows ? load_bits(sign + r * ld + byte, row_bytes - byte) : 0);
  }
}

struct Few {
  std::vector<int64_t> slots;  // token numbers; -1 fills up to a tile in front of a wide group
  std::vector<SignUnit> units;
  int64_t token_tiles = 0, steps = 0, padded_k = 0;
  bool tiled_base = false, row_base = false;
  int64_t table_bytes = 0;  // one token's lookup tables
  Buffer x_tiles{0}, x_rows{0}, unit_data{0};

  void prepare(const Problem& p, int64_t fold_tokens);
  void pack_group(const Problem& p, const Group& g, int64_t first, uint8_t*& at, float* scaled);
  static bool wide(const Problem& p, const Group& g) {
    return p.dtype == DType::bf16 && g.variant >= 0 && g.count >= kWideTokens && !p.bank.col;
  }
  void piece(const Problem& p, int64_t n0, int64_t rows, int64_t next_n0, int64_t next_rows, float* acc, uint8_t* scratch) const;
  void base(const Problem& p, int64_t n0, int64_t rows, float* acc, uint8_t* scratch, Prefetcher& ahead) const;
  void digit_signs(const Problem& p, const SignUnit& unit, int64_t n0, int64_t rows, float* acc, uint8_t* scratch, Prefetcher& weights,
                   Prefetcher& bits) const;
  void wide_signs(const Problem& p, const SignUnit& unit, int64_t n0, int64_t rows, float* acc, uint8_t* scratch, Prefetcher& weights,
                  Prefetcher& bits) const;
  void lookup_signs(const Problem& p, const SignUnit& unit, int64_t n0, int64_t rows, float* acc, Prefetcher& weights,
                    Prefetcher& bits) const;
  int64_t unit_steps(const Problem& p, const SignUnit& unit, int64_t blocks) const {
    return blocks * (unit.way == Way::lookup ? (p.k + kPrefetchColumns - 1) / kPrefetchColumns : padded_k / kSignStep);
  }
  // Larger pieces reuse tables more; at least four for each worker keep the cores even, and the weights of the next
  // piece must fit in cache.
  int64_t piece_rows(const Problem& p, int workers) const {
    const int64_t block_bytes = kBlockRows * p.k * size_of(p.dtype);
    const int64_t most_blocks = units.empty() ? 1 : std::min(kMostBlocks, kAheadBytes / block_bytes);
    return std::max<int64_t>(1, std::min(most_blocks, p.n / kBlockRows / (4 * workers))) * kBlockRows;
  }
  float* block_acc(float* acc, int64_t block) const { return acc + block * int64_t(slots.size()) * kBlockRows; }
};

// Columns folded at a time: an even share, so that no thin rest costs a round trip of the sums.
inline int64_t fold_span(int64_t k) {
  const int64_t parts = (k + kFoldColumns - 1) / kFoldColumns;
  return round_up((k + parts - 1) / parts, kBf16Step);
}

// Rows folded at a time: what fits in cache, and at least two pieces for each worker.
inline int64_t fold_rows_of(const Problem& p, int workers) {
  const int64_t fits = std::clamp<int64_t>(kFoldBytes / (fold_span(p.k) * 2) / 32 * 32, 32, 512);
  return std::min(fits, std::max<int64_t>(32, round_up((p.n + 2 * workers - 1) / (2 * workers), 32)));
}

struct Fold {
  const int64_t* tokens;  // numbers of the group's tokens
  int64_t count;
  std::vector<std::pair<int64_t, int64_t>> places;  // slot and plane of each sign matrix to fold in; none: the base
  int64_t steps, tiles, span_steps;                 // span_steps: tiles of 32 columns folded at a time
  Buffer x_tiles;

  Fold(const int64_t* token_numbers, int64_t token_count, int64_t k)
      : tokens(token_numbers),
        count(token_count),
        steps((k + kBf16Step - 1) / kBf16Step),
        tiles((token_count + 15) / 16),
        span_steps(fold_span(k) / kBf16Step),
        x_tiles(tiles * steps * kTileBytes) {}
  void pack_tile(const Problem& p, int64_t tile) const {
    for (int64_t s = 0; s < steps; ++s)
      pack_bf16_tile(p, tokens + tile * 16, std::min<int64_t>(16, count - tile * 16), s * kBf16Step,
                     x_tiles.bytes() + (tile * steps + s) * kTileBytes);
  }
  void fold_row(const Problem& p, int64_t n, int64_t k0, int64_t k1, uint8_t* out) const;
  void block(const Problem& p, int64_t n0, int64_t rows, uint8_t* folded, float* c) const;
  void finish(const Problem& p, int64_t n0, int64_t rows, int64_t tile, const float* c, int64_t row_tiles) const;
};

}  // namespace ZT_TILES
}  // namespace zt
