// The forward of a stack of blocks in one parallel region: what its parts share.
//
// Legend: T tokens, D hidden size, H query heads, G key/value heads, E head size, F MLP width, C tokens of a page.
// Activations between products are float32; the inputs of products have the weights' dtype.
#pragma once

#include <array>
#include <memory>

#include "scratch.h"
#include "zt.h"

namespace zt {

// Attention of one item: `tokens` neighbours of one sequence, the query heads of one key/value head.
struct AttendJob {
  const float* q = nullptr;  // first token, first head; heads are e apart
  int64_t q_ld = 0;          // from token to token
  int64_t tokens = 0, heads = 0, e = 0;
  int64_t position = 0;      // of the first token
  int64_t window = 0;        // tokens a token sees, itself included
  const void* keys = nullptr;    // place 0 of page 0 of this key/value head
  const void* values = nullptr;
  const int32_t* pages = nullptr;  // of the sequence
  int64_t page_tokens = 0, page_ld = 0;  // elements from page to page
  float scale = 1;
  float* out = nullptr;  // heads are e apart
  int64_t out_ld = 0;
  float* scratch = nullptr;  // attend_floats() of them
  const AttendJob* then = nullptr;  // the worker's next item, whose keys are fetched meanwhile
};

constexpr int64_t kKeyBlock = 16;  // keys converted and transposed at a time

inline int64_t attend_floats(int64_t rows, int64_t e, int64_t keys) {
  return round_up(rows, 8) * (round_up(keys, kKeyBlock) + 2 * kKeyBlock + round_up(e, 16)) + 3 * kKeyBlock * round_up(e, 16);
}

// The float32 parts between the products, for one instruction set. Rows are read and written without padding.
struct RowOps {
  void (*norm)(const float* x, const float* weight, int64_t count, float eps, float* out);  // RMS norm, out may be x
  void (*rotate)(const float* cos, const float* sin, int64_t e, float* x);                  // rotary, halves, in place
  void (*silu_mul)(const float* gate, const float* up, int64_t count, float* out);          // silu(gate) * up
  void (*attend)(DType dtype, const AttendJob& job);                                        // dtype of keys and values
  int64_t (*top)(const float* x, int64_t count, float* value);  // the largest and its first place; NaN and 0 with a NaN
};

const RowOps& row_ops_plain();
const RowOps& row_ops_avx2();
const RowOps& row_ops_avx512();
const RowOps& row_ops_for(Path path);

// How the tokens of a batch share deltas. Tokens with the same slots are one group.
struct Arrangement {
  struct Part {
    std::vector<int32_t> slots;  // of the bank, one for each plane in use; empty: the base
    int64_t begin, count;        // in `order`
  };
  int64_t tokens = 0;
  std::vector<int64_t> order;  // token numbers, group by group
  std::vector<Part> parts;
};

// One product for a fixed set of tokens and fixed inputs and outputs, whose weights change from call to call.
// All calls but the constructor's may come from several workers at once; `worker` numbers them.
class Product {
 public:
  virtual ~Product() = default;
  // Whether each worker prepares the whole input for itself (then with its own number), or the workers share it.
  virtual bool own_input() const { return false; }
  // First step: the input of one token, `k` floats, zero-padded to a multiple of 64. Tokens in any order.
  virtual void put_row(int worker, int64_t token, const float* row) = 0;
  // Second step, after all rows: `tiles()` further pieces of preparation.
  virtual int64_t tiles() const { return 0; }
  virtual void pack_tile(int worker, int64_t tile) = 0;
  // Third step: `pieces()` pieces of the product. Problem: w, bank, y; the rest is as at construction.
  virtual int64_t pieces() const = 0;
  virtual void piece(int worker, const Problem& p, int64_t piece, int64_t next) = 0;
  // Fetch what a piece reads first into cache.
  virtual void warm(const Problem& p, int64_t piece) const = 0;
};

// `p` gives k, n, dtype, whether there is a w, w_ld, the strides of the bank, y_ld and add; y is float32.
std::unique_ptr<Product> rowwise_product(const Problem& p, const Arrangement& arrangement, int workers, Path path);

// Sign products by table look-up where there are no tiles: entries of 15 bits, right for bf16.
struct LookupOps {
  int64_t (*table_bytes)(int64_t k);
  // Tables of one row of x, zero-padded to a multiple of 64 columns; returns their unit, NaN if x is not finite.
  float (*build)(const float* x, int64_t k, uint8_t* tables);
  // out[t * out_ld + r] += scale[r * scale_step] * sum_k s[r, k] x[t, k] for up to 32 rows.
  void (*add)(const uint8_t* sign, int64_t sign_ld, int64_t rows, const uint8_t* tables, const float* unit, int64_t tokens,
              int64_t k, const float* scale, int64_t scale_step, float* out, int64_t out_ld);
};
const LookupOps* lookup_ops_for(Path path);  // null: masked sums instead

// The kernels on tiles of bf16 weights.
struct TiledOps {
  // Base and delta in bf16. AMX takes other types too, for the delta of few-token groups alone.
  void (*linear)(const Problem& p, int64_t fold_tokens, int workers) = nullptr;
  std::unique_ptr<Product> (*product)(const Problem& p, const Arrangement& arrangement, int workers) = nullptr;
  void (*leave)() = nullptr;  // at the end of a worker's work: gives the tile registers back
};
extern const TiledOps amx_ops, bf16_ops;
const TiledOps* tiled_ops_for(Path path);  // null: a path without tiles

constexpr float kPlane[8] = {1.0f, 0.5f, 0.25f, 0.125f, 0.0625f, 0.03125f, 0.015625f, 0.0078125f};

// Coded directions of all slots of one matrix. Strides are in elements.
struct DirectionView {
  static constexpr int kMostParts = 3;
  struct Part {
    int64_t n0 = 0, n = 0;         // outputs
    int64_t r0 = 0, stacked = 0;   // rows of `right`
    Bank left;
  };
  int64_t stacked = 0;  // 0: the stack has no room for directions
  Bank right;
  int parts = 0;
  std::array<Part, kMostParts> part;
  const float* scale = nullptr;    // [V, R]
  const int16_t* home = nullptr;   // [V, R]
  const uint8_t* plane = nullptr;  // [V, R]
  int64_t scale_v = 0, home_v = 0, plane_v = 0;
};

// All blocks for one batch. Pointers stay owned by the caller.
struct LayerView {
  const float *attention_norm = nullptr, *mlp_norm = nullptr;           // [M, D]
  const float *qkv_bias = nullptr, *q_norm = nullptr, *k_norm = nullptr;  // [M, N], [M, E], [M, E], or null
  struct Matrix {
    const void* w = nullptr;
    int64_t w_ld = 0;
    Bank bank;
    DirectionView directions;
  } qkv, o, gate_up, down;
};

struct StackView {
  DType dtype = DType::f32;
  Path path = Path::plain;
  int64_t d = 0, f = 0, heads = 0, kv_heads = 0, e = 0;
  float eps = 0;
  int64_t window = 0;
  std::vector<LayerView> layers;
};

struct BatchView {
  int64_t tokens = 0;
  const int32_t *position = nullptr, *sequence = nullptr, *vector = nullptr;  // [T]
  const int32_t* direction = nullptr;  // [T]: slot whose directions a token has, -1: none
  const int32_t* page_table = nullptr;  // [S, J]
  int64_t table_ld = 0;
  const float *cos = nullptr, *sin = nullptr;  // [positions, E/2]
  uint8_t* kv = nullptr;                       // [L, 2, pages, G, C, E]
  int64_t pages = 0, page_tokens = 0;
  void* hidden = nullptr;  // [T, D] of dtype, overwritten
  int64_t hidden_ld = 0;
};

// `signs` holds all tokens by their sign planes, `directions` those that have directions.
void run_stack(const StackView& stack, const BatchView& batch, const Arrangement& signs, const Arrangement& directions,
               int workers);

// y = x W^T + delta in float32 for rows of x in the weights' dtype: the head. `slot` as BatchView::direction.
void run_head(Path path, const Problem& p, const Arrangement& signs, const DirectionView& view,
              const Arrangement& directions, const int32_t* slot, int workers);

}  // namespace zt
