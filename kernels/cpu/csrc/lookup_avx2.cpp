// Sign products of bf16 by table look-up on AVX2: tiled_lookup.h on 256-bit registers.
//
// A table of sixteen 16-bit sums of four columns is held as its sixteen low and its sixteen high bytes, so that one
// vpshufb looks up 32 output rows in each. Packed bytes of 32 rows are transposed in registers.
#include "decoder.h"

#if defined(__x86_64__)
ZT_BEGIN_TARGET("avx2,fma,f16c")
#include <immintrin.h>

namespace zt {
namespace {

constexpr int64_t kRows = 32;
constexpr int64_t kChunkBytes = 16;          // of each row, transposed at a time
constexpr int64_t kByteTables = 2 * 32;      // tables of the eight columns of one byte
constexpr int64_t kTokens = 8;               // that share a transposed chunk

int64_t table_bytes(int64_t k) { return (k + 7) / 8 * kByteTables; }

// The sixteen signed sums of four columns in units, as low and high bytes.
inline void build_table(const float* x, __m256 scale, const __m256 (&sign)[4][2], uint8_t* table) {
  __m256i entry[2];
  for (int half = 0; half < 2; ++half) {
    __m256 sum = _mm256_mul_ps(sign[0][half], _mm256_set1_ps(x[0]));
    for (int j = 1; j < 4; ++j) sum = _mm256_fmadd_ps(sign[j][half], _mm256_set1_ps(x[j]), sum);
    entry[half] = _mm256_cvtps_epi32(_mm256_mul_ps(sum, scale));
  }
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(entry[0], entry[1]), 0xd8);  // 16 x int16 in order
  const __m256i low = _mm256_and_si256(both, _mm256_set1_epi16(0xff)), high = _mm256_srli_epi16(both, 8);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, high), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(table), bytes);
}

// Tables of one row of x, zero-padded to a multiple of 64 columns. Returns the value of a unit, NaN if x is not finite.
float build(const float* x, int64_t k, uint8_t* tables) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  __m256 top = _mm256_setzero_ps(), check = _mm256_setzero_ps();
  for (int64_t i = 0; i < k; i += 8) {
    const __m256 value = _mm256_loadu_ps(x + i);
    check = _mm256_fmadd_ps(value, _mm256_setzero_ps(), check);  // a NaN from then on if one is not finite
    __m256 sum = _mm256_and_ps(value, magnitude);                // sums of four neighbours
    sum = _mm256_add_ps(sum, _mm256_permute_ps(sum, 0xb1));
    sum = _mm256_add_ps(sum, _mm256_permute_ps(sum, 0x4e));
    top = _mm256_max_ps(top, sum);
  }
  alignas(32) float tops[8], checks[8];
  _mm256_store_ps(tops, top);
  _mm256_store_ps(checks, check);
  float most = 0, bad = 0;
  for (int i = 0; i < 8; ++i) most = most > tops[i] ? most : tops[i], bad += checks[i];
  if (!(bad == 0) || !std::isfinite(most)) {
    std::memset(tables, 0, size_t(table_bytes(k)));
    return NAN;
  }
  const int exponent = entry_exponent(most);
  __m256 sign[4][2];
  for (int j = 0; j < 4; ++j) {
    alignas(32) float pattern[16];
    for (int i = 0; i < 16; ++i) pattern[i] = (i >> j) & 1 ? 1.0f : -1.0f;
    sign[j][0] = _mm256_load_ps(pattern), sign[j][1] = _mm256_load_ps(pattern + 8);
  }
  const __m256 scale = _mm256_set1_ps(std::ldexp(1.0f, -exponent));
  for (int64_t i = 0; i < (k + 7) / 8 * 8; i += 4) build_table(x + i, scale, sign, tables + i * 8);
  return std::ldexp(1.0f, exponent);
}

// The first `bytes` (at most 16) of a row, zeros behind.
inline __m128i load_bytes(const uint8_t* at, int64_t bytes) {
  if (bytes >= 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  if (bytes == 8) return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at));
  alignas(16) uint8_t padded[16] = {};
  std::memcpy(padded, at, size_t(bytes));
  return _mm_load_si128(reinterpret_cast<const __m128i*>(padded));
}

