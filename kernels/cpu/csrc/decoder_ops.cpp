// The torch operators of the decoder: checks of the stack once, of the batch in every call, grouping by variant.
//
// Every value read as an index is checked here, in release builds too; nothing is read out of bounds.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>

#include "checks.h"
#include "decoder.h"
#include "directions_checks.h"
#include "huge_pages.h"

namespace zt {

const RowOps& row_ops_for(Path path) {
  if (path == Path::plain) return row_ops_plain();
  if (path == Path::avx2) return row_ops_avx2();
  return row_ops_avx512();
}

namespace {

using at::Tensor;
using Tensors = std::vector<std::optional<Tensor>>;

constexpr int64_t kMatrices = 4;           // qkv, o, gate_up, down
constexpr int64_t kFirstDirections = 17;
constexpr int64_t kLayerTensors = kFirstDirections + kMatrices * kDirectionTensors;
constexpr int64_t kSmallLayer = 1 << 15;  // weights of a layer below which one thread is faster

// Slots may lie apart (parts of a larger buffer); a slot itself is contiguous.
void check_bank(const Tensor& sign, const Tensor& row, int64_t slots, int64_t n, int64_t k) {
  check_cpu(sign, "sign");
  check_cpu(row, "row_scale");
  const int64_t bytes = (k + 7) / 8;
  TORCH_CHECK_VALUE(sign.scalar_type() == at::kByte && sign.sizes() == at::IntArrayRef({slots, 1, n, bytes}) &&
                        sign.stride(3) == 1 && sign.stride(2) == bytes,
                    "sign is ", sign.scalar_type(), " of shape ", sign.sizes(), ", strides ", sign.strides(),
                    "; needed: uint8 [", slots, ", 1, ", n, ", ", bytes, "], each slot contiguous.");
  TORCH_CHECK_VALUE(row.scalar_type() == at::kFloat && row.dim() == 3 && row.size(0) == slots && row.size(1) == 1 &&
                        (row.size(2) == n || row.size(2) == 1) && row.stride(2) == 1,
                    "row_scale is ", row.scalar_type(), " of shape ", row.sizes(), "; needed: float32 [", slots, ", 1, ",
                    n, " or 1], each slot contiguous.");
}

// A checked stack and the tensors that its pointers point into.
struct Plan : torch::CustomClassHolder {
  Tensors tensors;
  StackView view;
  int64_t vectors = 0, slots = 0;

  Plan(Tensors layers, int64_t heads, int64_t kv_heads, int64_t e, int64_t window, double eps)
      : tensors(std::move(layers)) {
    TORCH_CHECK_VALUE(!tensors.empty() && int64_t(tensors.size()) % kLayerTensors == 0, "layers has ", tensors.size(),
                      " tensors; needed: ", kLayerTensors, " for each layer.");
    TORCH_CHECK_VALUE(heads >= 1 && kv_heads >= 1 && heads % kv_heads == 0 && e >= 2 && e % 2 == 0 && e <= 4096 &&
                          heads <= 1 << 20 && window >= 1 && eps > 0 && eps < 1,
                      "heads ", heads, ", kv_heads ", kv_heads, ", head_dim ", e, ", window ", window, ", eps ", eps,
                      "; needed: positive numbers, heads a multiple of kv_heads, head_dim even.");
    const Tensor& first = need(1, "qkv");
    TORCH_CHECK_VALUE(first.dim() == 2 && need(7, "gate_up").dim() == 2 && need(0, "attention_norm").dim() == 2 &&
                          need(9, "qkv_bank.sign").dim() == 4,
                      "qkv, gate_up, attention_norm or qkv_bank.sign has a wrong number of dimensions.");
    view.dtype = dtype_of(first, "qkv");
    view.d = first.size(1), view.f = need(7, "gate_up").size(0) / 2;
    view.heads = heads, view.kv_heads = kv_heads, view.e = e, view.eps = float(eps), view.window = window;
    vectors = need(0, "attention_norm").size(0), slots = need(9, "qkv_bank.sign").size(0);
    for (int64_t at = 0; at < int64_t(tensors.size()); at += kLayerTensors) add_layer(at);
  }

