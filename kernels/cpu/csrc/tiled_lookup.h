// The lookup-table product for one token of a variant (after T-MAC, arXiv 2407.00088).
//
// For every four columns the sixteen signed sums of x are formed once as 16-bit integers. Packed words of 32 output
// rows, transposed in registers, then index them: one vpermw does 32 x 4 multiply-adds. Tables are scaled so that two
// entries add up within 16 bits; sums over columns are 32-bit.
#pragma once

#include <array>

#include "tiled_packing.h"

namespace zt {
namespace ZT_TILES {

constexpr int64_t kWordColumns = 16;                    // columns of one packed word
constexpr int64_t kTableBytes = 4 * 16 * 2;             // the four tables of one word
constexpr int64_t kChunkWords = 32;                     // words of one chunk: 64 bytes of every row
constexpr int64_t kChunkColumns = kChunkWords * kWordColumns;

// Tables of one row of x (zero-padded to whole words). Returns the value of one table unit, NaN if x is not finite.
inline float build_tables(const float* x, int64_t words, uint8_t* tables) {
  __m512 top = _mm512_setzero_ps();
  __mmask16 not_finite = 0;
  for (int64_t w = 0; w < words; ++w) {
    const __m512 value = _mm512_loadu_ps(x + w * kWordColumns);
    not_finite |= _mm512_fpclass_ps_mask(value, 0x99);  // NaN or infinity
    __m512 sum = _mm512_abs_ps(value);                  // sums of four neighbours
    sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
    sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0x4e));
    top = _mm512_max_ps(top, sum);
  }
  const int exponent = entry_exponent(_mm512_reduce_max_ps(top));
  const __m512 down = _mm512_set1_ps(float(-exponent));
  __m512 sign[4];
  for (int j = 0; j < 4; ++j) {
    alignas(64) float pattern[16];
    for (int i = 0; i < 16; ++i) pattern[i] = (i >> j) & 1 ? 1.0f : -1.0f;
    sign[j] = _mm512_load_ps(pattern);
  }
  for (int64_t group = 0; group < words * 4; ++group) {
    const float* at = x + group * 4;
    __m512 sum = _mm512_mul_ps(sign[0], _mm512_set1_ps(at[0]));
    for (int j = 1; j < 4; ++j) sum = _mm512_fmadd_ps(sign[j], _mm512_set1_ps(at[j]), sum);
    const __m512i entry = _mm512_cvtps_epi32(_mm512_scalef_ps(sum, down));
    _mm256_store_si256(reinterpret_cast<__m256i*>(tables + group * 32), _mm512_cvtepi32_epi16(entry));
  }
  return not_finite ? NAN : std::ldexp(1.0f, exponent);
}

// Where rows 0, 8, 16 and 24 of a block of 32 begin.
using EightRows = std::array<const uint8_t*, 4>;

// The last eight bytes of 32 rows as four words: what is left of a chunk when K is 64 above a multiple of 512.
inline void transpose_four_words(const EightRows& sign, int64_t ld, __m512i* words) {
  const __m512i row = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(ld));
  __m512i rows[4];
  for (int64_t i = 0; i < 4; ++i) rows[i] = _mm512_i64gather_epi64(row, sign[i], 1);
  // Lanes 0-15: word 0 of sixteen rows; lanes 16-31: their word 1. Adding 2 gives words 2 and 3.
  const __m512i first = _mm512_set_epi16(61, 57, 53, 49, 45, 41, 37, 33, 29, 25, 21, 17, 13, 9, 5, 1, 60, 56, 52, 48,
                                         44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);
  for (int64_t w = 0; w < 4; w += 2) {
    const __m512i index = _mm512_add_epi16(first, _mm512_set1_epi16(int16_t(w)));
    const __m512i low = _mm512_permutex2var_epi16(rows[0], index, rows[1]);
    const __m512i high = _mm512_permutex2var_epi16(rows[2], index, rows[3]);
    words[w] = _mm512_shuffle_i64x2(low, high, 0x44);
    words[w + 1] = _mm512_shuffle_i64x2(low, high, 0xee);
  }
}

