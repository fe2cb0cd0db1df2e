// The row-wise kernels in plain C++: any processor, no intrinsics.
#include "decoder.h"
#include "one_bit.h"
#include "zt.h"

namespace zt {
namespace plain {

inline float f16_to_f32(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t fraction = half & 0x3ffu;
  if (exponent == 0) {
    const float value = std::ldexp(float(fraction), -24);
    return sign ? -value : value;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t f32_to_f16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 65520.0f) return uint16_t(sign | 0x7c00u);
  if (magnitude < 6.103515625e-05f)  // subnormal: a multiple of 2^-24, rounded to even
    return uint16_t(sign | uint16_t(std::nearbyint(std::ldexp(magnitude, 24))));
  bits &= 0x7fffffffu;
  bits += 0xfffu + ((bits >> 13) & 1u);
  return uint16_t(sign | ((bits >> 13) - (112u << 10)));
}

struct Vec {
  static constexpr int64_t width = 8;
  float v[8];

  template <typename F>
  static Vec each(F value_at) {
    Vec out;
    for (int i = 0; i < 8; ++i) out.v[i] = value_at(i);
    return out;
  }
  static Vec load(const float* at) {
    return each([=](int i) { return at[i]; });
  }
  static Vec load_bf16(const uint16_t* at) {
    return each([=](int i) { return bf16_to_f32(at[i]); });
  }
  static Vec load_f16(const uint16_t* at) {
    return each([=](int i) { return f16_to_f32(at[i]); });
  }
  static void store(float* at, const Vec& a) { std::memcpy(at, a.v, 32); }
  static void store_bf16(uint16_t* at, const Vec& a) {
    for (int i = 0; i < 8; ++i) at[i] = f32_to_bf16(a.v[i]);
  }
  static void store_f16(uint16_t* at, const Vec& a) {
    for (int i = 0; i < 8; ++i) at[i] = f32_to_f16(a.v[i]);
  }
  static Vec zero() { return fill(0.0f); }
  static Vec fill(float a) {
    return each([=](int) { return a; });
  }
  static Vec add(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
  }
  static Vec sub(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
  }
  static Vec mul(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
  }
  static Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
  }
  static Vec abs(const Vec& a) {
    return each([&](int i) { return std::fabs(a.v[i]); });
  }
  static Vec add_where(const uint8_t* bits, const Vec& acc, const Vec& x) {
    const unsigned set = *bits;
    return each([&](int i) { return acc.v[i] + ((set >> i) & 1u ? x.v[i] : 0.0f); });
  }
  static Vec flip(const uint8_t* bits, const Vec& x) {
    const unsigned set = *bits;
    return each([&](int i) { return (set >> i) & 1u ? x.v[i] : -x.v[i]; });
  }
  static int64_t pack_signs(const Vec& d, uint8_t* bits) {
    unsigned set = 0;
    int64_t zeros = 0;
    for (int i = 0; i < 8; ++i) {
      set |= unsigned(d.v[i] >= 0.0f) << i;
      zeros += d.v[i] == 0.0f;
    }
    *bits = uint8_t(set);
    return zeros;
  }
  float sum() const {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
  }
  static Vec max(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static Vec min(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static Vec div(const Vec& a, const Vec& b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
  }
  static Vec round(const Vec& a) {
    return each([&](int i) { return std::nearbyint(a.v[i]); });
  }
  static Vec scale2(const Vec& a, const Vec& n) {
    return each([&](int i) { return std::ldexp(a.v[i], n.v[i] == n.v[i] ? int(n.v[i]) : 0); });
  }
  static void transpose16(const float* from, int64_t ld, float* to) {
    for (int64_t r = 0; r < 16; ++r)
      for (int64_t c = 0; c < 16; ++c) to[c * 16 + r] = from[r * ld + c];
  }
};

#include "rowwise.inc"
#include "decoder.inc"
#include "one_bit.inc"

}  // namespace plain
const Ops& ops_plain() { return plain::table; }
const RowOps& row_ops_plain() { return plain::row_table; }
const CodeOps& code_ops_plain() { return plain::code_table; }
}  // namespace zt