 private:
  const Tensor& need(int64_t at, const char* name) const {
    TORCH_CHECK_VALUE(tensors[size_t(at)].has_value(), name, " is missing.");
    return *tensors[size_t(at)];
  }
  const float* vector(int64_t at, const char* name, int64_t width) const {
    if (!tensors[size_t(at)]) return nullptr;
    check_tensor(*tensors[size_t(at)], name, at::kFloat, {vectors, width});
    return tensors[size_t(at)]->const_data_ptr<float>();
  }
  LayerView::Matrix matrix(int64_t layer, int64_t number, const char* name, int64_t n, int64_t k) const {
    constexpr std::array<int64_t, kMatrices> kWeights{1, 5, 7, 8};
    const int64_t bank_at = layer + 9 + 2 * number;
    const Tensor& w = need(layer + kWeights[size_t(number)], name);
    check_tensor(w, name, need(1, "qkv").scalar_type(), {n, k});
    const Tensor &sign = need(bank_at, "sign"), &row = need(bank_at + 1, "row_scale");
    check_bank(sign, row, slots, n, k);
    use_huge_pages(w.const_data_ptr(), int64_t(w.nbytes()), true);
    use_huge_pages(sign.const_data_ptr(), int64_t(sign.nbytes()), false);  // empty slots stay untouched
    LayerView::Matrix out;
    out.w = w.const_data_ptr(), out.w_ld = k;
    out.bank = bank_view(sign, row);
    out.directions =
        directions_view(&tensors[size_t(layer + kFirstDirections + number * kDirectionTensors)], slots, n, k);
    return out;
  }
  void add_layer(int64_t at) {
    const int64_t n_qkv = (view.heads + 2 * view.kv_heads) * view.e;
    LayerView layer;
    need(at, "attention_norm"), need(at + 6, "mlp_norm");
    layer.attention_norm = vector(at, "attention_norm", view.d);
    layer.qkv_bias = vector(at + 2, "qkv_bias", n_qkv);
    layer.q_norm = vector(at + 3, "q_norm", view.e);
    layer.k_norm = vector(at + 4, "k_norm", view.e);
    layer.mlp_norm = vector(at + 6, "mlp_norm", view.d);
    layer.qkv = matrix(at, 0, "qkv", n_qkv, view.d);
    layer.o = matrix(at, 1, "o", view.d, view.heads * view.e);
    layer.gate_up = matrix(at, 2, "gate_up", 2 * view.f, view.d);
    layer.down = matrix(at, 3, "down", view.d, view.f);
    view.layers.push_back(layer);
  }
};

Arrangement arrange(const int32_t* plane, int64_t planes, int64_t tokens) {
  std::map<std::vector<int32_t>, std::vector<int64_t>> groups;
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<int32_t> slots;
    for (int64_t p = 0; p < planes; ++p)
      if (plane[p * tokens + t] >= 0) slots.push_back(plane[p * tokens + t]);
    groups[std::move(slots)].push_back(t);
  }
  Arrangement out;
  out.tokens = tokens;
  for (const auto& [slots, numbers] : groups) {
    out.parts.push_back({slots, int64_t(out.order.size()), int64_t(numbers.size())});
    out.order.insert(out.order.end(), numbers.begin(), numbers.end());
  }
  return out;
}

int workers_for(int64_t weights) {
  return at::in_parallel_region() || weights < kSmallLayer ? 1 : at::get_num_threads();
}

// Tokens of a sequence are neighbours in ascending positions, and have pages.
void check_order(const BatchView& b, int64_t sequences) {
  std::vector<uint8_t> seen(size_t(sequences), 0);
  for (int64_t t = 0; t < b.tokens; ++t) {
    const int32_t sequence = b.sequence[t], position = b.position[t];
    if (t > 0 && b.sequence[t - 1] == sequence) {
      TORCH_CHECK_VALUE(position == b.position[t - 1] + 1, "position_T[", t, "] is ", position, " after ",
                        b.position[t - 1], " of the same sequence; needed: one more.");
    } else {
      TORCH_CHECK_VALUE(!seen[size_t(sequence)], "sequence_T[", t, "] is ", sequence,
                        " again after other sequences; tokens of a sequence are neighbours.");
      seen[size_t(sequence)] = 1;
    }
    if (t + 1 == b.tokens || b.sequence[t + 1] != sequence)
      for (int64_t j = 0; j <= position / b.page_tokens; ++j)
        TORCH_CHECK_VALUE(b.page_table[sequence * b.table_ld + j] >= 0, "page_table_SJ[", sequence, ", ", j,
                          "] is -1, but the sequence has a token at position ", position, "; needed: a page for each ",
                          b.page_tokens, " tokens.");
  }
}

void run_plan(const Plan& plan, Tensor& hidden, Tensor& kv, const Tensor& position, const Tensor& sequence,
              const Tensor& plane, const std::optional<Tensor>& direction, const Tensor& vector, const Tensor& page_table,
              const Tensor& cos, const Tensor& sin, int64_t path) {
  StackView stack_path = plan.view;  // a copy of a few pointers for each layer
  stack_path.path = path_of(path);
  const StackView& s = stack_path;
  const auto dtype = plan.tensors[1]->scalar_type();
  TORCH_CHECK_VALUE(hidden.dim() == 2 && kv.dim() == 6 && page_table.dim() == 2 && plane.dim() == 2 && cos.dim() == 2,
                    "hidden, kv, page_table, plane or cos has a wrong number of dimensions.");
  BatchView b;
  b.tokens = hidden.size(0);
  check_tensor(hidden, "hidden_TD", dtype, {b.tokens, s.d});
  b.pages = kv.size(2), b.page_tokens = kv.size(4);
  TORCH_CHECK_VALUE(b.pages >= 1 && b.page_tokens >= 1, "kv has shape ", kv.sizes(), "; needed: one page or more.");
  check_tensor(kv, "kv", dtype, {int64_t(s.layers.size()), 2, b.pages, s.kv_heads, b.page_tokens, s.e});
  const int64_t sequences = page_table.size(0), positions = cos.size(0);
  check_tensor(cos, "cos", at::kFloat, {positions, s.e / 2});
  check_tensor(sin, "sin", at::kFloat, {positions, s.e / 2});
  b.page_table = indices(page_table, "page_table_SJ", {sequences, page_table.size(1)}, -1, b.pages);
  b.table_ld = page_table.size(1);
  b.position = indices(position, "position_T", {b.tokens}, 0, std::min(positions, b.table_ld * b.page_tokens));
  b.sequence = indices(sequence, "sequence_T", {b.tokens}, 0, sequences);
  b.vector = indices(vector, "vector_T", {b.tokens}, 0, plan.vectors);
  const int32_t* slots = indices(plane, "plane_PT", {plane.size(0), b.tokens}, -1, plan.slots);
  if (direction) b.direction = indices(*direction, "direction_T", {b.tokens}, -1, plan.slots);
  const Arrangement directions = arrange_directions(b.direction, b.tokens);
  if (!directions.order.empty())
    for (const LayerView& layer : s.layers)
      for (const LayerView::Matrix* matrix : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) {
        TORCH_CHECK_VALUE(matrix->directions.stacked > 0, "direction_T names a slot, but the stack has no directions.");
        check_homes(matrix->directions, directions);
      }
  check_order(b, sequences);
  b.cos = cos.const_data_ptr<float>(), b.sin = sin.const_data_ptr<float>();
  b.kv = static_cast<uint8_t*>(kv.mutable_data_ptr());
  b.hidden = hidden.mutable_data_ptr(), b.hidden_ld = s.d;
  run_stack(s, b, arrange(slots, plane.size(0), b.tokens), directions, workers_for(2 * s.f * s.d));
}

void cpu_decoder_(Tensor& hidden, Tensor& kv, const c10::List<std::optional<Tensor>>& layers, const Tensor& position,
                  const Tensor& sequence, const Tensor& plane, const std::optional<Tensor>& direction,
                  const Tensor& vector, const Tensor& page_table, const Tensor& cos, const Tensor& sin, int64_t heads,
                  int64_t kv_heads, int64_t head_dim, int64_t window, double eps, int64_t path) {
  const Plan plan(layers.vec(), heads, kv_heads, head_dim, window, eps);
  run_plan(plan, hidden, kv, position, sequence, plane, direction, vector, page_table, cos, sin, path);
}

void cpu_decoder_step_(const c10::intrusive_ptr<Plan>& plan, Tensor& hidden, Tensor& kv, const Tensor& position,
                       const Tensor& sequence, const Tensor& plane, const std::optional<Tensor>& direction,
                       const Tensor& vector, const Tensor& page_table, const Tensor& cos, const Tensor& sin, int64_t path) {
  run_plan(*plan, hidden, kv, position, sequence, plane, direction, vector, page_table, cos, sin, path);
}

Tensor cpu_head(const Tensor& x, const Tensor& weight, const Tensor& sign, const Tensor& row, const Tensor& plane,
                const c10::List<std::optional<Tensor>>& directions, const std::optional<Tensor>& direction,
                int64_t path_number) {
  TORCH_CHECK_VALUE(x.dim() == 2 && weight.dim() == 2 && sign.dim() == 4 && row.dim() == 3 && plane.dim() == 2,
                    "x, weight, sign, row_scale or plane has a wrong number of dimensions.");
  Problem p;
  p.tokens = x.size(0), p.k = x.size(1), p.n = weight.size(0), p.dtype = dtype_of(x, "x_TK");
  const int64_t slots = sign.size(0);
  check_tensor(x, "x_TK", x.scalar_type(), {p.tokens, p.k});
  check_tensor(weight, "weight_NK", x.scalar_type(), {p.n, p.k});
  check_bank(sign, row, slots, p.n, p.k);
  const int32_t* slot = indices(plane, "plane_PT", {plane.size(0), p.tokens}, -1, slots);
  Tensor y = at::empty({p.tokens, p.n}, x.options().dtype(at::kFloat));
  if (p.tokens == 0 || p.n == 0 || p.k == 0) return y.zero_();
  p.x = x.const_data_ptr(), p.x_ld = p.k;
  p.w = weight.const_data_ptr(), p.w_ld = p.k;
  p.bank = bank_view(sign, row);
  p.y = y.mutable_data_ptr(), p.y_ld = p.n, p.y_f32 = true;
  const int32_t* own = direction ? indices(*direction, "direction_T", {p.tokens}, -1, slots) : nullptr;
  const Arrangement with = arrange_directions(own, p.tokens);
  const Tensors given = directions.vec();
  const DirectionView view = given.empty() ? DirectionView() : directions_view(given, slots, p.n, p.k);
  if (!with.order.empty()) {
    TORCH_CHECK_VALUE(view.stacked > 0, "direction_T names a slot, but the head has no directions.");
    check_homes(view, with);
  }
  run_head(path_of(path_number), p, arrange(slot, plane.size(0), p.tokens), view, with, own, workers_for(p.n * p.k));
  return y;
}

bool cpu_huge_pages(const Tensor& tensor, bool now) {
  check_cpu(tensor, "tensor");
  return use_huge_pages(tensor.const_data_ptr(), int64_t(tensor.nbytes()), now);
}

// Largest value of each row and its first place; a row with a NaN gives NaN and place 0.
std::tuple<Tensor, Tensor> cpu_top(const Tensor& scores, int64_t path) {
  check_tensor(scores, "scores", at::kFloat, scores.sizes());
  TORCH_CHECK_VALUE(scores.dim() == 2 && scores.size(1) > 0, "scores has shape ", scores.sizes(),
                    "; needed: [T, N], N at least 1.");
  const RowOps& ops = row_ops_for(path_of(path));
  const int64_t rows = scores.size(0), count = scores.size(1);
  Tensor value = at::empty({rows}, scores.options()), place = at::empty({rows}, scores.options().dtype(at::kLong));
  const float* from = scores.const_data_ptr<float>();
  auto* values = value.mutable_data_ptr<float>();
  auto* places = place.mutable_data_ptr<int64_t>();
  at::parallel_for(0, rows, std::max<int64_t>(1, kSmallLayer / count), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) places[r] = ops.top(from + r * count, count, values + r);
  });
  return {value, place};
}

}  // namespace
}  // namespace zt

