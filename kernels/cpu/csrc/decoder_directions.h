// Coded singular directions in a product of the decoder: the layout is that of kernels/common/direction_bank.py.
//
// y_j += L_j g_j with g = fold(S x): a product with all right vectors, a few sums for each token, and one product with
// the left vectors of each part. Both are products of the decoder without a weight of their own.
#pragma once

#include <memory>
#include <vector>

#include "decoder.h"

namespace zt {

class DirectionTerm {
 public:
  // `p` gives k, n, dtype, y and y_ld; `arrangement` holds the tokens that have directions, and stays.
  DirectionTerm(const Problem& p, const DirectionView& view, const Arrangement& arrangement, const int32_t* slot,
                int workers, Path path);

  int64_t tokens() const { return int64_t(arrangement_.order.size()); }
  int64_t token(int64_t i) const { return arrangement_.order[size_t(i)]; }
  bool has(int64_t token) const { return slot_[token] >= 0; }

  // First the right product, as of `Product`.
  void put_row(int worker, int64_t token, const float* row) { right_->put_row(worker, token, row); }
  int64_t tiles() const { return right_->tiles(); }
  void pack_tile(int worker, int64_t tile) { right_->pack_tile(worker, tile); }
  int64_t pieces() const { return right_->pieces(); }
  void piece(int worker, const DirectionView& view, int64_t piece, int64_t next) {
    right_->piece(worker, right_problem(view), piece, next < 0 ? -1 : next);
  }
  // Then each token's sums, which are the inputs of the left products.
  void fold(int worker, const DirectionView& view, int64_t token);
  int64_t left_tiles() const { return left_tiles_; }
  void pack_left_tile(int worker, int64_t tile);
  // Last the left products, added onto y.
  int64_t left_pieces() const { return left_pieces_; }
  void left_piece(int worker, const DirectionView& view, int64_t piece, int64_t next);

 private:
  Problem right_problem(const DirectionView& view) const;
  Problem left_problem(const DirectionView& view, int part) const;

  const Problem shape_;
  const Arrangement& arrangement_;
  const int32_t* slot_;
  const int64_t stacked_;
  Buffer sums_;  // float32 [T, R]
  std::unique_ptr<Product> right_;
  std::vector<std::unique_ptr<Product>> left_;
  int64_t left_tiles_ = 0, left_pieces_ = 0;
};

std::unique_ptr<Product> product_for(const Problem& p, const Arrangement& arrangement, int workers, Path path);

}  // namespace zt
