// The torch operators of the CPU kernels: argument checks, grouping by variant, choice of algorithm.
//
// Every value read as an index or a scale is checked here, in release builds too; nothing is read out of bounds.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "checks.h"
#include "decoder.h"
#include "pool.h"

namespace zt {
namespace {

using at::Tensor;

constexpr int64_t kRowBlock = 32;         // output rows of one piece of work
constexpr int64_t kRowwiseTokens = 8;     // above this the base product goes to at::linear
constexpr int64_t kFoldRows = 512;        // rows of W + alpha S formed at a time without AMX

// Keeps the tensors alive whose memory `bank` points to.
struct BankTensors {
  Tensor sign, row, col;
  Bank bank;
  int64_t variants, outputs;

  BankTensors(const Tensor& sign_in, const Tensor& row_in, const std::optional<Tensor>& col_in, int64_t k) {
    TORCH_CHECK_VALUE(sign_in.dim() == 4 && sign_in.scalar_type() == at::kByte, "sign is ", sign_in.scalar_type(),
                      " of shape ", sign_in.sizes(), "; needed: uint8 [V, P, N, ceil(K/8)].");
    check_cpu(sign_in, "sign");
    check_cpu(row_in, "row_scale");
    sign = rows_of(sign_in);
    variants = sign.size(0);
    outputs = sign.size(2);
    TORCH_CHECK_VALUE(sign.size(3) == (k + 7) / 8, "sign has ", sign.size(3), " bytes a row; needed for ", k,
                      " inputs: ", (k + 7) / 8, ". Pack it again.");
    TORCH_CHECK_VALUE(row_in.dim() == 3 && row_in.scalar_type() == at::kFloat && row_in.size(0) == variants &&
                          row_in.size(1) == sign.size(1) && (row_in.size(2) == outputs || row_in.size(2) == 1),
                      "row_scale is ", row_in.scalar_type(), " of shape ", row_in.sizes(), "; needed: float32 [",
                      variants, ", ", sign.size(1), ", ", outputs, " or 1].");
    row = rows_of(row_in);
    bank.sign = sign.const_data_ptr<uint8_t>();
    bank.sign_v = sign.stride(0), bank.sign_p = sign.stride(1), bank.sign_n = sign.stride(2);
    bank.row = row.const_data_ptr<float>();
    bank.row_v = row.stride(0), bank.row_p = row.stride(1), bank.row_n = row.size(2) == outputs ? 1 : 0;
    bank.planes = sign.size(1);
    bank.row_bytes = sign.size(3);
    if (col_in) {
      check_cpu(*col_in, "col_scale");
      TORCH_CHECK_VALUE(col_in->dim() == 3 && col_in->scalar_type() == at::kFloat && col_in->size(0) == variants &&
                            col_in->size(1) == bank.planes && col_in->size(2) == k,
                        "col_scale is ", col_in->scalar_type(), " of shape ", col_in->sizes(), "; needed: float32 [",
                        variants, ", ", bank.planes, ", ", k, "].");
      col = rows_of(*col_in);
      bank.col = col.const_data_ptr<float>();
      bank.col_v = col.stride(0), bank.col_p = col.stride(1);
    }
  }

  void check_scales(int64_t variant, int64_t k) const {
    for (int64_t p = 0; p < bank.planes; ++p) {
      check_finite(bank.row + variant * bank.row_v + p * bank.row_p, row.size(2), "row_scale", variant, p);
      if (bank.col) check_columns(variant, p, k);
    }
  }
  void check_columns(int64_t variant, int64_t plane, int64_t k) const {
    check_finite(bank.col_scale(variant, plane), k, "col_scale", variant, plane);
  }

