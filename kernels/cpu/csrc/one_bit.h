// The one-bit code of trained weights, a row at a time; one table for each instruction set.
#pragma once

#include "zt.h"

namespace zt {

struct CodeOps {
  // Sums of |D| and of D^2, D = latent - base.
  void (*change_sums)(DType, const float* latent, const void* base, int64_t k, double* size, double* square);
  // out = base + alpha sign(D), zero counting as +1; dither: to values that bf16 holds.
  void (*write_code)(DType, const float* latent, const void* base, int64_t k, float alpha, bool dither, float* out);
};

const CodeOps& code_ops_plain();
const CodeOps& code_ops_avx2();
const CodeOps& code_ops_avx512();

}  // namespace zt
