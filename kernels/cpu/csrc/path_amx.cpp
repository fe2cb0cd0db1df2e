// The AMX kernels: bf16 base product and one-bit delta in one pass over row blocks.
//
// Per block of 32 output rows the bf16 weight tiles are read once for all tokens; each variant's sign rows are
// expanded to +-1 int8 tiles in cache and multiplied with four int8 digits of its tokens' activations (an exact
// 31-bit fixed-point product), scaled and added. Groups with many tokens instead fold W + alpha S to bf16
// tiles in cache and do one product. See kernels/bitdelta_linear/README.md for byte counts.
#include "zt.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

#include "pool.h"
#define ZT_AMX_TARGET \
  "amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx512vnni,fma,f16c,bmi2"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target(ZT_AMX_TARGET))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx512vnni,fma,f16c,bmi2")
#endif
#include "amx_linear.h"

namespace zt {
namespace amx {

// ---- groups of few tokens: exact base product plus digit product -----------------------------------------

void Few::prepare(const Problem& p, int64_t fold_tokens) {
  const Ops& ops = ops_avx512();
  steps = (p.k + kBf16Step - 1) / kBf16Step;
  padded_k = round_up(p.k, kSignStep);
  int64_t unit_count = 0;
  bool any_wide = false, any_rows = p.w && p.dtype != DType::bf16;
  std::vector<std::pair<Group, int64_t>> placed;  // group and its first slot
  for (const Group& g : p.groups) {
    if (g.count >= fold_tokens || untouched(p, g)) continue;
    if (wide(p, g)) {
      slots.resize(size_t(round_up(int64_t(slots.size()), kTileTokens)), -1);
      any_wide = true;
    } else if (g.variant >= 0) {
      unit_count += (g.count + 3) / 4 * p.bank.planes;
      any_rows = true;
    }
    placed.emplace_back(g, int64_t(slots.size()));
    slots.insert(slots.end(), p.order.begin() + g.begin, p.order.begin() + g.begin + g.count);
  }
  const int64_t count = int64_t(slots.size());
  if (count == 0) return;
  tiled_base = p.w && p.dtype == DType::bf16;
  row_base = p.w && p.dtype != DType::bf16;
  token_tiles = (count + 15) / 16;
  if (tiled_base || any_wide) {
    x_tiles = Buffer(token_tiles * steps * kTileBytes);
    for (int64_t t = 0; t < token_tiles; ++t)
      for (int64_t s = 0; s < steps; ++s)
        pack_bf16_tile(p, slots.data() + t * 16, std::min<int64_t>(16, count - t * 16), s * kBf16Step,
                       x_tiles.bytes() + (t * steps + s) * kTileBytes);
  }
  if (any_rows) {
    x_rows = Buffer((count + 1) * padded_k * 4);
    for (int64_t t = 0; t < count; ++t) {
      float* row = x_rows.floats() + t * padded_k;
      std::fill(row, row + padded_k, 0.0f);
      if (slots[size_t(t)] >= 0)
        ops.to_f32(p.dtype, static_cast<const uint8_t*>(p.x) + slots[size_t(t)] * p.x_ld * size_of(p.dtype), p.k, row);
    }
  }
  table_bytes = padded_k / kWordColumns * kTableBytes;
  unit_data = Buffer(unit_count * 4 * std::max(table_bytes, padded_k * kDigits));
  uint8_t* at = unit_data.bytes();
  for (const auto& [group, first] : placed)
    if (group.variant >= 0) pack_group(p, group, first, at, x_rows.floats() + count * padded_k);
}

// Appends the units of one group; `at` is where the next digit tiles or tables go, `scaled` one row of scratch.
void Few::pack_group(const Problem& p, const Group& g, int64_t first, uint8_t*& at, float* scaled) {
  if (wide(p, g)) {
    for (int64_t plane = 0; plane < p.bank.planes; ++plane)
      for (int64_t t0 = 0; t0 < g.count; t0 += kWideUnit)
        units.push_back({Way::wide, g.variant, plane, first + t0, std::min(kWideUnit, g.count - t0), nullptr, {}});
    return;
  }
  for (int64_t t0 = 0; t0 < g.count; t0 += 4) {
    const int64_t some = std::min<int64_t>(4, g.count - t0);
    for (int64_t plane = 0; plane < p.bank.planes; ++plane) {
      const Way way = p.dtype == DType::bf16 ? Way::lookup : Way::digits;
      SignUnit unit{way, g.variant, plane, first + t0, some, at, {}};
      const float* col = p.bank.col_scale(g.variant, plane);
      if (!col && plane > 0) {  // the same activations as plane 0
        unit.data = units.back().data;
        std::copy_n(units.back().unscale, 4, unit.unscale);
      } else {
        for (int64_t t = 0; t < some; ++t) {
          const float* row = x_rows.floats() + (first + t0 + t) * padded_k;
          if (col) {
            for (int64_t i = 0; i < p.k; ++i) scaled[i] = row[i] * col[i];
            std::fill(scaled + p.k, scaled + padded_k, 0.0f);
            row = scaled;
          }
          unit.unscale[t] = way == Way::lookup ? build_tables(row, padded_k / kWordColumns, at + t * table_bytes)
                                               : pack_digits(row, p.k, t, some, at);
        }
        at += some * (way == Way::lookup ? table_bytes : padded_k * kDigits);
      }
      units.push_back(unit);
    }
  }
}

// Sums of 32 output rows for up to three tiles of tokens: tiles 0-2 the first 16 rows, 3-5 the others. Tile 6 holds
// weights, 7 activations; the registers behind them are renamed, so each is loaded where it is used.
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
}
inline void store_sums(float* c) {
  _tile_stored(0, c, 64);
  _tile_stored(1, c + 256, 64);
  _tile_stored(2, c + 512, 64);
  _tile_stored(3, c + 768, 64);
  _tile_stored(4, c + 1024, 64);
  _tile_stored(5, c + 1280, 64);
}
// Tiles of tokens done together, of `left`: four are two and two.
inline int64_t tiles_at_once(int64_t left) { return left <= kTokenTiles ? left : left == 4 ? 2 : kTokenTiles; }

inline __attribute__((always_inline)) void add_products(const void* a0, const void* a1, int64_t a_stride,
                                                        const uint8_t* b, int64_t b_apart, int64_t tiles,
                                                        bool two_rows) {
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

// acc[t][r] = sum_k w[n0 + r, k] x[t, k] through bf16 tiles.
void Few::base(const Problem& p, int64_t n0, int64_t rows, float* acc, uint8_t* scratch, Prefetcher& ahead) const {
  const auto* w = static_cast<const uint16_t*>(p.w);
  const int64_t stride = p.w_ld * 2;
  const bool two_rows = rows > 16;
  float* c_out = reinterpret_cast<float*>(scratch + 2 * kTileBytes);
  for (int64_t t = 0, some; t < token_tiles; t += some) {
    some = tiles_at_once(token_tiles - t);
    const uint8_t* b = x_tiles.bytes() + t * steps * kTileBytes;
    zero_sums();
    for (int64_t s = 0; s < steps; ++s) {
      const void* a0 = w + n0 * p.w_ld + s * kBf16Step;
      const void* a1 = w + (n0 + 16) * p.w_ld + s * kBf16Step;
      int64_t a_stride = stride;
      if (rows < kBlockRows || (s + 1) * kBf16Step > p.k) {  // the edge of the matrix: a zero-padded copy
        const __mmask32 live = columns_mask(p.k - s * kBf16Step);
        for (int64_t r = 0; r < kBlockRows; ++r)
          _mm512_store_si512(scratch + r * 64,
                             r < rows ? _mm512_maskz_loadu_epi16(live, w + (n0 + r) * p.w_ld + s * kBf16Step)
                                      : _mm512_setzero_si512());
        a0 = scratch;
        a1 = scratch + kTileBytes;
        a_stride = 64;
      }
      if (t == 0) ahead.step();
      add_products(a0, a1, a_stride, b + s * kTileBytes, steps * kTileBytes, some, two_rows);
    }
    store_sums(c_out);
    for (int64_t tile = 0; tile < some; ++tile)
      for (int64_t half = 0; half < 2; ++half) {
        const float* c = c_out + (half * kTokenTiles + tile) * 256;
        __m512i m[16];
        for (int64_t r = 0; r < 16; ++r) m[r] = _mm512_load_si512(c + r * 16);
        transpose(m);
        const int64_t first = (t + tile) * 16, live = std::min<int64_t>(16, int64_t(slots.size()) - first);
        for (int64_t i = 0; i < live; ++i) _mm512_store_si512(acc + (first + i) * kBlockRows + half * 16, m[i]);
      }
  }
}

// Calls use(row, word) with the 64 sign bits from column 64 * step of 32 rows; missing rows and columns are zero.
template <typename F>
inline __attribute__((always_inline)) void each_word(const uint8_t* sign, int64_t ld, int64_t row_bytes, int64_t rows,
                                                     int64_t step, F use) {
  const int64_t byte = step * 8;
  if (rows == kBlockRows && byte + 8 <= row_bytes) {
    const uint8_t* at = sign + byte;
#pragma GCC unroll 32
    for (int64_t r = 0; r < kBlockRows; ++r, at += ld) {
      uint64_t word;
      std::memcpy(&word, at, 8);
      use(r, word);
    }
  } else {
    for (int64_t r = 0; r < kBlockRows; ++r)
      use(r, r < rows ? load_bits(sign + r * ld + byte, row_bytes - byte) : 0);
  }
}

// acc[t][r] += row_scale[n0 + r] * sum_k s[n0 + r, k] x[t, k] for the unit's tokens. Signs are expanded `kLag` steps
// ahead of their use, so that the tile loads find them in cache and not in the store queue.
void Few::digit_signs(const Problem& p, const SignUnit& unit, int64_t n0, int64_t rows, float* acc, uint8_t* scratch,
                      Prefetcher& weights, Prefetcher& bits) const {
  constexpr int64_t kLag = 4, kRing = 8;
  const Bank& bank = p.bank;
  const uint8_t* sign = bank.sign_row(unit.variant, unit.plane, n0);
  const int64_t sign_steps = padded_k / kSignStep;
  const int64_t b_stride = unit.tokens * kDigits * 4;
  const bool two_rows = rows > 16;
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t s = 0; s < sign_steps + kLag; ++s) {
    if (s < sign_steps) {
      uint8_t* a = scratch + s % kRing * 2 * kTileBytes;
      each_word(sign, bank.sign_n, bank.row_bytes, rows, s,
                [&](int64_t r, uint64_t word) { _mm512_store_si512(a + r * 64, expand_signs(word)); });
      weights.step();
      bits.step();
    }
    if (s >= kLag) {
      const uint8_t* a = scratch + (s - kLag) % kRing * 2 * kTileBytes;
      _tile_loadd(6, unit.data + (s - kLag) * kTileRows * b_stride, b_stride);
      _tile_loadd(4, a, 64);
      _tile_dpbssd(0, 4, 6);
      if (two_rows) {
        _tile_loadd(5, a + kTileBytes, 64);
        _tile_dpbssd(1, 5, 6);
      }
    }
  }
  auto* c = reinterpret_cast<int32_t*>(scratch);
  _tile_stored(0, c, b_stride);
  _tile_stored(1, c + 16 * unit.tokens * kDigits, b_stride);
  // Digits to floats: a 4 x 4 transpose in each 128-bit lane leaves row 4j + l in lane l, place j.
  const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (int64_t half = 0; half < (two_rows ? 2 : 1); ++half) {
    const __m512 scale = row_scales(bank, unit.variant, unit.plane, n0 + half * 16, rows_mask(rows - half * 16));
    for (int64_t t = 0; t < unit.tokens; ++t) {
      const int32_t* from = c + half * 16 * unit.tokens * kDigits + t * kDigits;
      const int64_t ld = unit.tokens * kDigits;
      __m512i z[4];
      for (int64_t i = 0; i < 4; ++i) {
        const auto* at = from + 4 * i * ld;
        z[i] = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
        z[i] = _mm512_inserti32x4(z[i], _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + ld)), 1);
        z[i] = _mm512_inserti32x4(z[i], _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 2 * ld)), 2);
        z[i] = _mm512_inserti32x4(z[i], _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 3 * ld)), 3);
      }
      const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpacklo_epi32(z[2], z[3]);
      const __m512i d = _mm512_unpackhi_epi32(z[0], z[1]), e = _mm512_unpackhi_epi32(z[2], z[3]);
      __m512 sum = _mm512_cvtepi32_ps(_mm512_unpackhi_epi64(d, e));
      sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(_mm512_unpacklo_epi64(d, e)));
      sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(_mm512_unpackhi_epi64(a, b)));
      sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(_mm512_unpacklo_epi64(a, b)));
      sum = _mm512_mul_ps(_mm512_permutexvar_ps(in_order, sum), _mm512_set1_ps(unit.unscale[t]));
      float* to = acc + (unit.first + t) * kBlockRows + half * 16;
      _mm512_store_ps(to, _mm512_fmadd_ps(sum, scale, _mm512_load_ps(to)));
    }
  }
}