 private:
  static void check_finite(const float* scale, int64_t count, const char* name, int64_t variant, int64_t plane) {
    uint32_t bad = 0;  // integers, so that the compiler may use vectors: a head has 49,152 scales a variant
    for (int64_t i = 0; i < count; ++i) {
      uint32_t bits;
      std::memcpy(&bits, scale + i, 4);
      bad |= uint32_t((bits & 0x7f800000u) == 0x7f800000u);
    }
    TORCH_CHECK_VALUE(bad == 0, name, " of variant ", variant, ", plane ", plane,
                      " holds a NaN or an infinity; allowed: finite values. Export that delta again.");
  }
};

// Sort tokens by variant, checking every index against [-1, variants).
void group_tokens(const Tensor& variant, const BankTensors& tensors, Problem& problem, bool check_scales = true) {
  TORCH_CHECK_VALUE(variant.dim() == 1 && variant.size(0) == problem.tokens &&
                        (variant.scalar_type() == at::kLong || variant.scalar_type() == at::kInt),
                    "variant is ", variant.scalar_type(), " of shape ", variant.sizes(),
                    "; needed: int32 or int64 [", problem.tokens, "].");
  check_cpu(variant, "variant");
  const Tensor wide = variant.to(at::kLong).contiguous();
  const int64_t* index = wide.const_data_ptr<int64_t>();
  std::vector<int64_t> start(size_t(tensors.variants) + 2, 0);
  for (int64_t t = 0; t < problem.tokens; ++t) {
    TORCH_CHECK_VALUE(index[t] >= -1 && index[t] < tensors.variants, "variant[", t, "] is ", index[t],
                      "; allowed: -1 (base) to ", tensors.variants - 1, ".");
    ++start[size_t(index[t]) + 2];
  }
  for (size_t v = 1; v < start.size(); ++v) start[v] += start[v - 1];
  for (int64_t v = -1; v < tensors.variants; ++v) {
    const int64_t begin = start[size_t(v + 1)], count = start[size_t(v + 2)] - begin;
    if (count == 0) continue;
    problem.groups.push_back({v, begin, count});
    if (v >= 0 && check_scales) tensors.check_scales(v, problem.k);
  }
  problem.order.resize(size_t(problem.tokens));
  for (int64_t t = 0; t < problem.tokens; ++t) problem.order[size_t(start[size_t(index[t] + 1)]++)] = t;
}

int worker_count(const Problem& p) {
  if (at::in_parallel_region() || p.n * p.k < kSmallWork) return 1;
  return int(std::min<int64_t>(at::get_num_threads(), (p.n + kRowBlock - 1) / kRowBlock));
}

// All groups of `p` on the row-wise kernels.
void rowwise_linear(const Problem& p, const Ops& ops) {
  const int64_t ld = round_up(p.k, 64), item = size_of(p.dtype);
  // Rows in variant order; with a column scale, one scaled copy for each plane after the plain one.
  const int64_t copies = p.bank.col ? 1 + p.bank.planes : 1;
  std::vector<float> x(size_t(copies * p.tokens * ld), 0.0f), sums(size_t(copies * p.tokens), 0.0f);
  const auto row_at = [&](int64_t copy, int64_t i) { return x.data() + (copy * p.tokens + i) * ld; };
  for (const Group& g : p.groups)
    for (int64_t i = g.begin; i < g.begin + g.count; ++i) {
      const auto* from = static_cast<const uint8_t*>(p.x) + p.order[size_t(i)] * p.x_ld * item;
      ops.to_f32(p.dtype, from, p.k, row_at(0, i));
      for (int64_t copy = 1; copy < copies && g.variant >= 0; ++copy) {
        const float* col = p.bank.col_scale(g.variant, copy - 1);
        for (int64_t k = 0; k < p.k; ++k) row_at(copy, i)[k] = row_at(0, i)[k] * col[k];
      }
      for (int64_t copy = 0; copy < copies; ++copy) {
        double sum = 0;
        for (int64_t k = 0; k < p.k; ++k) sum += row_at(copy, i)[k];
        sums[size_t(copy * p.tokens + i)] = float(sum);
      }
    }
  Pieces pieces((p.n + kRowBlock - 1) / kRowBlock);
  auto body = [&](int) {
    std::vector<float> acc(size_t(p.tokens * kRowBlock));
    float other[kRowBlock];
    for (int64_t piece = pieces.next(); piece >= 0; piece = pieces.next()) {
      const int64_t n0 = piece * kRowBlock, rows = std::min(kRowBlock, p.n - n0);
      std::fill(acc.begin(), acc.end(), 0.0f);
      if (p.w)
        ops.dots(p.dtype, static_cast<const uint8_t*>(p.w) + n0 * p.w_ld * item, p.w_ld, rows, x.data(), ld, p.tokens,
                 p.k, acc.data(), kRowBlock);
      for (const Group& g : p.groups)
        for (int64_t plane = 0; plane < p.bank.planes && g.variant >= 0; ++plane) {
          const int64_t copy = p.bank.col ? 1 + plane : 0;
          ops.signed_sums(p.bank.sign_row(g.variant, plane, n0), p.bank.sign_n, rows, row_at(copy, g.begin), ld,
                          sums.data() + copy * p.tokens + g.begin, g.count, p.k,
                          p.bank.row + g.variant * p.bank.row_v + plane * p.bank.row_p + n0 * p.bank.row_n,
                          p.bank.row_n, acc.data() + g.begin * kRowBlock, kRowBlock);
        }
      for (int64_t i = 0; i < p.tokens; ++i) {
        float* out = acc.data() + i * kRowBlock;
        auto* y = static_cast<uint8_t*>(p.y) + (p.order[size_t(i)] * p.y_ld + n0) * item;
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
    }
  };
  run_workers(worker_count(p), body);
}

// One variant's many tokens without AMX: form W + alpha S a block of rows at a time, then torch's product.
void fold_with_torch(const Problem& p, const Group& g, const Tensor& x, const Tensor& bias, Tensor& y, const Ops& ops) {
  const Tensor ids =
      at::from_blob(const_cast<int64_t*>(p.order.data()) + g.begin, {g.count}, at::TensorOptions().dtype(at::kLong));
  const Tensor x_group = x.index_select(0, ids);
  const int64_t item = size_of(p.dtype);
  Tensor out = at::empty({g.count, p.n}, y.options());
  Tensor folded = at::empty({std::min(kFoldRows, p.n), p.k}, x.options());
  for (int64_t n0 = 0; n0 < p.n; n0 += kFoldRows) {
    const int64_t rows = std::min(kFoldRows, p.n - n0);
    auto* base = static_cast<uint8_t*>(folded.mutable_data_ptr());
    at::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
      std::vector<float> row(size_t(p.k));
      for (int64_t r = begin; r < end; ++r) {
        if (p.w)
          ops.to_f32(p.dtype, static_cast<const uint8_t*>(p.w) + (n0 + r) * p.w_ld * item, p.k, row.data());
        else
          std::fill(row.begin(), row.end(), 0.0f);
        for (int64_t plane = 0; plane < p.bank.planes && g.variant >= 0; ++plane)
          ops.add_signs(p.bank.sign_row(g.variant, plane, n0 + r), p.bank.row_scale(g.variant, plane, n0 + r),
                        p.bank.col_scale(g.variant, plane), p.k, row.data());
        round_weights(ops, p.dtype, row.data(), p.k, base + r * p.k * item);
      }
    });
    out.narrow(1, n0, rows).copy_(at::linear(x_group, folded.narrow(0, 0, rows)));
  }
  if (bias.defined()) out.add_(bias);
  if (p.add)
    y.index_add_(0, ids, out);
  else
    y.index_copy_(0, ids, out);
}

void run_linear(const Tensor& x_in, const Tensor& w_in, const Tensor& bias_in, const BankTensors& tensors,
                const Tensor& variant, Tensor& y, bool add, int64_t path_number, int64_t fold_tokens) {
  TORCH_CHECK_VALUE(fold_tokens >= 1, "fold_tokens is ", fold_tokens, "; allowed: 1 or more.");
  const Path path = path_of(path_number);
  const Tensor x = rows_of(x_in);
  const Tensor w = w_in.defined() ? rows_of(w_in) : w_in;
  const Tensor bias = bias_in.defined() ? bias_in.contiguous() : bias_in;
  Problem p;
  p.tokens = x.size(0), p.k = x.size(1), p.n = tensors.outputs;
  p.dtype = dtype_of(x, "x");
  p.bank = tensors.bank;
  group_tokens(variant, tensors, p);
  if (p.tokens == 0 || p.n == 0) return;
  p.x = x.const_data_ptr(), p.x_ld = x.stride(0);
  if (w.defined()) p.w = w.const_data_ptr(), p.w_ld = w.stride(0);
  if (bias.defined()) p.bias = bias.const_data_ptr();
  p.y = y.mutable_data_ptr(), p.y_ld = y.stride(0), p.add = add;
  const TiledOps* tiled = tiled_ops_for(path);
  if (tiled && p.dtype == DType::bf16) {
    tiled->linear(p, fold_tokens, worker_count(p));
    return;
  }
  const Ops& ops = ops_for(path);
  std::vector<Group> few;
  int64_t few_tokens = 0;
  for (const Group& g : p.groups) {
    if (g.count >= fold_tokens && (g.variant >= 0 || p.w)) {
      fold_with_torch(p, g, x, bias, y, ops);
    } else {
      few.push_back({g.variant, few_tokens, g.count});
      std::copy_n(p.order.begin() + g.begin, g.count, p.order.begin() + few_tokens);
      few_tokens += g.count;
    }
  }
  if (few_tokens == 0) return;
  p.groups = few;
  p.order.resize(size_t(few_tokens));
  p.tokens = few_tokens;
  if (p.w && few_tokens > kRowwiseTokens) {
    const Tensor ids = at::from_blob(p.order.data(), {few_tokens}, at::TensorOptions().dtype(at::kLong));
    y.index_copy_(0, ids, at::linear(x.index_select(0, ids), w, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt));
    p.w = nullptr, p.bias = nullptr, p.add = true;
  }
  if (path == Path::amx)
    tiled->linear(p, std::numeric_limits<int64_t>::max(), worker_count(p));
  else
    rowwise_linear(p, ops);
}

Tensor cpu_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& sign,
                  const Tensor& row_scale, const std::optional<Tensor>& col_scale, const Tensor& variant, int64_t path,
                  int64_t fold_tokens) {
  check_cpu(x, "x");
  check_cpu(weight, "weight");
  TORCH_CHECK_VALUE(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1) && x.dtype() == weight.dtype(),
                    "x is ", x.dtype(), " ", x.sizes(), " and weight ", weight.dtype(), " ", weight.sizes(),
                    "; needed: one dtype, [T, K] and [N, K].");
  const BankTensors bank(sign, row_scale, col_scale, x.size(1));
  TORCH_CHECK_VALUE(bank.outputs == weight.size(0), "sign has ", bank.outputs, " rows; needed as weight has: ",
                    weight.size(0), ".");
  Tensor bias_tensor = bias.value_or(Tensor());
  if (bias_tensor.defined())
    TORCH_CHECK_VALUE(bias_tensor.dim() == 1 && bias_tensor.size(0) == weight.size(0) &&
                          bias_tensor.dtype() == x.dtype() && bias_tensor.device().is_cpu(),
                      "bias is ", bias_tensor.dtype(), " ", bias_tensor.sizes(), "; needed: ", x.dtype(), " [",
                      weight.size(0), "].");
  Tensor y = at::empty({x.size(0), weight.size(0)}, x.options());
  run_linear(x, weight, bias_tensor, bank, variant, y, false, path, fold_tokens);
  return y;
}

