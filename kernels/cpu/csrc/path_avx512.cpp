// The row-wise kernels on AVX-512: the packed bits are the mask register.
#include "decoder.h"
#include "one_bit.h"
#include "zt.h"

#if defined(__x86_64__)
ZT_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")
#include "transpose.h"

namespace zt {
namespace avx512 {

struct Vec {
  static constexpr int64_t width = 16;
  __m512 v;

  static Vec load(const float* at) { return {_mm512_loadu_ps(at)}; }
  static Vec load_bf16(const uint16_t* at) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  static Vec load_f16(const uint16_t* at) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)))};
  }
  static void store(float* at, Vec a) { _mm512_storeu_ps(at, a.v); }
  static void store_bf16(uint16_t* at, Vec a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  static void store_f16(uint16_t* at, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
  }
  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec fill(float a) { return {_mm512_set1_ps(a)}; }
  static Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
  static Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
  static Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
  static __mmask16 mask(const uint8_t* bits) {
    uint16_t value;
    std::memcpy(&value, bits, 2);
    return value;
  }
  static Vec add_where(const uint8_t* bits, Vec acc, Vec x) {
    return {_mm512_mask_add_ps(acc.v, mask(bits), acc.v, x.v)};
  }
  static Vec flip(const uint8_t* bits, Vec x) {
    return {_mm512_mask_sub_ps(x.v, __mmask16(~mask(bits)), _mm512_setzero_ps(), x.v)};
  }
  static int64_t pack_signs(Vec d, uint8_t* bits) {
    const uint16_t set = _mm512_cmp_ps_mask(d.v, _mm512_setzero_ps(), _CMP_GE_OQ);
    std::memcpy(bits, &set, 2);
    return __builtin_popcount(_mm512_cmp_ps_mask(d.v, _mm512_setzero_ps(), _CMP_EQ_OQ));
  }
  float sum() const { return _mm512_reduce_add_ps(v); }
  static Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
  static Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
  static Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
  static Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static Vec scale2(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
  static void transpose16(const float* from, int64_t ld, float* to) {
    __m512i m[16];
    for (int64_t r = 0; r < 16; ++r) m[r] = _mm512_loadu_si512(from + r * ld);
    transpose(m);
    for (int64_t r = 0; r < 16; ++r) _mm512_storeu_si512(to + r * 16, m[r]);
  }
};

#include "rowwise.inc"
#include "decoder.inc"
#include "one_bit.inc"

}  // namespace avx512
const Ops& ops_avx512() { return avx512::table; }
const RowOps& row_ops_avx512() { return avx512::row_table; }
const CodeOps& code_ops_avx512() { return avx512::code_table; }
}  // namespace zt

ZT_END_TARGET
#else
namespace zt {
const Ops& ops_avx512() { return ops_plain(); }
const RowOps& row_ops_avx512() { return row_ops_plain(); }
const CodeOps& code_ops_avx512() { return code_ops_plain(); }
}  // namespace zt
#endif