// As digit_signs, for up to 48 tokens: +-1 in bf16 times the activations, exact products, float32 sums.
void Few::wide_signs(const Problem& p, const SignUnit& unit, int64_t n0, int64_t rows, float* acc, uint8_t* scratch,
                     Prefetcher& weights, Prefetcher& bits) const {
  constexpr int64_t kLag = 2, kRing = 4;
  const Bank& bank = p.bank;
  const uint8_t* sign = bank.sign_row(unit.variant, unit.plane, n0);
  const int64_t sign_steps = padded_k / kSignStep;
  const bool two_rows = rows > 16;
  const int64_t tiles = (unit.tokens + 15) / 16;
  const uint8_t* b = x_tiles.bytes() + unit.first / 16 * steps * kTileBytes;
  const __m512i plus = _mm512_set1_epi16(0x3f80), minus = _mm512_set1_epi16(int16_t(0xbf80));
  zero_sums();
  for (int64_t s = 0; s < sign_steps + kLag; ++s) {
    if (s < sign_steps) {  // two tiles of 32 rows: columns 0-31, then 32-63
      uint8_t* a = scratch + s % kRing * 4 * kTileBytes;
      each_word(sign, bank.sign_n, bank.row_bytes, rows, s, [&](int64_t r, uint64_t word) {
        _mm512_store_si512(a + r * 64, _mm512_mask_blend_epi16(__mmask32(word), minus, plus));
        _mm512_store_si512(a + 2 * kTileBytes + r * 64, _mm512_mask_blend_epi16(__mmask32(word >> 32), minus, plus));
      });
      weights.step();
      bits.step();
    }
    for (int64_t half = 0; half < 2 && s >= kLag; ++half) {
      const int64_t step = 2 * (s - kLag) + half;
      if (step >= steps) break;
      const uint8_t* a = scratch + (s - kLag) % kRing * 4 * kTileBytes + half * 2 * kTileBytes;
      add_products(a, a + kTileBytes, 64, b + step * kTileBytes, steps * kTileBytes, tiles, two_rows);
    }
  }
  float* sums = reinterpret_cast<float*>(scratch);
  store_sums(sums);
  for (int64_t half = 0; half < 2; ++half) {
    const __m512 scale = row_scales(bank, unit.variant, unit.plane, n0 + half * 16, rows_mask(rows - half * 16));
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const float* c = sums + (half * kTokenTiles + tile) * 256;
      __m512i m[16];
      for (int64_t r = 0; r < 16; ++r) m[r] = _mm512_load_si512(c + r * 16);
      transpose(m);
      for (int64_t i = 0; i < std::min<int64_t>(16, unit.tokens - tile * 16); ++i) {
        float* to = acc + (unit.first + tile * 16 + i) * kBlockRows + half * 16;
        _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_castsi512_ps(m[i]), scale, _mm512_load_ps(to)));
      }
    }
  }
}