void cpu_add_(Tensor& y, const Tensor& x, const Tensor& sign, const Tensor& row_scale,
              const std::optional<Tensor>& col_scale, const Tensor& variant, int64_t path, int64_t fold_tokens) {
  check_cpu(x, "x");
  check_cpu(y, "y");
  TORCH_CHECK_VALUE(x.dim() == 2, "x has shape ", x.sizes(), "; needed: [T, K].");
  const BankTensors bank(sign, row_scale, col_scale, x.size(1));
  TORCH_CHECK_VALUE(y.dim() == 2 && y.size(0) == x.size(0) && y.size(1) == bank.outputs && y.dtype() == x.dtype(),
                    "y is ", y.dtype(), " ", y.sizes(), "; needed: ", x.dtype(), " [", x.size(0), ", ", bank.outputs,
                    "].");
  if (y.numel() > 0 && y.stride(1) != 1) {
    Tensor packed = y.contiguous();
    run_linear(x, Tensor(), Tensor(), bank, variant, packed, true, path, fold_tokens);
    y.copy_(packed);
    return;
  }
  run_linear(x, Tensor(), Tensor(), bank, variant, y, true, path, fold_tokens);
}

// One pass over w1 and w0. Sums are per row, so that a caller can stream rows and form any scale from them.
std::tuple<Tensor, Tensor, Tensor, Tensor> cpu_sign_pack(const Tensor& w1_in, const std::optional<Tensor>& w0_in,
                                                         int64_t path) {
  check_cpu(w1_in, "w1");
  TORCH_CHECK_VALUE(w1_in.dim() == 2, "w1 has shape ", w1_in.sizes(), "; needed: [N, K].");
  const Tensor w1 = rows_of(w1_in);
  Tensor w0;
  if (w0_in) {
    check_cpu(*w0_in, "w0");
    TORCH_CHECK_VALUE(w0_in->sizes() == w1.sizes() && w0_in->dtype() == w1.dtype(), "w0 is ", w0_in->dtype(), " ",
                      w0_in->sizes(), "; needed as w1: ", w1.dtype(), " ", w1.sizes(), ".");
    w0 = rows_of(*w0_in);
  }
  const DType dtype = dtype_of(w1, "w1");
  const Ops& ops = ops_for(path_of(path));
  const int64_t n = w1.size(0), k = w1.size(1), item = size_of(dtype);
  Tensor sign = at::empty({n, (k + 7) / 8}, w1.options().dtype(at::kByte));
  Tensor abs_sum = at::empty({n}, w1.options().dtype(at::kDouble));
  Tensor square_sum = at::empty({n}, w1.options().dtype(at::kDouble));
  Tensor zeros = at::empty({n}, w1.options().dtype(at::kLong));
  const auto* p1 = static_cast<const uint8_t*>(w1.const_data_ptr());
  const auto* p0 = w0.defined() ? static_cast<const uint8_t*>(w0.const_data_ptr()) : nullptr;
  auto* bits = sign.mutable_data_ptr<uint8_t>();
  auto *sums = abs_sum.mutable_data_ptr<double>(), *squares = square_sum.mutable_data_ptr<double>();
  auto* zero = zeros.mutable_data_ptr<int64_t>();
  std::atomic<int64_t> bad{-1};
  const int64_t grain = std::max<int64_t>(1, kSmallWork / std::max<int64_t>(k, 1));
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      if (!ops.pack_row(dtype, p1 + r * w1.stride(0) * item, p0 ? p0 + r * w0.stride(0) * item : nullptr, k,
                        bits + r * sign.size(1), sums + r, squares + r, zero + r))
        bad.store(r, std::memory_order_relaxed);
  });
  TORCH_CHECK_VALUE(bad.load() < 0, "row ", bad.load(),
                    " of w1 - w0 holds a NaN or an infinity; allowed: finite values. Check both weights.");
  return {sign, abs_sum, square_sum, zeros};
}

