// Products of tiles without AMX: vdpbf16ps, 32 multiply-adds an instruction.
#pragma once

#include "tiled_packing.h"

#define ZT_INT8_TILES 0

namespace zt {
namespace ZT_TILES {

constexpr int64_t kStreamTokens = 8;               // tokens up to which rows are read as streams
constexpr int64_t kWideTokens = int64_t(1) << 40;  // never: look-ups take less time at any count

// Whether W + alpha S is formed for so many tokens of a variant: it saves their sign products and nothing else.
inline bool worth_folding(int64_t tokens, bool weights, bool signs) { return weights && signs && tokens >= 16; }

inline void use_full_tiles() {}
inline void leave_tiles() {}

// R rows at `a`, `a_ld` bytes apart, times T tiles of tokens, over `steps` tiles. Tiles of c are `c_apart` floats apart.
template <int R, int T>
inline __attribute__((always_inline)) void add_rows(const uint8_t* a, int64_t a_ld, const uint8_t* b, int64_t b_apart,
                                                    int64_t steps, float* c, int64_t c_apart) {
  __m512 sum[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) sum[r][t] = _mm512_load_ps(c + t * c_apart + r * 16);
  for (int64_t s = 0; s < steps; ++s, a += kTileBytes, b += kTileBytes)
    for (int64_t pair = 0; pair < 16; ++pair) {
      __m512bh x[T];
      for (int t = 0; t < T; ++t) x[t] = (__m512bh)_mm512_load_si512(b + t * b_apart + pair * 64);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        int32_t two;
        std::memcpy(&two, a + r * a_ld + pair * 4, 4);
        const auto w = (__m512bh)_mm512_set1_epi32(two);
        for (int t = 0; t < T; ++t) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], x[t], w);
      }
    }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) _mm512_store_ps(c + t * c_apart + r * 16, sum[r][t]);
}

// The same for 16 rows, one step and the first half of one tile: up to eight tokens.
inline void add_half(const uint8_t* a, int64_t a_ld, const uint8_t* b, float* c) {
  __m256 sum[16];
  for (int r = 0; r < 16; ++r) sum[r] = _mm256_load_ps(c + r * 16);
  for (int64_t pair = 0; pair < 16; ++pair) {
    const auto x = (__m256bh)_mm256_load_si256(reinterpret_cast<const __m256i*>(b + pair * 64));
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
      int32_t two;
      std::memcpy(&two, a + r * a_ld + pair * 4, 4);
      sum[r] = _mm256_dpbf16_ps(sum[r], x, (__m256bh)_mm256_set1_epi32(two));
    }
  }
  for (int r = 0; r < 16; ++r) _mm256_store_ps(c + r * 16, sum[r]);
}

inline void add_tiles(const uint8_t* a, int64_t a_ld, const uint8_t* b, int64_t b_apart, int64_t tiles, int64_t steps,
                      float* c, int64_t c_apart) {
  if (tiles == 1) return add_rows<16, 1>(a, a_ld, b, b_apart, steps, c, c_apart);
  for (int64_t r = 0; r < 16; r += 8)
    if (tiles == 2)
      add_rows<8, 2>(a + r * a_ld, a_ld, b, b_apart, steps, c + r * 16, c_apart);
    else
      add_rows<8, 3>(a + r * a_ld, a_ld, b, b_apart, steps, c + r * 16, c_apart);
}

// Sums of 32 output rows for up to three tiles of tokens: tiles 0-2 the first 16 rows, 3-5 the others.
struct Sums {
  alignas(64) float c[6 * 256];
  bool half = false;

  void start(int64_t tokens) {
    const int64_t tiles = tokens > 32 ? 3 : (tokens + 15) / 16;
    for (int64_t rows = 0; rows < 2; ++rows) std::memset(c + rows * 3 * 256, 0, size_t(tiles * kTileBytes));
    half = tokens <= 8;
  }
  // The six tiles, of which only those of tokens and rows that were added hold anything.
  const float* stored(float*) const { return c; }
  // 32 columns of 16 rows at a0, and with `two_rows` of 16 more at a1, times tiles of tokens `b_apart` from each other.
  void add(const void* a0, const void* a1, int64_t a_stride, const uint8_t* b, int64_t b_apart, int64_t tiles,
           bool two_rows) {
    for (int rows = 0; rows < (two_rows ? 2 : 1); ++rows) {
      const auto* a = static_cast<const uint8_t*>(rows ? a1 : a0);
      float* to = c + rows * 3 * 256;
      if (half)
        add_half(a, a_stride, b, to);
      else
        add_tiles(a, a_stride, b, b_apart, tiles, 1, to, 256);
    }
  }
};

// Two tiles of rows at a0 and a1 times up to kFoldTiles tiles of tokens `b_apart` from each other, over `steps` tiles that
// lie one after the other. c: the tiles of the first tokens for a0 and a1, `c_apart` floats on those of the next;
// overwritten if `first`, otherwise added to.
constexpr int64_t kFoldTiles = 3;
inline void multiply_tiles(const uint8_t* a0, const uint8_t* a1, const uint8_t* b, int64_t b_apart, int64_t tiles,
                           int64_t steps, float* c, int64_t c_apart, bool first) {
  for (int64_t t = 0; first && t < tiles; ++t) std::memset(c + t * c_apart, 0, 2 * kTileBytes);
  add_tiles(a0, 64, b, b_apart, tiles, steps, c, c_apart);
  add_tiles(a1, 64, b, b_apart, tiles, steps, c + 256, c_apart);
}

}  // namespace ZT_TILES
}  // namespace zt
