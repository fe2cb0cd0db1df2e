// AMX building blocks: tile shapes, packing of activations, expansion of sign bits. Included by path_amx.cpp only.
//
// Weights are the A operand (16 output rows by 64 bytes, straight from row-major memory), activations are the
// B operand (packed once per call), so C is 16 output rows by 16 tokens and one token wastes no weight traffic.
#pragma once

#include "transpose.h"
#include "zt.h"

namespace zt {
namespace amx {

constexpr int64_t kTileRows = 16;      // output rows of one tile
constexpr int64_t kTileTokens = 16;    // tokens of one bf16 tile
constexpr int64_t kBf16Step = 32;      // columns of one bf16 tile
constexpr int64_t kSignStep = 64;      // columns of one int8 tile
constexpr int64_t kDigits = 4;         // int8 digits of one quantised activation
constexpr int64_t kTileBytes = 1024;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  void set(int tile, int row_count, int bytes) {
    rows[tile] = uint8_t(row_count);
    row_bytes[tile] = uint16_t(bytes);
  }
};

// Eight full tiles: C in 0-3, A in 4-5, B in 6-7.
inline void use_full_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  _tile_loadconfig(&config);
}

// C in 0-1 and B in 6 are `tokens` times four columns wide; A in 4-5 is full.
inline void use_sign_tiles(int64_t tokens) {
  TileConfig config;
  const int bytes = int(tokens * kDigits * 4);
  config.set(0, 16, bytes);
  config.set(1, 16, bytes);
  config.set(4, 16, 64);
  config.set(5, 16, 64);
  config.set(6, 16, bytes);
  _tile_loadconfig(&config);
}

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

// Quantise one token's row to four int8 digits of q = round(x * 2^shift), |q| <= 2^30, and lay them out as
// B tiles: row = column quad, four columns (least significant digit first) per token. Returns 2^-shift, or NaN
// when the row is not finite.
inline float pack_digits(const float* x, int64_t k, int64_t slot, int64_t slots, uint8_t* tiles) {
  const int64_t padded = round_up(k, kSignStep);
  __m512 top = _mm512_setzero_ps();
  __mmask16 not_finite = 0;
  for (int64_t i = 0; i < padded; i += 16) {
    const __m512 value = _mm512_loadu_ps(x + i);
    not_finite |= _mm512_fpclass_ps_mask(value, 0x99);  // NaN or infinity
    top = _mm512_max_ps(top, _mm512_abs_ps(value));
  }
  int exponent = 0;
  std::frexp(_mm512_reduce_max_ps(top), &exponent);
  const __m512 up = _mm512_set1_ps(float(30 - exponent));
  const int64_t row_bytes = slots * kDigits * 4;
  const __m512i half = _mm512_set1_epi32(128);
  for (int64_t step = 0; step < padded / kSignStep; ++step) {
    uint8_t* tile = tiles + step * kTileRows * row_bytes + slot * kDigits * 4;
    __m128i digits[4][4];
    for (int64_t part = 0; part < 4; ++part) {
      const __m512 value = _mm512_loadu_ps(x + step * kSignStep + part * 16);
      __m512i q = _mm512_cvtps_epi32(_mm512_scalef_ps(value, up));
      for (int64_t d = 0; d < kDigits; ++d) {
        digits[d][part] = _mm512_cvtepi32_epi8(q);
        q = _mm512_srai_epi32(_mm512_add_epi32(q, half), 8);  // carry of the balanced digit
      }
    }
    // Rows of 16 bytes: four digits of four consecutive columns each, that is a transpose of 4 x 4 dwords.
    for (int64_t part = 0; part < 4; ++part) {
      const __m128i a = _mm_unpacklo_epi32(digits[0][part], digits[1][part]);
      const __m128i b = _mm_unpacklo_epi32(digits[2][part], digits[3][part]);
      const __m128i c = _mm_unpackhi_epi32(digits[0][part], digits[1][part]);
      const __m128i d = _mm_unpackhi_epi32(digits[2][part], digits[3][part]);
      uint8_t* out = tile + part * 4 * row_bytes;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi64(a, b));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + row_bytes), _mm_unpackhi_epi64(a, b));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * row_bytes), _mm_unpacklo_epi64(c, d));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 3 * row_bytes), _mm_unpackhi_epi64(c, d));
    }
  }
  return not_finite ? NAN : std::ldexp(1.0f, exponent - 30);
}

// 64 sign bits to 64 bytes of +1 or -1. The bits are the mask.
inline __m512i expand_signs(uint64_t bits) {
  return _mm512_mask_blend_epi8(bits, _mm512_set1_epi8(-1), _mm512_set1_epi8(1));
}

inline uint64_t load_bits(const uint8_t* at, int64_t bytes) {
  uint64_t bits = 0;
  std::memcpy(&bits, at, size_t(bytes < 8 ? bytes : 8));
  return bits;
}

}  // namespace amx
}  // namespace zt
