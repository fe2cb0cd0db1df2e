// A product of the decoder on the row-wise kernels: any dtype, any processor.
#include <algorithm>
#include <limits>

#include "decoder.h"
#include "scratch.h"

namespace zt {
namespace {

constexpr int64_t kPieceRows = 32;
// Tokens of a variant from which W + alpha S is formed instead of looked up or summed.
constexpr int64_t kFoldFromLookups = 20, kFoldFromSums = 6;
// Tokens for which weights are converted to float32 first. Where there are 32 registers that gains nothing.
constexpr int64_t kWidenFrom = 24;

class RowwiseProduct final : public Product {
 public:
  RowwiseProduct(const Problem& p, const Arrangement& arrangement, Path path)
      : ops_(ops_for(path)),
        widen_from_(p.dtype == DType::f32 || path >= Path::avx512 ? std::numeric_limits<int64_t>::max() : kWidenFrom),
        lookup_(p.dtype == DType::bf16 ? lookup_ops_for(path) : nullptr),
        arrangement_(arrangement),
        k_(p.k),
        n_(p.n),
        ld_(round_up(p.k, 64)),
        x_(int64_t(arrangement.order.size()) * ld_ * 4),
        sums_(int64_t(arrangement.order.size()) * 4),
        table_bytes_(lookup_ ? lookup_->table_bytes(p.k) : 0),
        tables_(int64_t(arrangement.order.size()) * table_bytes_),
        place_(size_t(arrangement.tokens)),
        signs_(arrangement.order.size()) {
    for (size_t i = 0; i < arrangement.order.size(); ++i) place_[size_t(arrangement.order[i])] = int64_t(i);
    for (const Arrangement::Part& part : arrangement.parts) {
      if (p.w && folds(part)) continue;
      std::fill_n(signs_.begin() + part.begin, part.count, !part.slots.empty());
      if (!p.w) continue;
      if (plain_.empty() || plain_.back().second != part.begin) plain_.emplace_back(part.begin, part.begin);
      plain_.back().second = part.begin + part.count;
    }
  }

  void put_row(int, int64_t token, const float* row) override {
    const int64_t at = place_[size_t(token)];
    std::memcpy(x_.floats() + at * ld_, row, size_t(ld_) * 4);
    if (!signs_[size_t(at)]) return;
    if (lookup_) {
      sums_.floats()[at] = lookup_->build(row, k_, tables_.bytes() + at * table_bytes_);
      return;
    }
    double sum = 0;
    for (int64_t i = 0; i < k_; ++i) sum += row[i];
    sums_.floats()[at] = float(sum);
  }
  void pack_tile(int, int64_t) override {}
  int64_t pieces() const override { return (n_ + kPieceRows - 1) / kPieceRows; }

  void piece(int, const Problem& p, int64_t piece, int64_t next) override {
    const int64_t tokens = int64_t(arrangement_.order.size()), n0 = piece * kPieceRows, rows = rows_of(piece);
    Buffer acc(tokens * kPieceRows * 4);
    std::fill_n(acc.floats(), tokens * kPieceRows, 0.0f);
    for (const auto& [begin, end] : plain_) {
      if (end - begin >= widen_from_)
        multiply_widened(p, {}, begin, end - begin, n0, rows, acc.floats());
      else
        ops_.dots(p.dtype, static_cast<const uint8_t*>(p.w) + n0 * p.w_ld * size_of(p.dtype), p.w_ld, rows,
                  x_.floats() + begin * ld_, ld_, end - begin, k_, acc.floats() + begin * kPieceRows, kPieceRows);
    }
    for (const Arrangement::Part& part : arrangement_.parts) {
      if (p.w && folds(part)) {
        multiply_widened(p, part.slots, part.begin, part.count, n0, rows, acc.floats());
        continue;
      }
      for (const int32_t slot : part.slots) {
        const uint8_t* sign = p.bank.sign_row(slot, 0, n0);
        if (next >= 0) fetch(p.bank.sign_row(slot, 0, next * kPieceRows), rows_of(next) * p.bank.sign_n);
        const float* scale = p.bank.row + slot * p.bank.row_v + n0 * p.bank.row_n;
        float* out = acc.floats() + part.begin * kPieceRows;
        if (lookup_)
          lookup_->add(sign, p.bank.sign_n, rows, tables_.bytes() + part.begin * table_bytes_,
                       sums_.floats() + part.begin, part.count, k_, scale, p.bank.row_n, out, kPieceRows);
        else
          ops_.signed_sums(sign, p.bank.sign_n, rows, x_.floats() + part.begin * ld_, ld_, sums_.floats() + part.begin,
                           part.count, k_, scale, p.bank.row_n, out, kPieceRows);
      }
    }
    for (int64_t i = 0; i < tokens; ++i) {
      float* y = static_cast<float*>(p.y) + arrangement_.order[size_t(i)] * p.y_ld + n0;
      const float* from = acc.floats() + i * kPieceRows;
      for (int64_t r = 0; r < rows; ++r) y[r] = p.add ? y[r] + from[r] : from[r];
    }
  }

  void warm(const Problem& p, int64_t piece) const override {
    if (!p.w) return;
    const int64_t row_bytes = p.w_ld * size_of(p.dtype);
    fetch(static_cast<const uint8_t*>(p.w) + piece * kPieceRows * row_bytes,
          std::min<int64_t>(4, n_ - piece * kPieceRows) * row_bytes);
  }

 private:
  bool folds(const Arrangement::Part& part) const {
    return !part.slots.empty() && part.count >= (lookup_ ? kFoldFromLookups : kFoldFromSums);
  }

  int64_t rows_of(int64_t piece) const { return std::min(kPieceRows, n_ - piece * kPieceRows); }

  static void fetch(const uint8_t* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  }

  // W, and alpha S of each slot, in float32, and the product of `count` tokens with it.
  void multiply_widened(const Problem& p, const std::vector<int32_t>& slots, int64_t begin, int64_t count, int64_t n0,
                        int64_t rows, float* acc) const {
    Buffer wide(kPieceRows * ld_ * 4);
    for (int64_t r = 0; r < rows; ++r) {
      float* row = wide.floats() + r * ld_;
      ops_.to_f32(p.dtype, static_cast<const uint8_t*>(p.w) + (n0 + r) * p.w_ld * size_of(p.dtype), k_, row);
      for (const int32_t slot : slots)
        ops_.add_signs(p.bank.sign_row(slot, 0, n0 + r), p.bank.row_scale(slot, 0, n0 + r), nullptr, k_, row);
    }
    ops_.dots(DType::f32, wide.bytes(), ld_, rows, x_.floats() + begin * ld_, ld_, count, k_, acc + begin * kPieceRows,
              kPieceRows);
  }

  const Ops& ops_;
  const int64_t widen_from_;
  const LookupOps* lookup_;  // or null
  const Arrangement& arrangement_;
  const int64_t k_, n_, ld_;
  Buffer x_, sums_;  // rows in the arrangement's order, and the sum of each, or the unit of its tables
  const int64_t table_bytes_;
  Buffer tables_;
  std::vector<int64_t> place_;
  std::vector<bool> signs_;  // places whose sign products are formed
  std::vector<std::pair<int64_t, int64_t>> plain_;  // from where to where the base product is done alone
};

}  // namespace

std::unique_ptr<Product> rowwise_product(const Problem& p, const Arrangement& arrangement, int, Path path) {
  return std::make_unique<RowwiseProduct>(p, arrangement, path);
}

}  // namespace zt