// Column j of 32 rows of 16 bytes to columns[j], rows 0-15 in the low half. Missing rows are zero.
inline void transpose_bytes(const uint8_t* sign, int64_t ld, int64_t rows, int64_t bytes, __m256i (&columns)[16]) {
  __m256i next[16];
  for (int64_t r = 0; r < 16; ++r) {
    const __m128i low = r < rows ? load_bytes(sign + r * ld, bytes) : _mm_setzero_si128();
    const __m128i high = r + 16 < rows ? load_bytes(sign + (r + 16) * ld, bytes) : _mm_setzero_si128();
    columns[r] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  for (int round = 0; round < 4; ++round) {  // each interleaves vector i with i + 8: a rotation of the place's bits
    for (int i = 0; i < 8; ++i) {
      next[2 * i] = _mm256_unpacklo_epi8(columns[i], columns[i + 8]);
      next[2 * i + 1] = _mm256_unpackhi_epi8(columns[i], columns[i + 8]);
    }
    std::memcpy(columns, next, sizeof(next));
  }
}

// Sums of 32 rows: the even and odd ones of rows 0-7 and 16-23, and of 8-15 and 24-31.
struct Sums {
  __m256i even[2], odd[2];
};

// sums += the table entries of `bytes` columns of bytes.
inline void look_up(const __m256i (&columns)[16], int64_t bytes, const uint8_t* tables, Sums& sums) {
  const __m256i nibble = _mm256_set1_epi8(0x0f), first = _mm256_set1_epi32(1), second = _mm256_set1_epi32(1 << 16);
  Sums at = sums;
  for (int64_t j = 0; j < bytes; ++j, tables += kByteTables) {
    const auto table = [&](int64_t i) {
      return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tables) + i));
    };
    const __m256i low = _mm256_and_si256(columns[j], nibble);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(columns[j], 4), nibble);
    const __m256i a0 = _mm256_shuffle_epi8(table(0), low), a1 = _mm256_shuffle_epi8(table(1), low);
    const __m256i b0 = _mm256_shuffle_epi8(table(2), high), b1 = _mm256_shuffle_epi8(table(3), high);
    const __m256i sum[2] = {_mm256_add_epi16(_mm256_unpacklo_epi8(a0, a1), _mm256_unpacklo_epi8(b0, b1)),
                            _mm256_add_epi16(_mm256_unpackhi_epi8(a0, a1), _mm256_unpackhi_epi8(b0, b1))};
    for (int i = 0; i < 2; ++i) {
      at.even[i] = _mm256_add_epi32(at.even[i], _mm256_madd_epi16(sum[i], first));
      at.odd[i] = _mm256_add_epi32(at.odd[i], _mm256_madd_epi16(sum[i], second));
    }
  }
  sums = at;
}

// madd with 1 << 16 takes the odd element times one: an int16 in the upper half of a lane.
inline void store_sums(const Sums& sums, float unit, float* to) {
  const __m256 units = _mm256_set1_ps(unit);
  for (int i = 0; i < 2; ++i) {
    const __m256i low = _mm256_unpacklo_epi32(sums.even[i], sums.odd[i]);   // rows 0-3 and 16-19 of the eight
    const __m256i high = _mm256_unpackhi_epi32(sums.even[i], sums.odd[i]);  // rows 4-7 and 20-23
    const __m256i rows[2] = {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
    for (int half = 0; half < 2; ++half)
      _mm256_storeu_ps(to + 16 * half + 8 * i, _mm256_mul_ps(_mm256_cvtepi32_ps(rows[half]), units));
  }
}

void add(const uint8_t* sign, int64_t sign_ld, int64_t rows, const uint8_t* tables, const float* unit, int64_t tokens,
         int64_t k, const float* scale, int64_t scale_step, float* out, int64_t out_ld) {
  const int64_t row_bytes = (k + 7) / 8, apart = table_bytes(k);
  __m256i columns[16];
  for (int64_t t0 = 0; t0 < tokens; t0 += kTokens) {
    const int64_t some = tokens - t0 < kTokens ? tokens - t0 : kTokens;
    Sums sums[kTokens];
    std::memset(sums, 0, sizeof(sums));
    for (int64_t byte = 0; byte < row_bytes; byte += kChunkBytes) {
      const int64_t bytes = row_bytes - byte < kChunkBytes ? row_bytes - byte : kChunkBytes;
      transpose_bytes(sign + byte, sign_ld, rows, bytes, columns);
      for (int64_t t = 0; t < some; ++t) look_up(columns, bytes, tables + (t0 + t) * apart + byte * kByteTables, sums[t]);
    }
    for (int64_t t = 0; t < some; ++t) {
      alignas(32) float value[kRows];
      store_sums(sums[t], unit[t0 + t], value);
      float* to = out + (t0 + t) * out_ld;
      for (int64_t r = 0; r < rows; ++r) to[r] += scale[r * scale_step] * value[r];
    }
  }
}

const LookupOps ops = {table_bytes, build, add};

}  // namespace

const LookupOps* lookup_ops_for(Path path) { return path == Path::plain ? nullptr : &ops; }

}  // namespace zt

ZT_END_TARGET
#else
namespace zt {
const LookupOps* lookup_ops_for(Path) { return nullptr; }
}  // namespace zt
#endif