// One chunk of 32 sign rows as words[w]: word w of rows 0 .. 31. Missing rows and bytes are zero. Row r lies at
// sign[r / 8] + (r % 8) * ld.
inline void transpose_words(const EightRows& sign, int64_t ld, int64_t rows, int64_t bytes, __m512i* words) {
  if (bytes == 8 && rows >= 32) return transpose_four_words(sign, ld, words);
  __m512i low[16], high[16];
  const __mmask64 live = bytes >= 64 ? ~0ull : (1ull << bytes) - 1;
  for (int64_t pair = 0; pair < 16; ++pair) {
    const int64_t r = 2 * pair;
    const uint8_t* at = sign[r / 8] + (r % 8) * ld;
    const __m512i a = r < rows ? _mm512_maskz_loadu_epi8(live, at) : _mm512_setzero_si512();
    const __m512i b = r + 1 < rows ? _mm512_maskz_loadu_epi8(live, at + ld) : _mm512_setzero_si512();
    low[pair] = _mm512_unpacklo_epi16(a, b);
    high[pair] = _mm512_unpackhi_epi16(a, b);
  }
  transpose(low);
  transpose(high);
  for (int64_t j = 0; j < 16; ++j) {
    words[j / 4 * 8 + j % 4] = low[j];
    words[j / 4 * 8 + 4 + j % 4] = high[j];
  }
}

// even / odd[i] += the table sums of rows 2i and 2i + 1 over `count` words.
inline __attribute__((always_inline)) void lookup_some(const __m512i* words, int64_t count, const uint8_t* tables,
                                                       __m512i& even, __m512i& odd) {
  const __m512i first = _mm512_set1_epi32(1), second = _mm512_set1_epi32(1 << 16);
  __m512i even2 = _mm512_setzero_si512(), odd2 = _mm512_setzero_si512();
#pragma GCC unroll 8
  for (int64_t w = 0; w < count; ++w) {
    const auto* table = reinterpret_cast<const __m256i*>(tables + w * kTableBytes);
    const __m512i t0 = _mm512_broadcast_i64x4(_mm256_load_si256(table));
    const __m512i t1 = _mm512_broadcast_i64x4(_mm256_load_si256(table + 1));
    const __m512i t2 = _mm512_broadcast_i64x4(_mm256_load_si256(table + 2));
    const __m512i t3 = _mm512_broadcast_i64x4(_mm256_load_si256(table + 3));
    const __m512i a = _mm512_permutexvar_epi16(words[w], t0);
    const __m512i b = _mm512_permutexvar_epi16(_mm512_srli_epi16(words[w], 4), t1);
    const __m512i c = _mm512_permutexvar_epi16(_mm512_srli_epi16(words[w], 8), t2);
    const __m512i d = _mm512_permutexvar_epi16(_mm512_srli_epi16(words[w], 12), t3);
    const __m512i ab = _mm512_add_epi16(a, b), cd = _mm512_add_epi16(c, d);
    even = _mm512_dpwssd_epi32(even, ab, first);
    odd = _mm512_dpwssd_epi32(odd, ab, second);
    even2 = _mm512_dpwssd_epi32(even2, cd, first);
    odd2 = _mm512_dpwssd_epi32(odd2, cd, second);
  }
  even = _mm512_add_epi32(even, even2);
  odd = _mm512_add_epi32(odd, odd2);
}

// The same; the usual counts are unrolled.
inline void lookup_words(const __m512i* words, int64_t count, const uint8_t* tables, __m512i& even, __m512i& odd) {
  if (count == 8) return lookup_some(words, 8, tables, even, odd);
  if (count == 4) return lookup_some(words, 4, tables, even, odd);
  for (int64_t w = 0; w < count; ++w) lookup_some(words + w, 1, tables + w * kTableBytes, even, odd);
}

// Even and odd rows to 32 floats in order.
inline void weave_rows(__m512i even, __m512i odd, __m512& first, __m512& second) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  first = _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(even, low, odd));
  second = _mm512_cvtepi32_ps(_mm512_permutex2var_epi32(even, high, odd));
}

}  // namespace ZT_TILES
}  // namespace zt
