// Checks of arguments that all operators share. Every failure is a Python ValueError.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "zt.h"

namespace zt {

inline DType dtype_of(const at::Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    case at::kFloat:
      return DType::f32;
    default:
      TORCH_CHECK_VALUE(false, name, " has dtype ", tensor.scalar_type(),
                        "; allowed: bfloat16, float16, float32. Convert it first.");
  }
}

inline Path path_of(int64_t path) {
  TORCH_CHECK_VALUE(path >= -1 && path <= int64_t(best_path()), "path is ", path, "; allowed here: -1 (best) to ",
                    int64_t(best_path()), ". This processor does not run the wider ones.");
  return path < 0 ? best_path() : Path(path);
}

inline at::Tensor rows_of(const at::Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

inline void check_cpu(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), name, " is on ", tensor.device(), "; allowed: cpu. Move it first.");
}

// A bank of one plane without column scales, its tensors checked before.
inline Bank bank_view(const at::Tensor& sign, const at::Tensor& row) {
  Bank bank;
  bank.sign = sign.const_data_ptr<uint8_t>();
  bank.sign_v = sign.stride(0), bank.sign_p = sign.stride(1), bank.sign_n = sign.stride(2);
  bank.row = row.const_data_ptr<float>();
  bank.row_v = row.stride(0), bank.row_p = row.stride(1), bank.row_n = row.size(2) == sign.size(2) ? 1 : 0;
  bank.row_bytes = sign.size(3);
  return bank;
}

}  // namespace zt
