// Tile shapes and the packing of activations.
//
// Weights are the A operand (16 output rows by 64 bytes, straight from row-major memory), activations are the
// B operand (packed once per call), so C is 16 output rows by 16 tokens and one token wastes no weight traffic.
#pragma once

#include "transpose.h"
#include "zt.h"

namespace zt {
namespace ZT_TILES {

constexpr int64_t kTileRows = 16;      // output rows of one tile
constexpr int64_t kTileTokens = 16;    // tokens of one bf16 tile
constexpr int64_t kBf16Step = 32;      // columns of one bf16 tile
constexpr int64_t kSignStep = 64;      // columns of one int8 tile
constexpr int64_t kDigits = 4;         // int8 digits of one quantised activation
constexpr int64_t kTileBytes = 1024;

inline __mmask32 columns_mask(int64_t left) {
  return left >= 32 ? 0xffffffffu : (1u << left) - 1;
}

// One bf16 B tile: rows are column pairs, columns are tokens. Missing tokens and columns are zero.
inline void pack_bf16_tile(const Problem& p, const int64_t* tokens, int64_t count, int64_t k0, uint8_t* tile) {
  __m512i m[16];
  const __mmask32 live = columns_mask(p.k - k0);
  for (int64_t t = 0; t < 16; ++t)
    m[t] = t < count && tokens[t] >= 0 ? _mm512_maskz_loadu_epi16(live, static_cast<const uint16_t*>(p.x) + tokens[t] * p.x_ld + k0)
                     : _mm512_setzero_si512();
  transpose(m);
  for (int64_t r = 0; r < 16; ++r) _mm512_storeu_si512(tile + r * 64, m[r]);
}

inline uint64_t load_bits(const uint8_t* at, int64_t bytes) {
  uint64_t bits = 0;
  std::memcpy(&bits, at, size_t(bytes < 8 ? bytes : 8));
  return bits;
}

}  // namespace ZT_TILES
}  // namespace zt