// As digit_signs by table look-up, for all rows of a piece: one chunk of the tables serves every block of rows.
void Few::lookup_signs(const Problem& p, const SignUnit& unit, int64_t n0, int64_t rows, float* acc, Prefetcher& weights,
                       Prefetcher& bits) const {
  const Bank& bank = p.bank;
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  __m512i words[kChunkWords], sums[kMostBlocks][4][2];
  for (auto& block : sums)
    for (auto& token : block) token[0] = token[1] = _mm512_setzero_si512();
  for (int64_t k0 = 0; k0 < p.k; k0 += kChunkColumns) {
    const int64_t left_bytes = bank.row_bytes - k0 / 8;
    const int64_t count = std::min<int64_t>(kChunkWords, (left_bytes + 1) / 2);
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* sign = bank.sign_row(unit.variant, unit.plane, n0 + b * kBlockRows) + k0 / 8;
      const int64_t ld8 = 8 * bank.sign_n;
      transpose_words({sign, sign + ld8, sign + 2 * ld8, sign + 3 * ld8}, bank.sign_n, rows - b * kBlockRows,
                      left_bytes, words);
      for (int64_t t = 0; t < unit.tokens; ++t)
        for (int64_t word = 0; word < count; word += kPrefetchWords) {
          if (t == 0) {
            weights.step();
            bits.step();
          }
          const uint8_t* tables = unit.data + t * table_bytes + (k0 / kWordColumns + word) * kTableBytes;
          lookup_words(words + word, std::min(kPrefetchWords, count - word), tables, sums[b][t][0], sums[b][t][1]);
        }
    }
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = n0 + b * kBlockRows, live = rows - b * kBlockRows;
    const __m512 scale0 = row_scales(bank, unit.variant, unit.plane, at, rows_mask(live));
    const __m512 scale1 = row_scales(bank, unit.variant, unit.plane, at + 16, rows_mask(live - 16));
    for (int64_t t = 0; t < unit.tokens; ++t) {
      __m512 first, second;
      weave_rows(sums[b][t][0], sums[b][t][1], first, second);
      const __m512 unscale = _mm512_set1_ps(unit.unscale[t]);
      float* to = block_acc(acc, b) + (unit.first + t) * kBlockRows;
      _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_mul_ps(first, unscale), scale0, _mm512_load_ps(to)));
      _mm512_store_ps(to + 16, _mm512_fmadd_ps(_mm512_mul_ps(second, unscale), scale1, _mm512_load_ps(to + 16)));
    }
  }
}

