// Checks of arguments that all operators share. Every failure is a Python ValueError.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <string>

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

inline void check_tensor(const at::Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
  check_cpu(tensor, name);
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype && tensor.sizes() == sizes && tensor.is_contiguous(), name, " is ",
                    tensor.scalar_type(), " of shape ", tensor.sizes(), ", strides ", tensor.strides(), "; needed: ",
                    dtype, " of shape ", sizes, ", contiguous.");
}

inline const int32_t* indices(const at::Tensor& tensor, const char* name, at::IntArrayRef sizes, int64_t low, int64_t end) {
  check_tensor(tensor, name, at::kInt, sizes);
  const int32_t* values = tensor.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < tensor.numel(); ++i)
    if (values[i] < low || values[i] >= end) {
      const int64_t width = tensor.dim() == 2 ? tensor.size(1) : 1;
      const std::string at = tensor.dim() == 2 ? std::to_string(i / width) + ", " + std::to_string(i % width)
                                               : std::to_string(i);
      TORCH_CHECK_VALUE(false, name, "[", at, "] is ", values[i], "; allowed: ", low, " to ", end - 1, ".");
    }
  return values;
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