// out[t] = table[id[t]] + sum_p row_scale * col_scale * sign of row id[t], in the table's dtype.
Tensor cpu_embedding(const Tensor& ids_in, const Tensor& variant, const Tensor& table_in, const Tensor& sign,
                     const Tensor& row_scale, const std::optional<Tensor>& col_scale, int64_t path) {
  check_cpu(table_in, "table");
  check_cpu(ids_in, "ids");
  TORCH_CHECK_VALUE(table_in.dim() == 2 && ids_in.dim() == 1, "table has shape ", table_in.sizes(), " and ids ",
                    ids_in.sizes(), "; needed: [N, K] and [T].");
  TORCH_CHECK_VALUE(ids_in.scalar_type() == at::kLong || ids_in.scalar_type() == at::kInt, "ids is ",
                    ids_in.scalar_type(), "; needed: int32 or int64.");
  const Tensor table = rows_of(table_in);
  const Tensor ids = ids_in.to(at::kLong).contiguous();
  const BankTensors tensors(sign, row_scale, col_scale, table.size(1));
  TORCH_CHECK_VALUE(tensors.outputs == table.size(0), "sign has ", tensors.outputs, " rows; needed as table has: ",
                    table.size(0), ".");
  Problem p;
  p.tokens = ids.size(0), p.k = table.size(1), p.n = table.size(0), p.dtype = dtype_of(table, "table");
  p.bank = tensors.bank;
  const int64_t* id = ids.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < p.tokens; ++t)
    TORCH_CHECK_VALUE(id[t] >= 0 && id[t] < p.n, "ids[", t, "] is ", id[t], "; allowed: 0 to ", p.n - 1, ".");
  group_tokens(variant, tensors, p, false);  // of a whole vocabulary's scales a few are used: those are checked below
  Tensor out = at::empty({p.tokens, p.k}, table.options());
  const Ops& ops = ops_for(path_of(path));
  const int64_t item = size_of(p.dtype);
  const auto* from = static_cast<const uint8_t*>(table.const_data_ptr());
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  std::vector<float> row(size_t(p.k));
  for (const Group& g : p.groups)
    for (int64_t i = g.begin; i < g.begin + g.count; ++i) {
      const int64_t t = p.order[size_t(i)], n = id[t];
      ops.to_f32(p.dtype, from + n * table.stride(0) * item, p.k, row.data());
      for (int64_t plane = 0; plane < p.bank.planes && g.variant >= 0; ++plane)
        ops.add_signs(p.bank.sign_row(g.variant, plane, n), p.bank.row_scale(g.variant, plane, n),
                      p.bank.col_scale(g.variant, plane), p.k, row.data());
      round_weights(ops, p.dtype, row.data(), p.k, to + t * p.k * item);
    }
  return out;
}

