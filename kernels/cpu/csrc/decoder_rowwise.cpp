// A product of the decoder on the row-wise kernels: any dtype, any processor.
#include <algorithm>

#include "decoder.h"
#include "scratch.h"

namespace zt {
namespace {

constexpr int64_t kPieceRows = 32;

class RowwiseProduct final : public Product {
 public:
  RowwiseProduct(const Problem& p, const Arrangement& arrangement, Path path)
      : ops_(ops_for(path)),
        arrangement_(arrangement),
        k_(p.k),
        n_(p.n),
        ld_(round_up(p.k, 64)),
        x_(int64_t(arrangement.order.size()) * ld_ * 4),
        sums_(int64_t(arrangement.order.size()) * 4),
        place_(size_t(arrangement.tokens)) {
    for (size_t i = 0; i < arrangement.order.size(); ++i) place_[size_t(arrangement.order[i])] = int64_t(i);
  }

  void put_row(int, int64_t token, const float* row) override {
    const int64_t at = place_[size_t(token)];
    std::memcpy(x_.floats() + at * ld_, row, size_t(ld_) * 4);
    double sum = 0;
    for (int64_t i = 0; i < k_; ++i) sum += row[i];
    sums_.floats()[at] = float(sum);
  }
  void pack_tile(int, int64_t) override {}
  int64_t pieces() const override { return (n_ + kPieceRows - 1) / kPieceRows; }

  void piece(int, const Problem& p, int64_t piece, int64_t) override {
    const int64_t tokens = int64_t(arrangement_.order.size()), n0 = piece * kPieceRows, rows = std::min(kPieceRows, n_ - n0);
    Buffer acc(tokens * kPieceRows * 4);
    std::fill_n(acc.floats(), tokens * kPieceRows, 0.0f);
    if (p.w)
      ops_.dots(p.dtype, static_cast<const uint8_t*>(p.w) + n0 * p.w_ld * size_of(p.dtype), p.w_ld, rows, x_.floats(),
                ld_, tokens, k_, acc.floats(), kPieceRows);
    for (const Arrangement::Part& part : arrangement_.parts)
      for (const int32_t slot : part.slots)
        ops_.signed_sums(p.bank.sign_row(slot, 0, n0), p.bank.sign_n, rows, x_.floats() + part.begin * ld_, ld_,
                         sums_.floats() + part.begin, part.count, k_,
                         p.bank.row + slot * p.bank.row_v + n0 * p.bank.row_n, p.bank.row_n,
                         acc.floats() + part.begin * kPieceRows, kPieceRows);
    for (int64_t i = 0; i < tokens; ++i) {
      float* y = static_cast<float*>(p.y) + arrangement_.order[size_t(i)] * p.y_ld + n0;
      const float* from = acc.floats() + i * kPieceRows;
      for (int64_t r = 0; r < rows; ++r) y[r] = p.add ? y[r] + from[r] : from[r];
    }
  }

  void warm(const Problem& p, int64_t piece) const override {
    if (!p.w) return;
    const int64_t row_bytes = p.w_ld * size_of(p.dtype);
    const auto* w = static_cast<const char*>(p.w) + piece * kPieceRows * row_bytes;
    for (int64_t i = 0; i < std::min<int64_t>(4, n_ - piece * kPieceRows) * row_bytes; i += 64)
      __builtin_prefetch(w + i, 0, 2);
  }

 private:
  const Ops& ops_;
  const Arrangement& arrangement_;
  const int64_t k_, n_, ld_;
  Buffer x_, sums_;  // rows in the arrangement's order, and the sum of each
  std::vector<int64_t> place_;
};

}  // namespace

std::unique_ptr<Product> rowwise_product(const Problem& p, const Arrangement& arrangement, int, Path path) {
  return std::make_unique<RowwiseProduct>(p, arrangement, path);
}

}  // namespace zt
