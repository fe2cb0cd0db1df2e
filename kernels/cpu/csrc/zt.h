// Shared declarations of the CPU kernels: the problem, the instruction-set table, small helpers.
//
// Legend: T tokens, K inputs, N outputs, V variants, P sign planes, B = ceil(K/8) bytes of one sign row.
// Bit i of byte j of a sign row is input column 8j+i; 1 means +1, 0 means -1.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

// The functions between these two are compiled for the instruction sets of a list, which is a string.
#define ZT_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define ZT_BEGIN_TARGET(list) ZT_PRAGMA(clang attribute push(__attribute__((target(list))), apply_to = function))
#define ZT_END_TARGET ZT_PRAGMA(clang attribute pop)
#else
#define ZT_BEGIN_TARGET(list) ZT_PRAGMA(GCC push_options) ZT_PRAGMA(GCC target(list))
#define ZT_END_TARGET ZT_PRAGMA(GCC pop_options)
#endif

namespace zt {

enum class DType : int { bf16 = 0, f16 = 1, f32 = 2 };
enum class Path : int { plain = 0, avx2 = 1, avx512 = 2, bf16 = 3, amx = 4 };

inline int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }
inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// One bank of deltas. Strides are in elements; a row stride of 0 means one scale for the matrix.
struct Bank {
  const uint8_t* sign = nullptr;
  int64_t sign_v = 0, sign_p = 0, sign_n = 0;
  const float* row = nullptr;
  int64_t row_v = 0, row_p = 0, row_n = 0;
  const float* col = nullptr;  // [V, P, K] or null
  int64_t col_v = 0, col_p = 0;
  int64_t planes = 1, row_bytes = 0;

  const uint8_t* sign_row(int64_t v, int64_t p, int64_t n) const {
    return sign + v * sign_v + p * sign_p + n * sign_n;
  }
  float row_scale(int64_t v, int64_t p, int64_t n) const { return row[v * row_v + p * row_p + n * row_n]; }
  const float* col_scale(int64_t v, int64_t p) const { return col ? col + v * col_v + p * col_p : nullptr; }
};

// Tokens of one variant: order[begin .. begin + count). variant -1 is the base.
struct Group {
  int64_t variant, begin, count;
};

// y[t] = (w ? x[t] w^T : add ? y[t] : 0) + bias + delta(x[t], variant of t).
struct Problem {
  int64_t tokens = 0, k = 0, n = 0;
  DType dtype = DType::f32;
  const void* x = nullptr;  // [T, K], row stride x_ld
  int64_t x_ld = 0;
  const void* w = nullptr;  // [N, K], row stride w_ld; null: the delta term alone
  int64_t w_ld = 0;
  const void* bias = nullptr;  // [N] of dtype, or null
  void* y = nullptr;           // [T, N], row stride y_ld
  int64_t y_ld = 0;
  bool add = false;    // add onto y instead of overwriting it
  bool y_f32 = false;  // y is float32 whatever dtype says (the tiled paths; bias is not added then)
  Bank bank;
  std::vector<int64_t> order;  // token numbers, sorted by variant
  std::vector<Group> groups;
};

// What one instruction set offers. Rows of x are float32, zero-padded to a multiple of 64 columns.
struct Ops {
  // out[t * out_ld + r] += sum_k w[r, k] x[t, k]
  void (*dots)(DType, const void* w, int64_t w_ld, int64_t rows, const float* x, int64_t x_ld, int64_t tokens,
               int64_t k, float* out, int64_t out_ld);
  // out[t * out_ld + r] += scale[r * scale_step] * sum_k s[r, k] x[t, k]; x_sum[t] = sum_k x[t, k]
  void (*signed_sums)(const uint8_t* sign, int64_t sign_ld, int64_t rows, const float* x, int64_t x_ld,
                      const float* x_sum, int64_t tokens, int64_t k, const float* scale, int64_t scale_step,
                      float* out, int64_t out_ld);
  // row[k] += scale * (col ? col[k] : 1) * s[k], float32
  void (*add_signs)(const uint8_t* sign, float scale, const float* col, int64_t k, float* row);
  void (*to_f32)(DType, const void* from, int64_t count, float* to);
  void (*from_f32)(DType, const float* from, int64_t count, void* to);
  // One row of D = w1 - w0 (w0 may be null): bits (D >= 0), sums of |D| and D^2, zero count.
  // Returns false when D holds a NaN or an infinity.
  bool (*pack_row)(DType, const void* w1, const void* w0, int64_t k, uint8_t* bits, double* abs_sum,
                   double* square_sum, int64_t* zeros);
};

const Ops& ops_plain();
const Ops& ops_avx2();
const Ops& ops_avx512();

Path best_path();  // what this processor and operating system can run
const Ops& ops_for(Path path);

// Tables of look-ups hold 16-bit entries of which two add up within 16 bits. Returns the exponent of the unit in which a
// row's entries fit, of its largest sum of four neighbours' magnitudes.
constexpr float kEntryLimit = 16383.0f;
inline int entry_exponent(float most) {
  int exponent = 0;
  std::frexp(most / kEntryLimit, &exponent);  // most * 2^-exponent <= the limit
  return exponent;
}

inline float bf16_to_f32(uint16_t value) {
  uint32_t bits = uint32_t(value) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t f32_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);  // keep NaN a NaN
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Rounding of W0 + alpha S to bf16 that keeps small deltas: `zen_train.kernels.common.dither` says why and how.
constexpr uint32_t kGolden = 0x9e37;

inline uint16_t dither_bf16(float value, int64_t column) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return uint16_t((bits + ((uint32_t(column) * kGolden) & 0xffffu)) >> 16);
}

// A row of W0 + alpha S in the weight's dtype.
inline void round_weights(const Ops& ops, DType dtype, const float* row, int64_t count, void* to) {
  if (dtype != DType::bf16) return ops.from_f32(dtype, row, count, to);
  auto* out = static_cast<uint16_t*>(to);
  for (int64_t k = 0; k < count; ++k) out[k] = dither_bf16(row[k], k);
}

}  // namespace zt