inline __m512 load_bf16(const uint16_t* from, __mmask16 live) {
  const __m256i narrow = _mm256_maskz_loadu_epi16(live, from);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// Adds y and bias as the problem asks, and stores up to 32 outputs of one token.
static void store_row(const Problem& p, int64_t token, int64_t n0, int64_t rows, const float* value) {
  if (p.y_f32) {
    float* y = static_cast<float*>(p.y) + token * p.y_ld + n0;
    for (int64_t r = 0; r < rows; r += 16) {
      const __mmask16 live = rows_mask(rows - r);
      __m512 out = _mm512_load_ps(value + r);
      if (p.add) out = _mm512_add_ps(out, _mm512_maskz_loadu_ps(live, y + r));
      _mm512_mask_storeu_ps(y + r, live, out);
    }
    return;
  }
  if (p.dtype == DType::bf16) {
    auto* y = static_cast<uint16_t*>(p.y) + token * p.y_ld + n0;
    const auto* bias = p.bias ? static_cast<const uint16_t*>(p.bias) + n0 : nullptr;
    for (int64_t r = 0; r < rows; r += 16) {
      const __mmask16 live = rows_mask(rows - r);
      __m512 out = _mm512_load_ps(value + r);
      if (p.add) out = _mm512_add_ps(out, load_bf16(y + r, live));
      if (bias) out = _mm512_add_ps(out, load_bf16(bias + r, live));
      _mm256_mask_storeu_epi16(y + r, live, (__m256i)_mm512_cvtneps_pbh(out));
    }
    return;
  }
  const Ops& ops = ops_avx512();
  const int64_t item = size_of(p.dtype);
  alignas(64) float out[kBlockRows];
  alignas(64) float other[kBlockRows];
  auto* y = static_cast<uint8_t*>(p.y) + (token * p.y_ld + n0) * item;
  std::memcpy(out, value, size_t(rows) * 4);
  if (p.add) {
    ops.to_f32(p.dtype, y, rows, other);
    for (int64_t r = 0; r < rows; ++r) out[r] += other[r];
  }
  if (p.bias) {
    ops.to_f32(p.dtype, static_cast<const uint8_t*>(p.bias) + n0 * item, rows, other);
    for (int64_t r = 0; r < rows; ++r) out[r] += other[r];
  }
  ops.from_f32(p.dtype, out, rows, y);
}

// Output rows n0 .. n0 + rows for all tokens. What the next step needs is prefetched while this one computes.
void Few::piece(const Problem& p, int64_t n0, int64_t rows, int64_t next_n0, int64_t next_rows, float* acc, uint8_t* scratch) const {
  const int64_t item = size_of(p.dtype), blocks = (rows + kBlockRows - 1) / kBlockRows;
  const auto* w = static_cast<const uint8_t*>(p.w);
  Prefetcher weights, bits;
  use_full_tiles();
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t at = n0 + b * kBlockRows, live = std::min(kBlockRows, n0 + rows - at);
    if (w && units.empty()) {  // with units, the weights of the next piece are fetched beside the sign products
      const int64_t then = b + 1 == blocks ? next_n0 : at + kBlockRows;
      const int64_t then_rows = std::min(kBlockRows, b + 1 == blocks ? next_rows : n0 + rows - then);
      weights.aim(then_rows > 0 ? w + then * p.w_ld * item : nullptr, then_rows * p.w_ld * item, steps, kWeightStreams);
    }
    if (tiled_base) {
      base(p, at, live, block_acc(acc, b), scratch, weights);
    } else {
      std::fill_n(block_acc(acc, b), slots.size() * kBlockRows, 0.0f);
      if (row_base)
        ops_avx512().dots(p.dtype, w + at * p.w_ld * item, p.w_ld, live, x_rows.floats(), padded_k,
                          int64_t(slots.size()), p.k, block_acc(acc, b), kBlockRows);
    }
  }
  int64_t steps_left = 0;
  for (const SignUnit& unit : units) steps_left += unit_steps(p, unit, blocks);
  if (w && next_rows > 0)
    weights.aim(w + next_n0 * p.w_ld * item, next_rows * p.w_ld * item, steps_left, kWeightStreams);
  int64_t shaped_for = 0;
  for (size_t u = 0; u < units.size(); ++u) {
    const SignUnit& unit = units[u];
    const bool last = u + 1 == units.size();
    const SignUnit& then = units[last ? 0 : u + 1];
    const int64_t then_rows = last ? next_rows : rows;
    bits.aim(then_rows > 0 ? p.bank.sign_row(then.variant, then.plane, last ? next_n0 : n0) : nullptr,
             then_rows * p.bank.sign_n, unit_steps(p, unit, blocks), kSignStreams);
    if (unit.way == Way::lookup) {
      lookup_signs(p, unit, n0, rows, acc, weights, bits);
      continue;
    }
    const int64_t shape = unit.way == Way::digits ? unit.tokens : 0;
    if (shape != shaped_for) shape ? use_sign_tiles(shape) : use_full_tiles();
    shaped_for = shape;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t at = n0 + b * kBlockRows, live = std::min(kBlockRows, n0 + rows - at);
      if (unit.way == Way::digits)
        digit_signs(p, unit, at, live, block_acc(acc, b), scratch, weights, bits);
      else
        wide_signs(p, unit, at, live, block_acc(acc, b), scratch, weights, bits);
    }
  }
  for (int64_t b = 0; b < blocks; ++b)
    for (size_t t = 0; t < slots.size(); ++t)
      if (slots[t] >= 0)
        store_row(p, slots[t], n0 + b * kBlockRows, std::min(kBlockRows, rows - b * kBlockRows),
                  block_acc(acc, b) + int64_t(t) * kBlockRows);
}