int64_t cpu_best_path() { return int64_t(best_path()); }

}  // namespace
}  // namespace zt

TORCH_LIBRARY_FRAGMENT(zen_train, m) {
  m.def("cpu_linear(Tensor x, Tensor weight, Tensor? bias, Tensor sign, Tensor row_scale, Tensor? col_scale, "
        "Tensor variant, int path, int fold_tokens) -> Tensor");
  m.def("cpu_add_(Tensor(a!) y, Tensor x, Tensor sign, Tensor row_scale, Tensor? col_scale, Tensor variant, "
        "int path, int fold_tokens) -> ()");
  m.def("cpu_sign_pack(Tensor w1, Tensor? w0, int path) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("cpu_embedding(Tensor ids, Tensor variant, Tensor table, Tensor sign, Tensor row_scale, Tensor? col_scale, "
        "int path) -> Tensor");
  m.def("cpu_best_path() -> int", &zt::cpu_best_path);
}

TORCH_LIBRARY_IMPL(zen_train, CPU, m) {
  m.impl("cpu_linear", &zt::cpu_linear);
  m.impl("cpu_add_", &zt::cpu_add_);
  m.impl("cpu_sign_pack", &zt::cpu_sign_pack);
  m.impl("cpu_embedding", &zt::cpu_embedding);
}
