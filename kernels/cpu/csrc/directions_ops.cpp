// The torch operator for rows of an embedding table whose delta is held as coded directions.
//
// Row n of the delta is a sum of all right vectors, and its coefficients are the folded row n of the left ones.
#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <bit>

#include "directions_checks.h"

namespace zt {
namespace {

using at::Tensor;

// Coefficients of the right vectors, from the left signs of one row.
void fold_row(const DirectionView& view, int64_t slot, int64_t row, float* whole, float* out) {
  const int16_t* home = view.home + slot * view.home_v;
  const uint8_t* plane = view.plane + slot * view.plane_v;
  const uint8_t* sign = view.part[0].left.sign_row(slot, 0, row);
  std::fill_n(whole, view.stacked, 0.0f);
  for (int64_t r = 0; r < view.stacked; ++r) {
    const float weight = kPlane[plane[r] & 7];
    whole[home[r]] += (sign[r / 8] >> (r % 8)) & 1 ? weight : -weight;
  }
  const float* scale = view.scale + slot * view.scale_v;
  for (int64_t r = 0; r < view.stacked; ++r) out[r] = kPlane[plane[r] & 7] * scale[home[r]] * whole[home[r]];
}

// rows[t] + D(slot[t])[id[t]], in the dtype of rows; dithered to bf16.
Tensor cpu_direction_rows(const Tensor& rows, const Tensor& ids, const Tensor& slot,
                          const c10::List<std::optional<Tensor>>& directions, int64_t path) {
  check_cpu(rows, "rows");
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.is_contiguous(), "rows has shape ", rows.sizes(), ", strides ",
                    rows.strides(), "; needed: [T, K], contiguous.");
  const int64_t tokens = rows.size(0), k = rows.size(1);
  const std::vector<std::optional<Tensor>> given = directions.vec();
  TORCH_CHECK_VALUE(!given.empty() && given[0] && given[0]->dim() == 3 && int64_t(given.size()) == kDirectionTensors &&
                        given[4] && given[4]->dim() == 3,
                    "directions is not that of a table.");
  const int64_t slots = given[0]->size(0), n = given[4]->size(1);
  const DirectionView view = directions_view(given, slots, n, k);
  TORCH_CHECK_VALUE(view.parts == 1, "directions has ", view.parts, " parts; needed: 1.");
  const int32_t* id = indices(ids, "ids", {tokens}, 0, n);
  const int32_t* of = indices(slot, "direction_T", {tokens}, -1, slots);
  check_homes(view, arrange_directions(of, tokens));
  Tensor out = at::empty({tokens, k}, rows.options());
  const DType dtype = dtype_of(rows, "rows");
  const Ops& ops = ops_for(path_of(path));
  const auto* from = static_cast<const uint8_t*>(rows.const_data_ptr());
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const int64_t item = size_of(dtype), per_token = view.stacked * k;
  at::parallel_for(0, tokens, std::max<int64_t>(1, (1 << 19) / std::max<int64_t>(1, per_token)),
                   [&](int64_t begin, int64_t end) {
                     std::vector<float> row(static_cast<size_t>(k)), whole(size_t(view.stacked)), part(size_t(view.stacked));
                     for (int64_t t = begin; t < end; ++t) {
                       if (of[t] < 0) {
                         std::memcpy(to + t * k * item, from + t * k * item, size_t(k * item));
                         continue;
                       }
                       ops.to_f32(dtype, from + t * k * item, k, row.data());
                       fold_row(view, of[t], id[t], whole.data(), part.data());
                       for (int64_t r = 0; r < view.stacked; ++r)
                         ops.add_signs(view.right.sign_row(of[t], 0, r), part[size_t(r)], nullptr, k, row.data());
                       round_weights(ops, dtype, row.data(), k, to + t * k * item);
                     }
                   });
  return out;
}

}  // namespace
}  // namespace zt

TORCH_LIBRARY_FRAGMENT(zen_train, m) {
  m.def("cpu_direction_rows(Tensor rows, Tensor ids, Tensor slot, Tensor?[] directions, int path) -> Tensor");
}

TORCH_LIBRARY_IMPL(zen_train, CPU, m) { m.impl("cpu_direction_rows", &zt::cpu_direction_rows); }