// ---- groups of many tokens: fold W + alpha S into bf16 tiles, then one product ---------------------------

// 32 weights as two float vectors (even and odd columns), and back with one dithered rounding.
inline void split_bf16(__m512i row, __m512& even, __m512& odd) {
  even = _mm512_castsi512_ps(_mm512_slli_epi32(row, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(row, _mm512_set1_epi32(int(0xffff0000u))));
}
// The thresholds of 32 columns, 16 bits each; add `kNextColumns` for the 32 columns after them.
inline __m512i thresholds_at(int64_t column) {
  alignas(64) uint16_t values[32];
  for (int64_t j = 0; j < 32; ++j) values[j] = uint16_t(uint32_t(column + j) * kGolden);
  return _mm512_load_si512(values);
}
constexpr short kNextColumns = short(uint16_t(32 * kGolden));
inline __m512i join_bf16(__m512 even, __m512 odd, __m512i thresholds) {
  const __m512i low = _mm512_add_epi32(_mm512_castps_si512(even), _mm512_and_si512(thresholds, _mm512_set1_epi32(0xffff)));
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), _mm512_srli_epi32(thresholds, 16));
  return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(low, 16), high);
}
// value + step where the bit is set, value - step where it is clear.
inline __m512 add_signed(__m512 value, __m512 step, uint32_t set) {
  return _mm512_mask_add_ps(_mm512_sub_ps(value, step), __mmask16(set), value, step);
}