TORCH_LIBRARY_FRAGMENT(zen_train, m) {
  m.class_<zt::Plan>("DecoderPlan")
      .def(torch::init<std::vector<std::optional<at::Tensor>>, int64_t, int64_t, int64_t, int64_t, double>());
  m.def("cpu_decoder_(Tensor(a!) hidden, Tensor(b!) kv, Tensor?[] layers, Tensor position, Tensor sequence, Tensor plane, "
        "Tensor? direction, Tensor vector, Tensor page_table, Tensor cos, Tensor sin, int heads, int kv_heads, int head_dim, int window, "
        "float eps, int path) -> ()");
  m.def("cpu_decoder_step_(__torch__.torch.classes.zen_train.DecoderPlan plan, Tensor(a!) hidden, Tensor(b!) kv, "
        "Tensor position, Tensor sequence, Tensor plane, Tensor? direction, Tensor vector, Tensor page_table, "
        "Tensor cos, Tensor sin, int path) -> ()");
  m.def("cpu_huge_pages(Tensor tensor, bool now) -> bool");
  m.def("cpu_top(Tensor scores, int path) -> (Tensor, Tensor)");
  m.def("cpu_head(Tensor x, Tensor weight, Tensor sign, Tensor row_scale, Tensor plane, Tensor?[] directions, "
        "Tensor? direction, int path) -> Tensor");
}

TORCH_LIBRARY_IMPL(zen_train, CPU, m) {
  m.impl("cpu_decoder_", &zt::cpu_decoder_);
  m.impl("cpu_decoder_step_", &zt::cpu_decoder_step_);
  m.impl("cpu_head", &zt::cpu_head);
  m.impl("cpu_huge_pages", &zt::cpu_huge_pages);
  m.impl("cpu_top", &zt::cpu_top);
}
