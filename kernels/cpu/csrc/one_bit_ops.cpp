// The torch operator that writes the one-bit code of trained weights.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "checks.h"
#include "one_bit.h"
#include "pool.h"

namespace zt {
namespace {

using at::Tensor;

const CodeOps& code_ops_for(Path path) {
  if (path == Path::plain) return code_ops_plain();
  return path == Path::avx2 ? code_ops_avx2() : code_ops_avx512();
}

// As `along_scale` in zen_train/kernels/common/along.py.
float along_scale(double size, double square, double count, double weight) {
  const double mean = size / count;
  if (weight == 1.0) return float(mean);
  const double kept = square > 0 ? std::clamp(size * mean / std::max(square, 1e-38), 0.0, 1.0) : 1.0;
  return float(mean * (weight / (weight - (weight - 1.0) * (1.0 - kept))));
}

void cpu_one_bit_code_(const Tensor& out, const Tensor& latent_in, const Tensor& base_in, bool per_row, double weight,
                       bool dither, int64_t path) {
  check_cpu(out, "out");
  TORCH_CHECK_VALUE(out.dim() == 2 && out.scalar_type() == at::kFloat && out.size(1) >= 1 && out.stride(1) == 1,
                    "out is ", out.scalar_type(), " of shape ", out.sizes(), ", strides ", out.strides(),
                    "; needed: float32 [N, K] with columns next to each other.");
  check_cpu(latent_in, "latent");
  TORCH_CHECK_VALUE(latent_in.scalar_type() == at::kFloat && latent_in.sizes() == out.sizes(), "latent is ",
                    latent_in.scalar_type(), " ", latent_in.sizes(), "; needed as out: Float ", out.sizes(), ".");
  check_cpu(base_in, "base");
  TORCH_CHECK_VALUE(base_in.sizes() == out.sizes(), "base has shape ", base_in.sizes(), "; needed as out: ",
                    out.sizes(), ".");
  TORCH_CHECK_VALUE(weight >= 1.0, "along_weight is ", weight, "; allowed: 1 (least squares) or more.");
  const DType dtype = dtype_of(base_in, "base");
  const Tensor latent = rows_of(latent_in), base = rows_of(base_in);
  const CodeOps& ops = code_ops_for(path_of(path));
  const int64_t n = out.size(0), k = out.size(1), grain = std::max<int64_t>(1, kSmallWork / k);
  auto* to = out.mutable_data_ptr<float>();
  const auto* from = latent.const_data_ptr<float>();
  const auto* origin = static_cast<const uint8_t*>(base.const_data_ptr());
  const int64_t to_ld = out.stride(0), from_ld = latent.stride(0), origin_ld = base.stride(0) * size_of(dtype);
  std::vector<double> sizes(per_row ? 0 : size_t(n)), squares(sizes.size());
  if (!per_row)
    at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        ops.change_sums(dtype, from + r * from_ld, origin + r * origin_ld, k, &sizes[size_t(r)], &squares[size_t(r)]);
    });
  double size = 0, square = 0;
  for (const double part : sizes) size += part;
  for (const double part : squares) square += part;
  const float whole = per_row || n == 0 ? 0.0f : along_scale(size, square, double(n) * double(k), weight);
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* row = from + r * from_ld;
      const uint8_t* origin_row = origin + r * origin_ld;
      float alpha = whole;
      if (per_row) {
        double own_size = 0, own_square = 0;
        ops.change_sums(dtype, row, origin_row, k, &own_size, &own_square);
        alpha = along_scale(own_size, own_square, double(k), weight);
      }
      ops.write_code(dtype, row, origin_row, k, alpha, dither, to + r * to_ld);
    }
  });
}

}  // namespace
}  // namespace zt

TORCH_LIBRARY_FRAGMENT(zen_train, m) {
  m.def("cpu_one_bit_code_(Tensor(a!) out, Tensor latent, Tensor base, bool per_row, float along_weight, bool dither, "
        "int path) -> ()");
}

TORCH_LIBRARY_IMPL(zen_train, CPU, m) { m.impl("cpu_one_bit_code_", &zt::cpu_one_bit_code_); }