// Columns k0 .. k1 of row n as rows of tiles 1 KiB apart. W + alpha S is formed in float32 and rounded once.
void Fold::fold_row(const Problem& p, int64_t n, int64_t k0, int64_t k1, uint8_t* out) const {
  const auto* w = p.w ? static_cast<const uint16_t*>(p.w) + n * p.w_ld : nullptr;
  const Bank& bank = p.bank;
  int64_t k = k0;
  __m512i thresholds = thresholds_at(k0);
  const __m512i next = _mm512_set1_epi16(kNextColumns);
  if (w && places.size() == 1 && !bank.col) {  // the common case, whole tiles only
    const uint8_t* sign = bank.sign_row(places[0].first, places[0].second, n);
    const __m512 scale = _mm512_set1_ps(bank.row_scale(places[0].first, places[0].second, n));
    const int64_t whole = std::min(k1, p.k / kBf16Step * kBf16Step);
    for (; k < whole; k += kBf16Step, out += kTileBytes) {
      _mm_prefetch(reinterpret_cast<const char*>(w + k + 4 * p.w_ld), _MM_HINT_T0);  // the rows folded next
      uint32_t set;
      std::memcpy(&set, sign + k / 8, 4);
      __m512 even, odd;
      split_bf16(_mm512_loadu_si512(w + k), even, odd);
      even = add_signed(even, scale, _pext_u32(set, 0x55555555u));
      odd = add_signed(odd, scale, _pext_u32(set, 0xaaaaaaaau));
      _mm512_store_si512(out, join_bf16(even, odd, thresholds));
      thresholds = _mm512_add_epi16(thresholds, next);
    }
  }
  const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
  for (; k < k1; k += kBf16Step, out += kTileBytes) {
    const __mmask32 live = columns_mask(p.k - k);
    __m512i row = _mm512_setzero_si512();  // without a base product the delta alone is folded
    if (w) {
      row = _mm512_maskz_loadu_epi16(live, w + k);
      _mm_prefetch(reinterpret_cast<const char*>(w + k + 4 * p.w_ld), _MM_HINT_T0);
    }
    if (places.empty()) {
      _mm512_store_si512(out, row);
      continue;
    }
    __m512 even, odd;
    split_bf16(row, even, odd);
    for (const auto& [slot, plane] : places) {
      const uint8_t* sign = bank.sign_row(slot, plane, n) + k / 8;
      const uint32_t set = uint32_t(load_bits(sign, std::min<int64_t>(4, bank.row_bytes - k / 8)));
      const __m512 scale = _mm512_set1_ps(bank.row_scale(slot, plane, n));
      __m512 step_even = scale, step_odd = scale;
      if (const float* col = bank.col_scale(slot, plane)) {
        const __m512 c0 = _mm512_maskz_loadu_ps(__mmask16(live), col + k);
        const __m512 c1 = _mm512_maskz_loadu_ps(__mmask16(live >> 16), col + k + 16);
        step_even = _mm512_mul_ps(scale, _mm512_permutex2var_ps(c0, evens, c1));
        step_odd = _mm512_mul_ps(scale, _mm512_permutex2var_ps(c0, odds, c1));
      }
      even = add_signed(even, step_even, _pext_u32(set, 0x55555555u));
      odd = add_signed(odd, step_odd, _pext_u32(set, 0xaaaaaaaau));
    }
    _mm512_store_si512(out, join_bf16(even, odd, thresholds));
    thresholds = _mm512_add_epi16(thresholds, next);
  }
}

