// The order of work of a stack: phases that several workers go through together, inside one parallel region.
//
// A phase is a count of pieces, handed out by counters; the next one starts when all pieces are done. A worker that the
// operating system starts late finds the counters spent and holds nobody up. Before a worker waits it takes its first
// piece of the next product and fetches that piece's weights, so that memory stays busy.
#include <algorithm>
#include <array>

#include "decoder_directions.h"
#include "pool.h"
#include "scratch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zt {
namespace {

constexpr int64_t kAttendRows = 24;  // query rows that share converted keys
// Looks at a counter before the core is offered to others: about 50 us. On a busy machine the offer costs a whole slice
// of the scheduler, milliseconds, so it is for the case that the other worker is not running at all.
constexpr int kSpins = 1000;

struct alignas(64) Counter {
  std::atomic<int64_t> value{0};
};

// One phase. Each worker takes the pieces of its own range first, then those of others.
class Phase {
 public:
  void set(int64_t count, int workers, Counter* counters) {
    count_ = count, workers_ = workers, next_ = counters, done_ = counters + workers;
  }
  int64_t take(int worker) {
    for (int i = 0; i < workers_; ++i) {
      const int owner = (worker + i) % workers_;
      const int64_t begin = count_ * owner / workers_, end = count_ * (owner + 1) / workers_;
      if (next_[owner].value.load(std::memory_order_relaxed) >= end - begin) continue;
      const int64_t at = begin + next_[owner].value.fetch_add(1, std::memory_order_relaxed);
      if (at < end) return at;
    }
    return -1;
  }
  void add_done() { done_->value.fetch_add(1, std::memory_order_release); }
  void wait() const {
    int spins = 0;
    while (done_->value.load(std::memory_order_acquire) < count_) {
      if (++spins < kSpins) {
#if defined(__x86_64__)
        _mm_pause();
#endif
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  int64_t count_ = 0;
  int workers_ = 1;
  Counter *next_ = nullptr, *done_ = nullptr;
};

// Neighbouring tokens of one sequence.
struct Run {
  int64_t first, count;
};
struct AttendItem {
  int64_t first, count;  // tokens
};

enum Kind { kQkv, kO, kGateUp, kDown, kKinds };
// Phases of a product: its input by rows and tiles, its pieces, and for tokens with directions their sums, the tiles and
// the pieces of their left products. The right ones are done beside the product itself.
enum { kRows, kTiles, kPieces, kSums, kLeftTiles, kLeft, kSteps };
// Phases of a layer: those of each product, and two for attention.
enum { kRotate = kSteps * kKinds, kAttend, kPhases };

template <typename F>
void go(Phase& phase, int worker, F each) {
  for (int64_t i = phase.take(worker); i >= 0; i = phase.take(worker)) {
    each(i);
    phase.add_done();
  }
  phase.wait();
}

// Pieces of each phase of a product. With its own input, only the rows of tokens with directions are shared.
std::array<int64_t, kSteps> steps_of(const Product& product, const DirectionTerm* term, int64_t tokens) {
  const bool own = product.own_input();
  std::array<int64_t, kSteps> steps{own ? 0 : tokens, own ? 0 : product.tiles(), product.pieces(), 0, 0, 0};
  if (!term) return steps;
  if (own) steps[kRows] = term->tokens();
  steps[kTiles] += term->tiles(), steps[kPieces] += term->pieces();
  steps[kSums] = term->tokens(), steps[kLeftTiles] = term->left_tiles(), steps[kLeft] = term->left_pieces();
  return steps;
}

// One product with the directions beside it, as a worker goes through it. `at` gives the phase of a step.
struct Work {
  Product& product;
  const Problem& p;
  DirectionTerm* term;  // or null
  const DirectionView& view;

  // `make(t)` writes the input of token t to `row`.
  template <typename Make, typename At>
  void prepare(int worker, float* row, Make make, At at) const {
    const bool own = product.own_input();
    for (int64_t t = 0; t < (own ? p.tokens : 0); ++t) {
      make(t);
      product.put_row(worker, t, row);
    }
    for (int64_t tile = 0; tile < (own ? product.tiles() : 0); ++tile) product.pack_tile(worker, tile);
    go(at(kRows), worker, [&](int64_t i) {
      const int64_t t = own ? term->token(i) : i;
      make(t);
      if (!own) product.put_row(worker, t, row);
      if (term && term->has(t)) term->put_row(worker, t, row);
    });
    const int64_t tiles = own ? 0 : product.tiles();
    go(at(kTiles), worker, [&](int64_t tile) {
      tile < tiles ? product.pack_tile(worker, tile) : term->pack_tile(worker, tile - tiles);
    });
  }

  // From the piece `first` on, which the worker has taken; `then()` is called before the last wait and gives the result.
  template <typename Then, typename At>
  int64_t finish(int worker, int64_t first, Then then, At at) const {
    Phase& pieces = at(kPieces);
    const int64_t count = product.pieces();
    for (int64_t piece = first; piece >= 0;) {
      const int64_t next = pieces.take(worker);
      if (piece < count)
        product.piece(worker, p, piece, next < count ? next : -1);
      else
        term->piece(worker, view, piece - count, next - count);
      pieces.add_done();
      piece = next;
    }
    Phase* last = &pieces;
    if (term) {
      pieces.wait();
      go(at(kSums), worker, [&](int64_t i) { term->fold(worker, view, term->token(i)); });
      go(at(kLeftTiles), worker, [&](int64_t tile) { term->pack_left_tile(worker, tile); });
      last = &at(kLeft);
      for (int64_t piece = last->take(worker); piece >= 0;) {
        const int64_t next = last->take(worker);
        term->left_piece(worker, view, piece, next);
        last->add_done();
        piece = next;
      }
    }
    const int64_t result = then();
    last->wait();
    return result;
  }
};

class Stack {
 public:
  Stack(const StackView& stack, const BatchView& batch, const Arrangement& signs, const Arrangement& directions,
        int workers)
      : s_(stack),
        b_(batch),
        ops_(ops_for(stack.path)),
        rows_(row_ops_for(stack.path)),
        workers_(workers),
        n_qkv_((stack.heads + 2 * stack.kv_heads) * stack.e),
        x_(batch.tokens * stack.d * 4),
        qkv_(batch.tokens * n_qkv_ * 4),
        attended_(batch.tokens * stack.heads * stack.e * 4),
        gate_up_(batch.tokens * 2 * stack.f * 4) {
    find_items();
    make_products(signs, directions);
    make_phases();
  }

  void run() {
    const int64_t item = size_of(s_.dtype);
    auto* hidden = static_cast<uint8_t*>(b_.hidden);
    for (int64_t t = 0; t < b_.tokens; ++t)
      ops_.to_f32(s_.dtype, hidden + t * b_.hidden_ld * item, s_.d, x_.floats() + t * s_.d);
    auto body = [this](int worker) { work(worker); };
    run_workers(workers_, body);
    for (int64_t t = 0; t < b_.tokens; ++t)
      ops_.from_f32(s_.dtype, x_.floats() + t * s_.d, s_.d, hidden + t * b_.hidden_ld * item);
  }

 private:
  int64_t repeat() const { return s_.heads / s_.kv_heads; }

  void find_items() {
    int64_t most_keys = 0;
    const int64_t most_tokens = std::max<int64_t>(1, kAttendRows / repeat());
    for (int64_t t = 0; t < b_.tokens;) {
      int64_t end = t + 1;
      while (end < b_.tokens && b_.sequence[end] == b_.sequence[t]) ++end;
      single_ &= end == t + 1;
      for (int64_t first = t; first < end; first += most_tokens)
        items_.push_back({first, std::min(most_tokens, end - first)});
      most_keys = std::max<int64_t>(most_keys, b_.position[end - 1] + 1);
      t = end;
    }
    const int64_t rows = (single_ ? 1 : most_tokens) * repeat();
    const int64_t keys = std::min(most_keys, s_.window + most_tokens + kKeyBlock);
    attend_floats_ = attend_floats(rows, s_.e, keys);
  }

  void make_products(const Arrangement& signs, const Arrangement& directions) {
    const std::array<int64_t, kKinds> n{n_qkv_, s_.d, 2 * s_.f, s_.d};
    const std::array<int64_t, kKinds> k{s_.d, s_.heads * s_.e, s_.d, s_.f};
    const std::array<float*, kKinds> y{qkv_.floats(), x_.floats(), gate_up_.floats(), x_.floats()};
    for (int kind = 0; kind < kKinds; ++kind) {
      problems_[size_t(kind)].reserve(s_.layers.size());
      for (const LayerView& layer : s_.layers) {
        const LayerView::Matrix& matrix = matrix_of(layer, kind);
        Problem p;
        p.tokens = b_.tokens, p.k = k[size_t(kind)], p.n = n[size_t(kind)], p.dtype = s_.dtype;
        p.w = matrix.w, p.w_ld = matrix.w_ld, p.bank = matrix.bank;
        p.y = y[size_t(kind)], p.y_ld = p.n, p.y_f32 = true, p.add = kind == kO || kind == kDown;
        problems_[size_t(kind)].push_back(std::move(p));
      }
      const Problem& shape = problems_[size_t(kind)][0];
      products_[size_t(kind)] = product_for(shape, signs, workers_, s_.path);
      if (!directions.order.empty())
        terms_[size_t(kind)] = std::make_unique<DirectionTerm>(
            shape, matrix_of(s_.layers[0], kind).directions, directions, b_.direction, workers_, s_.path);
      row_floats_ = std::max(row_floats_, round_up(shape.k, 64));
    }
  }

  static const LayerView::Matrix& matrix_of(const LayerView& layer, int kind) {
    if (kind == kQkv) return layer.qkv;
    if (kind == kO) return layer.o;
    return kind == kGateUp ? layer.gate_up : layer.down;
  }

  void make_phases() {
    const size_t count = s_.layers.size() * kPhases;
    counters_ = std::vector<Counter>(count * size_t(workers_ + 1));
    phases_.resize(count);
    for (size_t i = 0; i < count; ++i) {
      const int64_t which = int64_t(i) % kPhases;
      int64_t pieces = 0;
      if (which == kRotate) {
        pieces = single_ ? 0 : b_.tokens;
      } else if (which == kAttend) {
        pieces = int64_t(items_.size()) * s_.kv_heads;
      } else {
        pieces = steps_of(*products_[size_t(which / kSteps)], terms_[size_t(which / kSteps)].get(), b_.tokens)
            [size_t(which % kSteps)];
      }
      phases_[i].set(pieces, workers_, counters_.data() + i * size_t(workers_ + 1));
    }
  }

  Phase& phase(int64_t layer, int64_t which) { return phases_[size_t(layer * kPhases + which)]; }

  void work(int worker) {
    Buffer row(row_floats_ * 4), scratch(attend_floats_ * 4);
    int64_t first = phase(0, kPieces).take(worker);  // of the coming product
    for (int64_t layer = 0; layer < int64_t(s_.layers.size()); ++layer) {
      first = product(layer, kQkv, worker, row.floats(), first);
      if (!single_)
        go(phase(layer, kRotate), worker, [&](int64_t t) {
          for (int64_t g = 0; g < s_.kv_heads; ++g) rotate(layer, t, g);
        });
      attend(layer, worker, scratch.floats());
      first = product(layer, kO, worker, row.floats(), first);
      first = product(layer, kGateUp, worker, row.floats(), first);
      first = product(layer, kDown, worker, row.floats(), first);
    }
    if (const TiledOps* tiled = tiled_ops_for(s_.path)) tiled->leave();
  }

  // The input of a product for one token, zero-padded to whole blocks of 64.
  void make_row(int64_t layer, int kind, int64_t t, float* row) {
    const LayerView& view = s_.layers[size_t(layer)];
    const Problem& p = problems_[size_t(kind)][size_t(layer)];
    const float* x = x_.floats() + t * s_.d;
    if (kind == kQkv) rows_.norm(x, view.attention_norm + b_.vector[t] * s_.d, s_.d, s_.eps, row);
    if (kind == kO) std::memcpy(row, attended_.floats() + t * p.k, size_t(p.k) * 4);
    if (kind == kGateUp) rows_.norm(x, view.mlp_norm + b_.vector[t] * s_.d, s_.d, s_.eps, row);
    if (kind == kDown) {
      const float* gate = gate_up_.floats() + t * 2 * s_.f;
      rows_.silu_mul(gate, gate + s_.f, s_.f, row);
    }
    std::fill(row + p.k, row + round_up(p.k, 64), 0.0f);
  }

  // Runs one product from its `first` piece on; returns the first piece of the next product.
  int64_t product(int64_t layer, int kind, int worker, float* row, int64_t first) {
    Product& product = *products_[size_t(kind)];
    const Problem& p = problems_[size_t(kind)][size_t(layer)];
    const Work work{product, p, terms_[size_t(kind)].get(), matrix_of(s_.layers[size_t(layer)], kind).directions};
    const auto make = [&](int64_t t) { make_row(layer, kind, t, row); };
    const auto at = [&](int64_t step) -> Phase& { return phase(layer, kSteps * kind + step); };
    work.prepare(worker, row, make, at);
    const auto next_product = [&] {
      const int then = (kind + 1) % kKinds;
      const int64_t then_layer = layer + (then == 0);
      if (then_layer >= int64_t(s_.layers.size())) return int64_t(-1);
      const int64_t piece = phase(then_layer, kSteps * then + kPieces).take(worker);
      if (piece >= 0 && piece < products_[size_t(then)]->pieces())
        products_[size_t(then)]->warm(problems_[size_t(then)][size_t(then_layer)], piece);
      return piece;
    };
    return work.finish(worker, first, next_product, at);
  }

  uint8_t* page_zero(int64_t layer, int64_t part, int64_t g) const {
    const int64_t head = b_.page_tokens * s_.e;
    return b_.kv + ((layer * 2 + part) * b_.pages * s_.kv_heads + g) * head * size_of(s_.dtype);
  }

  // Bias, norm and rotation of one token's heads around key/value head g; writes its key and value.
  void rotate(int64_t layer, int64_t t, int64_t g) {
    const LayerView& view = s_.layers[size_t(layer)];
    const int64_t e = s_.e, row = b_.vector[t], position = b_.position[t];
    float* qkv = qkv_.floats() + t * n_qkv_;
    const float* cos = b_.cos + position * (e / 2);
    const float* sin = b_.sin + position * (e / 2);
    const auto head = [&](int64_t number, const float* norm, bool turn) {
      float* x = qkv + number * e;
      if (view.qkv_bias)
        for (int64_t i = 0; i < e; ++i) x[i] += view.qkv_bias[row * n_qkv_ + number * e + i];
      if (norm) rows_.norm(x, norm + row * e, e, s_.eps, x);
      if (turn) rows_.rotate(cos, sin, e, x);
      return x;
    };
    for (int64_t r = 0; r < repeat(); ++r) head(g * repeat() + r, view.q_norm, true);
    const float* key = head(s_.heads + g, view.k_norm, true);
    const float* value = head(s_.heads + s_.kv_heads + g, nullptr, false);
    const int64_t page = b_.page_table[b_.sequence[t] * b_.table_ld + position / b_.page_tokens];
    const int64_t at = (page * s_.kv_heads * b_.page_tokens + position % b_.page_tokens) * e * size_of(s_.dtype);
    ops_.from_f32(s_.dtype, key, e, page_zero(layer, 0, g) + at);
    ops_.from_f32(s_.dtype, value, e, page_zero(layer, 1, g) + at);
  }

  AttendJob job_of(int64_t layer, int64_t number, float* scratch) const {
    const AttendItem& item = items_[size_t(number / s_.kv_heads)];
    const int64_t g = number % s_.kv_heads;
    AttendJob job;
    job.q = qkv_.floats() + item.first * n_qkv_ + g * repeat() * s_.e, job.q_ld = n_qkv_;
    job.tokens = item.count, job.heads = repeat(), job.e = s_.e;
    job.position = b_.position[item.first], job.window = s_.window;
    job.keys = page_zero(layer, 0, g), job.values = page_zero(layer, 1, g);
    job.pages = b_.page_table + b_.sequence[item.first] * b_.table_ld;
    job.page_tokens = b_.page_tokens, job.page_ld = s_.kv_heads * b_.page_tokens * s_.e;
    job.scale = 1.0f / std::sqrt(float(s_.e));
    job.out_ld = s_.heads * s_.e;
    job.out = attended_.floats() + item.first * job.out_ld + g * repeat() * s_.e;
    job.scratch = scratch;
    return job;
  }

  // Attention of all items, each fetching the keys of the worker's next one.
  void attend(int64_t layer, int worker, float* scratch) {
    Phase& phase = this->phase(layer, kAttend);
    AttendJob job, then;
    int64_t number = phase.take(worker);
    if (number >= 0) job = job_of(layer, number, scratch);
    while (number >= 0) {
      const int64_t next = phase.take(worker);
      if (next >= 0) then = job_of(layer, next, scratch);
      if (single_) rotate(layer, items_[size_t(number / s_.kv_heads)].first, number % s_.kv_heads);
      job.then = next >= 0 ? &then : nullptr;
      rows_.attend(s_.dtype, job);
      phase.add_done();
      job = then;
      number = next;
    }
    phase.wait();
  }

  const StackView& s_;
  const BatchView& b_;
  const Ops& ops_;
  const RowOps& rows_;
  const int workers_;
  const int64_t n_qkv_;
  Buffer x_, qkv_, attended_, gate_up_;  // float32 [T, ...]
  bool single_ = true;                   // one token of each sequence
  std::vector<AttendItem> items_;
  int64_t attend_floats_ = 0, row_floats_ = 0;
  std::array<std::vector<Problem>, kKinds> problems_;
  std::array<std::unique_ptr<Product>, kKinds> products_;
  std::array<std::unique_ptr<DirectionTerm>, kKinds> terms_;
  std::vector<Counter> counters_;
  std::vector<Phase> phases_;
};

}  // namespace

void run_stack(const StackView& stack, const BatchView& batch, const Arrangement& signs, const Arrangement& directions,
               int workers) {
  if (batch.tokens == 0 || stack.layers.empty()) return;
  Stack(stack, batch, signs, directions, workers).run();
}

void run_head(Path path, const Problem& p, const Arrangement& signs, const DirectionView& view,
              const Arrangement& directions, const int32_t* slot, int workers) {
  const std::unique_ptr<Product> product = product_for(p, signs, workers, path);
  std::unique_ptr<DirectionTerm> term;
  if (!directions.order.empty())
    term = std::make_unique<DirectionTerm>(p, view, directions, slot, workers, path);
  const Ops& ops = ops_for(path);
  std::vector<Counter> counters(size_t(kSteps * (workers + 1)));
  std::array<Phase, kSteps> phases;
  const std::array<int64_t, kSteps> steps = steps_of(*product, term.get(), p.tokens);
  for (size_t i = 0; i < phases.size(); ++i)
    phases[i].set(steps[i], workers, counters.data() + i * size_t(workers + 1));
  const Work work{*product, p, term.get(), view};
  auto body = [&](int worker) {
    Buffer row(round_up(p.k, 64) * 4);
    const auto make = [&](int64_t t) {
      ops.to_f32(p.dtype, static_cast<const uint8_t*>(p.x) + t * p.x_ld * size_of(p.dtype), p.k, row.floats());
      std::fill(row.floats() + p.k, row.floats() + round_up(p.k, 64), 0.0f);
    };
    const auto at = [&](int64_t step) -> Phase& { return phases[size_t(step)]; };
    work.prepare(worker, row.floats(), make, at);
    work.finish(worker, phases[kPieces].take(worker), [] { return int64_t(-1); }, at);
    if (const TiledOps* tiled = tiled_ops_for(path)) tiled->leave();
  };
  run_workers(workers, body);
}

}  // namespace zt
