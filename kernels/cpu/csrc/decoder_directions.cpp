// The two one-bit products of coded directions, and what lies between them.
#include "decoder_directions.h"

#include <algorithm>

namespace zt {

std::unique_ptr<Product> product_for(const Problem& p, const Arrangement& arrangement, int workers, Path path) {
  const TiledOps* tiled = p.dtype == DType::bf16 ? tiled_ops_for(path) : nullptr;
  return tiled ? tiled->product(p, arrangement, workers) : rowwise_product(p, arrangement, workers, path);
}

DirectionTerm::DirectionTerm(const Problem& p, const DirectionView& view, const Arrangement& arrangement,
                             const int32_t* slot, int workers, Path path)
    : shape_(p),
      arrangement_(arrangement),
      slot_(slot),
      stacked_(view.stacked),
      sums_(p.tokens * view.stacked * 4),
      right_(product_for(right_problem(view), arrangement, workers, path)) {
  for (int j = 0; j < view.parts; ++j) {
    left_.push_back(product_for(left_problem(view, j), arrangement, workers, path));
    left_tiles_ += left_.back()->tiles(), left_pieces_ += left_.back()->pieces();
  }
}

Problem DirectionTerm::right_problem(const DirectionView& view) const {
  Problem p;
  p.tokens = shape_.tokens, p.k = shape_.k, p.n = stacked_, p.dtype = shape_.dtype;
  p.bank = view.right;
  p.y = sums_.bytes(), p.y_ld = stacked_, p.y_f32 = true;
  return p;
}

Problem DirectionTerm::left_problem(const DirectionView& view, int part) const {
  const DirectionView::Part& at = view.part[size_t(part)];
  Problem p;
  p.tokens = shape_.tokens, p.k = at.stacked, p.n = at.n, p.dtype = shape_.dtype;
  p.bank = at.left;
  p.y = static_cast<float*>(shape_.y) + at.n0, p.y_ld = shape_.y_ld, p.y_f32 = true, p.add = true;
  return p;
}

void DirectionTerm::fold(int worker, const DirectionView& view, int64_t token) {
  const int64_t slot = slot_[token];
  const int16_t* home = view.home + slot * view.home_v;
  const uint8_t* plane = view.plane + slot * view.plane_v;
  const float* scale = view.scale + slot * view.scale_v;
  const float* sum = sums_.floats() + token * stacked_;
  Buffer scratch((stacked_ + round_up(stacked_, 64)) * 4);
  float *whole = scratch.floats(), *row = whole + stacked_;
  std::fill_n(whole, stacked_, 0.0f);
  for (int64_t r = 0; r < stacked_; ++r) whole[home[r]] += kPlane[plane[r] & 7] * sum[r];
  for (int64_t h = 0; h < stacked_; ++h) whole[h] *= scale[h];
  for (int j = 0; j < view.parts; ++j) {
    const DirectionView::Part& at = view.part[size_t(j)];
    for (int64_t r = 0; r < at.stacked; ++r) row[r] = kPlane[plane[at.r0 + r] & 7] * whole[home[at.r0 + r]];
    std::fill(row + at.stacked, row + round_up(at.stacked, 64), 0.0f);
    left_[size_t(j)]->put_row(worker, token, row);
  }
}

void DirectionTerm::pack_left_tile(int worker, int64_t tile) {
  for (const auto& product : left_) {
    if (tile < product->tiles()) return product->pack_tile(worker, tile);
    tile -= product->tiles();
  }
}

void DirectionTerm::left_piece(int worker, const DirectionView& view, int64_t piece, int64_t next) {
  for (int j = 0; j < view.parts; ++j) {
    Product& product = *left_[size_t(j)];
    const int64_t count = product.pieces();
    if (piece < count) return product.piece(worker, left_problem(view, j), piece, next < count ? next : -1);
    piece -= count, next -= count;
  }
}

}  // namespace zt
