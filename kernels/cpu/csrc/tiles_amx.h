// Products of tiles on AMX.
#pragma once

#include "tiled_packing.h"

#define ZT_INT8_TILES 1  // there is amx_digits.inc

namespace zt {
namespace ZT_TILES {

constexpr int64_t kStreamTokens = 2;  // tokens up to which rows are read as streams, and
constexpr int64_t kWideTokens = 5;  // tokens of a variant from which +-1 tiles beat look-ups and digits

// Whether W + alpha S is formed for so many tokens of a variant, or what there is of it.
inline bool worth_folding(int64_t tokens, bool, bool) { return tokens >= 128; }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int row_count, int bytes) {
    rows[tile] = uint8_t(row_count);
    row_bytes[tile] = uint16_t(bytes);
  }
};

// Eight full tiles.
inline void use_full_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  _tile_loadconfig(&config);
}
inline void leave_tiles() { _tile_release(); }

// Sums of 32 output rows for up to three tiles of tokens: tiles 0-2 the first 16 rows, 3-5 the others. Tile 6 holds
// weights, 7 activations; the registers behind them are renamed, so each is loaded where it is used.
struct Sums {
  void start(int64_t) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
  }
  // The six tiles, in `c`.
  const float* stored(float* c) const {
    _tile_stored(0, c, 64);
    _tile_stored(1, c + 256, 64);
    _tile_stored(2, c + 512, 64);
    _tile_stored(3, c + 768, 64);
    _tile_stored(4, c + 1024, 64);
    _tile_stored(5, c + 1280, 64);
    return c;
  }
  // 32 columns of 16 rows at a0, and with `two_rows` of 16 more at a1, times tiles of tokens `b_apart` from each other.
  __attribute__((always_inline)) void add(const void* a0, const void* a1, int64_t a_stride, const uint8_t* b,
                                          int64_t b_apart, int64_t tiles, bool two_rows) {
    _tile_loadd(6, a0, a_stride);
    _tile_loadd(7, b, 64);
    _tile_dpbf16ps(0, 6, 7);
    if (tiles > 1) {
      _tile_loadd(7, b + b_apart, 64);
      _tile_dpbf16ps(1, 6, 7);
    }
    if (tiles > 2) {
      _tile_loadd(7, b + 2 * b_apart, 64);
      _tile_dpbf16ps(2, 6, 7);
    }
    if (!two_rows) return;
    _tile_loadd(6, a1, a_stride);
    if (tiles == 1) {
      _tile_dpbf16ps(3, 6, 7);
      return;
    }
    if (tiles > 2) _tile_dpbf16ps(5, 6, 7);
    if (tiles == 2) _tile_dpbf16ps(4, 6, 7);
    if (tiles > 2) {
      _tile_loadd(7, b + b_apart, 64);
      _tile_dpbf16ps(4, 6, 7);
    }
    _tile_loadd(7, b, 64);
    _tile_dpbf16ps(3, 6, 7);
  }
};

// Two tiles of rows at a0 and a1 times up to kFoldTiles tiles of tokens `b_apart` from each other, over `steps` tiles that
// lie one after the other. c: the tiles of the first tokens for a0 and a1, `c_apart` floats on those of the next;
// overwritten if `first`, otherwise added to.
constexpr int64_t kFoldTiles = 2;
inline void multiply_tiles(const uint8_t* a0, const uint8_t* a1, const uint8_t* b, int64_t b_apart, int64_t tiles,
                           int64_t steps, float* c, int64_t c_apart, bool first) {
  const bool two = tiles > 1;
  float* c2 = c + c_apart;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, c, 64);
    _tile_loadd(1, c + 256, 64);
    if (two) {
      _tile_loadd(2, c2, 64);
      _tile_loadd(3, c2 + 256, 64);
    }
  }
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(6, b + s * kTileBytes, 64);
    _tile_loadd(4, a0 + s * kTileBytes, 64);
    _tile_loadd(5, a1 + s * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (two) {
      _tile_loadd(7, b + b_apart + s * kTileBytes, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, 64);
  _tile_stored(1, c + 256, 64);
  if (two) {
    _tile_stored(2, c2, 64);
    _tile_stored(3, c2 + 256, 64);
  }
}

}  // namespace ZT_TILES
}  // namespace zt
