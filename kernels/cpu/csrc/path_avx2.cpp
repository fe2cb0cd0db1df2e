// The row-wise kernels on AVX2 with FMA and F16C: a sign byte becomes an eight-lane mask.
#include "decoder.h"
#include "one_bit.h"
#include "zt.h"

#if defined(__x86_64__)
ZT_BEGIN_TARGET("avx2,fma,f16c")
#include <immintrin.h>

namespace zt {
namespace avx2 {

struct Vec {
  static constexpr int64_t width = 8;
  __m256 v;

  static Vec load(const float* at) { return {_mm256_loadu_ps(at)}; }
  static Vec load_bf16(const uint16_t* at) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
  }
  static Vec load_f16(const uint16_t* at) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)))};
  }
  static void store(float* at, Vec a) { _mm256_storeu_ps(at, a.v); }
  static void store_bf16(uint16_t* at, Vec a) {
    alignas(32) float wide[8];
    _mm256_store_ps(wide, a.v);
    for (int i = 0; i < 8; ++i) at[i] = f32_to_bf16(wide[i]);
  }
  static void store_f16(uint16_t* at, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
  }
  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec fill(float a) { return {_mm256_set1_ps(a)}; }
  static Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
  static Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
  static Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
  static __m256i mask(const uint8_t* bits) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(*bits), lane), lane);
  }
  static Vec add_where(const uint8_t* bits, Vec acc, Vec x) {
    return {_mm256_add_ps(acc.v, _mm256_and_ps(_mm256_castsi256_ps(mask(bits)), x.v))};
  }
  static Vec flip(const uint8_t* bits, Vec x) {
    return {_mm256_xor_ps(x.v, _mm256_andnot_ps(_mm256_castsi256_ps(mask(bits)), _mm256_set1_ps(-0.0f)))};
  }
  static int64_t pack_signs(Vec d, uint8_t* bits) {
    *bits = uint8_t(_mm256_movemask_ps(_mm256_cmp_ps(d.v, _mm256_setzero_ps(), _CMP_GE_OQ)));
    const int zero = _mm256_movemask_ps(_mm256_cmp_ps(d.v, _mm256_setzero_ps(), _CMP_EQ_OQ));
    return __builtin_popcount(unsigned(zero));
  }
  float sum() const {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
  }
  static Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
  static Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
  static Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
  static Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static Vec scale2(Vec a, Vec n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(exponent))};
  }
  static void transpose16(const float* from, int64_t ld, float* to) {
    for (int64_t r = 0; r < 16; ++r)
      for (int64_t c = 0; c < 16; ++c) to[c * 16 + r] = from[r * ld + c];
  }
};

#include "rowwise.inc"
#include "decoder.inc"
#include "one_bit.inc"

}  // namespace avx2
const Ops& ops_avx2() { return avx2::table; }
const RowOps& row_ops_avx2() { return avx2::row_table; }
const CodeOps& code_ops_avx2() { return avx2::code_table; }
}  // namespace zt

ZT_END_TARGET
#else
namespace zt {
const Ops& ops_avx2() { return ops_plain(); }
const RowOps& row_ops_avx2() { return row_ops_plain(); }
const CodeOps& code_ops_avx2() { return code_ops_plain(); }
}  // namespace zt
#endif