// Output rows n0 .. n0 + rows for every token of the group. c: tiles * row_tiles tiles of partial sums.
void Fold::block(const Problem& p, int64_t n0, int64_t rows, uint8_t* folded, float* c) const {
  const int64_t row_tiles = round_up(rows, 32) / 16;
  for (int64_t t0 = 0; t0 < tiles; t0 += kFoldTokens / 16) {
    const int64_t t1 = std::min(tiles, t0 + kFoldTokens / 16);
    for (int64_t s0 = 0; s0 < steps; s0 += span_steps) {
      const int64_t s1 = std::min(steps, s0 + span_steps), span = s1 - s0;
      for (int64_t r = 0; r < row_tiles * 16; ++r) {
        uint8_t* out = folded + (r / 16) * span * kTileBytes + (r % 16) * 64;
        if (r < rows)
          fold_row(p, n0 + r, s0 * kBf16Step, s1 * kBf16Step, out);
        else
          for (int64_t s = 0; s < span; ++s) _mm512_store_si512(out + s * kTileBytes, _mm512_setzero_si512());
      }
      for (int64_t t = t0; t < t1; t += 2) {
        const bool two = t + 1 < t1;
        const uint8_t* b0 = x_tiles.bytes() + (t * steps + s0) * kTileBytes;
        const uint8_t* b1 = two ? b0 + steps * kTileBytes : b0;
        float* c_pair = c + (span == steps ? 0 : (t - t0) * row_tiles * 256);  // sums that are done need no place
        for (int64_t r = 0; r < row_tiles; r += 2) {
          float* out = c_pair + r * 256;
          float* out2 = out + row_tiles * 256;
          if (s0 == 0) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
          } else {
            _tile_loadd(0, out, 64);
            _tile_loadd(1, out + 256, 64);
            if (two) {
              _tile_loadd(2, out2, 64);
              _tile_loadd(3, out2 + 256, 64);
            }
          }
          const uint8_t* a0 = folded + r * span * kTileBytes;
          const uint8_t* a1 = a0 + span * kTileBytes;
          for (int64_t s = 0; s < span; ++s) {
            _tile_loadd(6, b0 + s * kTileBytes, 64);
            _tile_loadd(4, a0 + s * kTileBytes, 64);
            _tile_loadd(5, a1 + s * kTileBytes, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (two) {
              _tile_loadd(7, b1 + s * kTileBytes, 64);
              _tile_dpbf16ps(2, 4, 7);
              _tile_dpbf16ps(3, 5, 7);
            }
          }
          _tile_stored(0, out, 64);
          _tile_stored(1, out + 256, 64);
          if (two) {
            _tile_stored(2, out2, 64);
            _tile_stored(3, out2 + 256, 64);
          }
        }
        if (s1 == steps) {
          finish(p, n0, rows, t, c_pair, row_tiles);
          if (two) finish(p, n0, rows, t + 1, c_pair + row_tiles * 256, row_tiles);
        }
      }
    }
  }
}

