// Checks of the tensors of a DirectionBank, and the tokens that have directions.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <map>
#include <optional>

#include "checks.h"
#include "decoder.h"

namespace zt {

constexpr int64_t kDirectionTensors = 7;  // of one matrix: right, scale, home, plane, left of up to three parts

inline const float kOne = 1.0f;

// The directions of one matrix from their tensors, checked; none given: a view without any.
inline DirectionView directions_view(const std::optional<at::Tensor>* given, int64_t slots, int64_t n, int64_t k) {
  DirectionView view;
  if (!given[0]) return view;
  TORCH_CHECK_VALUE(given[1] && given[2] && given[3] && given[4], "directions: a tensor is missing.");
  const at::Tensor &right = *given[0], &scale = *given[1], &home = *given[2], &plane = *given[3];
  const auto unscaled = [](const at::Tensor& sign) {
    Bank bank;
    bank.sign = sign.const_data_ptr<uint8_t>(), bank.sign_v = sign.stride(0), bank.sign_n = sign.stride(1);
    bank.row = &kOne, bank.row_bytes = sign.size(2);
    return bank;
  };
  const auto check = [&](const at::Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
    check_cpu(tensor, name);
    TORCH_CHECK_VALUE(tensor.scalar_type() == dtype && tensor.sizes() == sizes && tensor[0].is_contiguous(),
                      "directions.", name, " is ", tensor.scalar_type(), " of shape ", tensor.sizes(), "; needed: ", dtype,
                      " of shape ", sizes, ", each slot contiguous.");
  };
  TORCH_CHECK_VALUE(right.dim() == 3, "directions.right has ", right.dim(), " dimensions; needed: 3.");
  view.stacked = right.size(1);
  check(right, "right", at::kByte, {slots, view.stacked, (k + 7) / 8});
  check(scale, "scale", at::kFloat, {slots, view.stacked});
  check(home, "home", at::kShort, {slots, view.stacked});
  check(plane, "plane", at::kByte, {slots, view.stacked});
  view.right = unscaled(right);
  view.scale = scale.const_data_ptr<float>(), view.scale_v = scale.stride(0);
  view.home = home.const_data_ptr<int16_t>(), view.home_v = home.stride(0);
  view.plane = plane.const_data_ptr<uint8_t>(), view.plane_v = plane.stride(0);
  int64_t rows = 0, stacked = 0;
  for (int j = 0; j < DirectionView::kMostParts && given[4 + j]; ++j) {
    const at::Tensor& left = *given[4 + j];
    TORCH_CHECK_VALUE(left.dim() == 3, "directions.left has ", left.dim(), " dimensions; needed: 3.");
    check(left, "left", at::kByte, {slots, left.size(1), left.size(2)});
    view.part[size_t(j)] = {rows, left.size(1), stacked, 8 * left.size(2), unscaled(left)};
    rows += left.size(1), stacked += 8 * left.size(2), ++view.parts;
  }
  TORCH_CHECK_VALUE(rows == n && stacked == view.stacked, "directions.left has ", rows, " rows and ", stacked,
                    " columns in all; needed: ", n, " and ", view.stacked, ".");
  return view;
}

inline DirectionView directions_view(const std::vector<std::optional<at::Tensor>>& given, int64_t slots, int64_t n, int64_t k) {
  TORCH_CHECK_VALUE(int64_t(given.size()) == kDirectionTensors, "directions has ", given.size(), " tensors; needed: ",
                    kDirectionTensors, ".");
  return directions_view(given.data(), slots, n, k);
}

// Every home that a fold of these slots would use as an index.
inline void check_homes(const DirectionView& view, const Arrangement& directions) {
  for (const Arrangement::Part& part : directions.parts) {
    const int16_t* home = view.home + part.slots[0] * view.home_v;
    uint16_t most = 0;
    for (int64_t r = 0; r < view.stacked; ++r) most = std::max(most, uint16_t(home[r]));
    TORCH_CHECK_VALUE(most < view.stacked, "directions.home of slot ", part.slots[0], " holds ", int16_t(most),
                      "; allowed: 0 to ", view.stacked - 1, ".");
  }
}

// Tokens with directions, by slot; `arrange` of those alone.
inline Arrangement arrange_directions(const int32_t* slot, int64_t tokens) {
  Arrangement out;
  out.tokens = tokens;
  if (!slot) return out;
  std::map<int32_t, std::vector<int64_t>> groups;
  for (int64_t t = 0; t < tokens; ++t)
    if (slot[t] >= 0) groups[slot[t]].push_back(t);
  for (const auto& [number, members] : groups) {
    out.parts.push_back({{number}, int64_t(out.order.size()), int64_t(members.size())});
    out.order.insert(out.order.end(), members.begin(), members.end());
  }
  return out;
}

}  // namespace zt
