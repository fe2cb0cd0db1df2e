// A transpose in AVX-512 registers. Included under an instruction-set pragma: needs avx512f.
#pragma once

#include <immintrin.h>

namespace zt {

// In-register transpose of 16 x 16 dwords.
inline void transpose(__m512i (&m)[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(m[2 * i], m[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(m[2 * i], m[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    m[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    m[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    m[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    m[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(m[i], m[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(m[i], m[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(m[8 + i], m[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(m[8 + i], m[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    m[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    m[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    m[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    m[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

}  // namespace zt