// Sums of 16 tokens to bf16 outputs, 32 rows at a time.
void Fold::finish(const Problem& p, int64_t n0, int64_t rows, int64_t tile, const float* c, int64_t row_tiles) const {
  const int64_t live = std::min<int64_t>(16, count - tile * 16);
  const int64_t* token = tokens + tile * 16;
  for (int64_t r = 0; r < row_tiles; r += 2) {
    const int64_t left = rows - r * 16;
    const __mmask32 mask = columns_mask(left);
    const __mmask16 mask0 = rows_mask(left), mask1 = rows_mask(left - 16);
    const auto* bias = p.bias ? static_cast<const uint16_t*>(p.bias) + n0 + r * 16 : nullptr;
    const __m512 bias0 = bias ? load_bf16(bias, mask0) : _mm512_setzero_ps();
    const __m512 bias1 = bias ? load_bf16(bias + 16, mask1) : _mm512_setzero_ps();
    __m512i first[16], second[16];
    for (int64_t i = 0; i < 16; ++i) {
      first[i] = _mm512_load_si512(c + r * 256 + i * 16);
      second[i] = _mm512_load_si512(c + (r + 1) * 256 + i * 16);
    }
    transpose(first);
    transpose(second);
    for (int64_t i = 0; i < live && p.y_f32; ++i) {
      float* y = static_cast<float*>(p.y) + token[i] * p.y_ld + n0 + r * 16;
      __m512 out0 = _mm512_castsi512_ps(first[i]), out1 = _mm512_castsi512_ps(second[i]);
      if (p.add) {
        out0 = _mm512_add_ps(out0, _mm512_maskz_loadu_ps(mask0, y));
        out1 = _mm512_add_ps(out1, _mm512_maskz_loadu_ps(mask1, y + 16));
      }
      _mm512_mask_storeu_ps(y, mask0, out0);
      _mm512_mask_storeu_ps(y + 16, mask1, out1);
    }
    for (int64_t i = 0; i < live && !p.y_f32; ++i) {
      auto* y = static_cast<uint16_t*>(p.y) + token[i] * p.y_ld + n0 + r * 16;
      __m512 out0 = _mm512_add_ps(_mm512_castsi512_ps(first[i]), bias0);
      __m512 out1 = _mm512_add_ps(_mm512_castsi512_ps(second[i]), bias1);
      if (p.add) {
        out0 = _mm512_add_ps(out0, load_bf16(y, mask0));
        out1 = _mm512_add_ps(out1, load_bf16(y + 16, mask1));
      }
      _mm512_mask_storeu_epi16(y, mask, (__m512i)_mm512_cvtne2ps_pbh(out1, out0));
    }
  }
}

}  // namespace amx

bool amx_available() {
  static const bool available = [] {
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni") ||
        !__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("bmi2"))
      return false;
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    const unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
    if ((d & wanted) != wanted) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return available;
}

void amx_linear(const Problem& p, int64_t fold_tokens, int workers) {
  using namespace amx;
  Few few;
  few.prepare(p, fold_tokens);
  std::vector<std::unique_ptr<Fold>> folds;
  for (const Group& g : p.groups)
    if (g.count >= fold_tokens && !untouched(p, g)) {
      folds.push_back(std::make_unique<Fold>(p.order.data() + g.begin, g.count, p.k));
      for (int64_t plane = 0; plane < p.bank.planes && g.variant >= 0; ++plane)
        folds.back()->places.emplace_back(g.variant, plane);
    }
  std::vector<std::pair<const Fold*, int64_t>> pack_jobs;
  for (const auto& fold : folds)
    for (int64_t tile = 0; tile < fold->tiles; ++tile) pack_jobs.emplace_back(fold.get(), tile);
  Pieces pack_pieces{int64_t(pack_jobs.size())};
  Done packed{int64_t(pack_jobs.size())};
  const int64_t span = fold_span(p.k), fold_rows = fold_rows_of(p, workers);
  const int64_t fold_blocks = (p.n + fold_rows - 1) / fold_rows;
  const int64_t few_rows = few.piece_rows(p, workers);
  Pieces few_pieces{few.slots.empty() ? 0 : (p.n + few_rows - 1) / few_rows};
  Pieces fold_pieces{int64_t(folds.size()) * fold_blocks};
  auto body = [&](int) {
    for (int64_t i = pack_pieces.next(); i >= 0; i = pack_pieces.next()) {
      pack_jobs[size_t(i)].first->pack_tile(p, pack_jobs[size_t(i)].second);
      packed.add_one();
    }
    Buffer scratch(16 * kTileBytes);
    if (!few.slots.empty()) {
      Buffer acc(int64_t(few.slots.size()) * few_rows * 4);
      int64_t piece = few_pieces.next();
      while (piece >= 0) {
        const int64_t next = few_pieces.next();
        const int64_t n0 = piece * few_rows, next_n0 = next < 0 ? p.n : next * few_rows;
        few.piece(p, n0, std::min(few_rows, p.n - n0), next_n0, std::min(few_rows, p.n - next_n0), acc.floats(),
                  scratch.bytes());
        piece = next;
      }
    }
    if (!folds.empty()) {
      int64_t most = 0;
      for (const auto& fold : folds) most = std::max(most, std::min(round_up(fold->tiles, 2), kFoldTokens / 16));
      Buffer folded(fold_rows * span * 2), c(most * (fold_rows / 16) * kTileBytes);
      packed.wait();
      use_full_tiles();
      for (int64_t piece = fold_pieces.next(); piece >= 0; piece = fold_pieces.next()) {
        const int64_t n0 = piece % fold_blocks * fold_rows;
        folds[size_t(piece / fold_blocks)]->block(p, n0, std::min(fold_rows, p.n - n0), folded.bytes(), c.floats());
      }
    }
    _tile_release();
  };
  run_workers(workers, body);
}

}  // namespace zt

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace zt {
bool amx_available() { return false; }
void amx_linear(const Problem&, int64_t, int) {}
}  // namespace zt
#endif
