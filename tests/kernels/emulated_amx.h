// AMX's tile registers in software, so that the AMX kernels are tested on processors without them. A tile that is used
// before it is configured ends the process, as on the hardware.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "../../kernels/cpu/csrc/zt.h"

namespace emulated_amx {

struct Tile {
  uint8_t rows = 0;
  uint16_t bytes = 0;
  uint8_t data[16][64] = {};
};
inline thread_local Tile tiles[8];

inline Tile& configured(int tile) {
  if (tiles[tile].rows == 0) std::abort();
  return tiles[tile];
}
template <typename T>
inline T item(const Tile& tile, int row, int place) {
  T value;
  std::memcpy(&value, tile.data[row] + place * sizeof(T), sizeof(T));
  return value;
}

inline void configure(const void* config) {
  const auto* at = static_cast<const uint8_t*>(config);
  for (int i = 0; i < 8; ++i) {
    tiles[i] = {};
    std::memcpy(&tiles[i].bytes, at + 16 + 2 * i, 2);
    tiles[i].rows = at[48 + i];
  }
}
inline void release() {
  for (Tile& tile : tiles) tile = {};
}
inline void zero(int tile) { std::memset(configured(tile).data, 0, sizeof(Tile::data)); }
inline void load(int tile, const void* from, long stride) {
  zero(tile);
  for (int r = 0; r < tiles[tile].rows; ++r)
    std::memcpy(tiles[tile].data[r], static_cast<const uint8_t*>(from) + r * stride, tiles[tile].bytes);
}
inline void store(int tile, void* to, long stride) {
  const Tile& from = configured(tile);
  for (int r = 0; r < from.rows; ++r) std::memcpy(static_cast<uint8_t*>(to) + r * stride, from.data[r], from.bytes);
}
// c[r][n] += sum over k and the `Items` of four bytes: a[r][Items k + j] b[k][Items n + j]. `value` reads one of them.
template <typename Sum, typename Raw, int Items, typename Value>
inline void multiply(int c_tile, int a_tile, int b_tile, Value value) {
  Tile& c = configured(c_tile);
  const Tile &a = configured(a_tile), &b = configured(b_tile);
  Sum from_b[16][Items][16];
  for (int k = 0; k < b.rows; ++k)
    for (int j = 0; j < Items; ++j)
      for (int n = 0; n < b.bytes / 4; ++n) from_b[k][j][n] = value(item<Raw>(b, k, Items * n + j));
  for (int r = 0; r < c.rows; ++r) {
    Sum sum[16];
    std::memcpy(sum, c.data[r], sizeof(sum));
    for (int k = 0; k < a.bytes / 4; ++k)
      for (int j = 0; j < Items; ++j) {
        const Sum from_a = value(item<Raw>(a, r, Items * k + j));
        for (int n = 0; n < c.bytes / 4; ++n) sum[n] += from_a * from_b[k][j][n];
      }
    std::memcpy(c.data[r], sum, sizeof(sum));
  }
}
inline void multiply_bf16(int c, int a, int b) { multiply<float, uint16_t, 2>(c, a, b, zt::bf16_to_f32); }
inline void multiply_int8(int c, int a, int b) {
  multiply<int32_t, int8_t, 4>(c, a, b, [](int8_t value) { return int32_t(value); });
}

}  // namespace emulated_amx

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig(config) emulated_amx::configure(config)
#define _tile_release() emulated_amx::release()
#define _tile_zero(tile) emulated_amx::zero(tile)
#define _tile_loadd(tile, from, stride) emulated_amx::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_amx::store(tile, to, stride)
#define _tile_dpbf16ps(c, a, b) emulated_amx::multiply_bf16(c, a, b)
#define _tile_dpbssd(c, a, b) emulated_amx::multiply_int8(c, a, b)
