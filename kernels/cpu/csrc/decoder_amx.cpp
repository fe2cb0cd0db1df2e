// Products of the decoder for bf16 on processors with AMX, in two forms.
//
// `Streams`, for one or two tokens: the time is that of reading the weights. A worker reads eight rows side by side that
// are N/8 rows apart, because the hardware fetches ahead within a page only, and one stream alone reaches three quarters
// of the rate of eight. Sign products are computed in between, while the dot products wait for memory.
// `Blocked`, for everything else: neighbouring rows in AMX tiles, `Few` and `Fold` of amx_linear.h.
#include <array>
#include <bit>

#include "decoder.h"

#if defined(__x86_64__) && defined(__linux__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx512vnni,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx512vnni,fma,f16c,bmi2")
#endif
#include "amx_linear.h"

namespace zt {
namespace amx {
namespace {

constexpr int64_t kFoldFrom = 128;      // tokens of a variant from which W + alpha S is formed
constexpr int64_t kStreams = 8;         // distant rows that a worker reads side by side
constexpr int64_t kStreamRows = 4;      // neighbouring rows of each stream in one piece: 32 rows, as look-ups want them
constexpr int64_t kStreamTokens = 2;
constexpr int64_t kMostTerms = 6;       // tokens times planes
constexpr int64_t kStepWords = 8;       // words looked up at a time between dot products
constexpr int64_t kStepColumns = 6 * kBf16Step;  // columns multiplied between two such times

inline void to_bf16(const float* row, int64_t padded_k, uint16_t* to) {
  for (int64_t i = 0; i < padded_k; i += 32)
    _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + i + 16), _mm512_loadu_ps(row + i)));
}

class Streams final : public Product {
 public:
  static bool fits(const Problem& p, const Arrangement& arrangement) {
    int64_t terms = 0;
    for (const auto& part : arrangement.parts) terms += part.count * int64_t(part.slots.size());
    return p.w && arrangement.tokens <= kStreamTokens && terms <= kMostTerms && p.n % kStreams == 0;
  }

  Streams(const Problem& p, const Arrangement& arrangement, int workers)
      : tokens_(arrangement.tokens),
        k_(p.k),
        padded_k_(round_up(p.k, kSignStep)),
        apart_(p.n / kStreams),
        table_bytes_(padded_k_ / kWordColumns * kTableBytes),
        copy_bytes_(round_up(tokens_ * (padded_k_ * 2 + table_bytes_), 4096) + 64),
        data_(copy_bytes_ * workers),
        unscale_(size_t(workers)) {
    for (const auto& part : arrangement.parts)
      for (int64_t i = part.begin; i < part.begin + part.count; ++i)
        for (const int32_t slot : part.slots) terms_.push_back({slot, arrangement.order[size_t(i)]});
  }

  bool own_input() const override { return true; }

  void put_row(int worker, int64_t token, const float* row) override {
    to_bf16(row, padded_k_, x(worker) + token * padded_k_);
    for (const Term& term : terms_)
      if (term.token == token) {
        unscale_[size_t(worker)][token] =
            build_tables(row, padded_k_ / kWordColumns, tables(worker) + token * table_bytes_);
        break;
      }
  }
  void pack_tile(int, int64_t) override {}

  int64_t pieces() const override { return (apart_ + kStreamRows - 1) / kStreamRows; }

  void warm(const Problem& p, int64_t piece) const override {
    for (int64_t r = 0; r < kStreams; ++r) prefetch_signs(p, piece, r);
    const auto* w = static_cast<const char*>(p.w) + piece * kStreamRows * p.w_ld * 2;
    for (int64_t i = 0; i < p.w_ld * 2; i += 64)
      for (int64_t r = 0; r < kStreams; ++r) _mm_prefetch(w + r * apart_ * p.w_ld * 2 + i, _MM_HINT_T1);
  }

  void piece(int worker, const Problem& p, int64_t piece, int64_t next) override {
    const int64_t j0 = piece * kStreamRows, live = std::min(kStreamRows, apart_ - j0);
    alignas(64) float acc[kStreamTokens][kStreamRows * kStreams] = {};  // [token][row of the stream, stream]
    if (tokens_ == 1)
      rows<1>(p, worker, j0, live, next, acc);
    else
      rows<2>(p, worker, j0, live, next, acc);
    for (int64_t t = 0; t < tokens_; ++t) {
      float* y = static_cast<float*>(p.y) + t * p.y_ld + j0;
      for (int64_t r = 0; r < kStreams; ++r)
        for (int64_t j = 0; j < live; ++j) {
          float* to = y + r * apart_ + j;
          *to = p.add ? *to + acc[t][j * kStreams + r] : acc[t][j * kStreams + r];
        }
    }
  }

 private:
  struct Term {
    int64_t slot, token;
  };
  // Where the look-ups of a piece have come to.
  struct Walk {
    size_t term = 0;
    int64_t k0 = 0, word = 0, count = 0;  // count: words transposed at k0
    __m512i words[kChunkWords], even[kMostTerms], odd[kMostTerms];
  };

  uint8_t* copy(int worker) const { return data_.bytes() + copy_bytes_ * worker; }
  uint16_t* x(int worker) const { return reinterpret_cast<uint16_t*>(copy(worker)); }
  uint8_t* tables(int worker) const { return copy(worker) + tokens_ * padded_k_ * 2; }

  // What one stream of a piece holds of each sign matrix. All at once would keep the weights waiting.
  void prefetch_signs(const Problem& p, int64_t piece, int64_t stream) const {
    const int64_t j0 = piece * kStreamRows, bytes = std::min(kStreamRows, apart_ - j0) * p.bank.sign_n;
    for (const Term& term : terms_) {
      const auto* at = reinterpret_cast<const char*>(p.bank.sign_row(term.slot, 0, j0 + stream * apart_));
      for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(at + i, _MM_HINT_T0);
      _mm_prefetch(at + bytes - 1, _MM_HINT_T0);
    }
  }

  void walk_step(const Problem& p, int worker, int64_t j0, int64_t live, Walk& walk) const {
    const Term& term = terms_[walk.term];
    const Bank& bank = p.bank;
    if (walk.word == walk.count) {
      const int64_t left_bytes = bank.row_bytes - walk.k0 / 8;
      EightRows sign;
      for (int64_t i = 0; i < 4; ++i)
        sign[size_t(i)] = bank.sign_row(term.slot, 0, j0) + walk.k0 / 8 +
                          (8 * i % kStreams * apart_ + 8 * i / kStreams) * bank.sign_n;
      transpose_words(sign, apart_ * bank.sign_n, live * kStreams, left_bytes, walk.words);
      walk.word = 0;
      walk.count = std::min<int64_t>(kChunkWords, (left_bytes + 1) / 2);
    }
    const int64_t some = std::min<int64_t>(kStepWords, walk.count - walk.word);
    lookup_words(walk.words + walk.word, some,
                 tables(worker) + term.token * table_bytes_ + (walk.k0 / kWordColumns + walk.word) * kTableBytes,
                 walk.even[walk.term], walk.odd[walk.term]);
    walk.word += some;
    if (walk.word == walk.count) {
      walk.k0 += kChunkColumns;
      if (walk.k0 >= k_) walk.k0 = 0, ++walk.term;
      walk.word = walk.count = 0;
    }
  }

  template <int T>
  void rows(const Problem& p, int worker, int64_t j0, int64_t live, int64_t next,
            float (*acc)[kStreamRows * kStreams]) const {
    Walk walk;
    int64_t fetched = next < 0 ? kStreams : 0;  // streams of the next piece's signs
    for (size_t i = 0; i < terms_.size(); ++i) walk.even[i] = walk.odd[i] = _mm512_setzero_si512();
    const int64_t chunks = (k_ + kChunkColumns - 1) / kChunkColumns;
    const int64_t walk_steps = int64_t(terms_.size()) * ((padded_k_ / kWordColumns + kStepWords - 1) / kStepWords + chunks);
    const int64_t times = live * ((k_ + kStepColumns - 1) / kStepColumns), each = (walk_steps + times - 1) / times;
    const uint16_t* x0 = x(worker);
    const int64_t whole = k_ / kBf16Step * kBf16Step;
    alignas(64) float sums[T][kStreamRows * kStreams][16];
    for (int64_t j = 0; j < live; ++j) {
      const auto* w = static_cast<const uint16_t*>(p.w) + (j0 + j) * p.w_ld;
      __m512 dot[kStreams][T];
      for (auto& stream : dot)
        for (__m512& value : stream) value = _mm512_setzero_ps();
      const auto multiply = [&](int64_t k, __mmask32 columns) {
        __m512bh x_k[T];
        for (int t = 0; t < T; ++t) x_k[t] = (__m512bh)_mm512_loadu_si512(x0 + t * padded_k_ + k);
#pragma GCC unroll 8
        for (int64_t r = 0; r < kStreams; ++r) {
          const auto w_k = (__m512bh)_mm512_maskz_loadu_epi16(columns, w + r * apart_ * p.w_ld + k);
          for (int t = 0; t < T; ++t) dot[r][t] = _mm512_dpbf16_ps(dot[r][t], w_k, x_k[t]);
        }
      };
      for (int64_t k0 = 0; k0 < k_; k0 += kStepColumns) {
        const int64_t end = std::min(k0 + kStepColumns, whole);
        for (int64_t k = k0; k < end; k += kBf16Step) multiply(k, 0xffffffffu);
        if (k0 + kStepColumns > whole && whole < k_ && k0 <= whole) multiply(whole, columns_mask(k_ - whole));
        if (fetched < kStreams) prefetch_signs(p, next, fetched++);
        for (int64_t i = 0; i < each && walk.term < terms_.size(); ++i) walk_step(p, worker, j0, live, walk);
      }
      for (int64_t r = 0; r < kStreams; ++r)
        for (int t = 0; t < T; ++t) _mm512_store_ps(sums[t][j * kStreams + r], dot[r][t]);
    }
    while (walk.term < terms_.size()) walk_step(p, worker, j0, live, walk);
    for (int t = 0; t < T; ++t)
      for (int64_t first = 0; first < live * kStreams; first += 16) {
        __m512i m[16];
        for (int64_t r = 0; r < 16; ++r)
          m[r] = first + r < live * kStreams ? _mm512_load_si512(sums[t][first + r]) : _mm512_setzero_si512();
        transpose(m);
        __m512 total = _mm512_castsi512_ps(m[0]);
        for (int64_t r = 1; r < 16; ++r) total = _mm512_add_ps(total, _mm512_castsi512_ps(m[r]));
        _mm512_store_ps(acc[t] + first, total);
      }
    for (size_t i = 0; i < terms_.size(); ++i)
      add_term(p, worker, terms_[i], j0, live, walk.even[i], walk.odd[i], acc[terms_[i].token]);
  }

  void add_term(const Problem& p, int worker, const Term& term, int64_t j0, int64_t live, __m512i even, __m512i odd,
                float* acc) const {
    __m512 value[2];
    weave_rows(even, odd, value[0], value[1]);
    const __m512 unit = _mm512_set1_ps(unscale_[size_t(worker)][term.token]);
    const float* scale = p.bank.row + term.slot * p.bank.row_v;
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    constexpr int64_t kHalfRows = 16 / kStreams;  // rows of a stream in one vector of sums
    const __m512i at = _mm512_add_epi32(
        _mm512_mullo_epi32(_mm512_and_si512(lane, _mm512_set1_epi32(kStreams - 1)), _mm512_set1_epi32(int(apart_))),
        _mm512_srli_epi32(lane, std::countr_zero(unsigned(kStreams))));
    for (int64_t half = 0; half * kHalfRows < live; ++half) {
      const int64_t there = std::min<int64_t>(16, (live - half * kHalfRows) * kStreams);
      const __m512 scales = p.bank.row_n ? _mm512_mask_i32gather_ps(_mm512_setzero_ps(), rows_mask(there), at,
                                                                    scale + j0 + half * kHalfRows, 4)
                                         : _mm512_set1_ps(*scale);
      float* to = acc + half * 16;
      _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_mul_ps(value[half], unit), scales, _mm512_load_ps(to)));
    }
  }

  const int64_t tokens_, k_, padded_k_;
  const int64_t apart_;  // rows between the streams
  const int64_t table_bytes_, copy_bytes_;
  Buffer data_;  // for each worker: bf16 rows, then tables
  std::vector<std::array<float, kStreamTokens>> unscale_;
  std::vector<Term> terms_;
};

class Blocked final : public Product {
 public:
  Blocked(const Problem& p, const Arrangement& arrangement, int workers)
      : n_(p.n), padded_k_(round_up(p.k, kSignStep)), rows_(arrangement.tokens * padded_k_ * 2),
        seat_(size_t(arrangement.tokens)) {
    few_.steps = (p.k + kBf16Step - 1) / kBf16Step;
    few_.padded_k = padded_k_;
    few_.tiled_base = p.w != nullptr;
    few_.table_bytes = padded_k_ / kWordColumns * kTableBytes;
    input_.tokens = p.tokens, input_.k = p.k, input_.n = p.n, input_.dtype = p.dtype;
    input_.x = rows_.bytes(), input_.x_ld = padded_k_;
    for (const auto& part : arrangement.parts) add_part(arrangement, part);
    few_.token_tiles = (int64_t(few_.slots.size()) + 15) / 16;
    few_.x_tiles = Buffer(few_.token_tiles * few_.steps * kTileBytes);
    few_.unit_data = Buffer(table_count_ * few_.table_bytes);
    for (size_t u = 0; u < few_.units.size(); ++u)
      few_.units[u].data = few_.unit_data.bytes() + first_table_[u] * few_.table_bytes;
    few_rows_ = few_.piece_rows(p, workers);
    few_pieces_ = few_.slots.empty() ? 0 : (n_ + few_rows_ - 1) / few_rows_;
    fold_rows_ = fold_rows_of(p, workers);
    fold_blocks_ = (n_ + fold_rows_ - 1) / fold_rows_;
    span_ = fold_span(p.k);
  }

  void put_row(int, int64_t token, const float* row) override {
    to_bf16(row, padded_k_, reinterpret_cast<uint16_t*>(rows_.bytes()) + token * padded_k_);
    const Seat& seat = seat_[size_t(token)];
    if (seat.units == 0) return;
    const SignUnit& first = few_.units[size_t(seat.unit)];
    const float unscale = build_tables(row, padded_k_ / kWordColumns,
                                       const_cast<uint8_t*>(first.data) + seat.lane * few_.table_bytes);
    for (int64_t u = 0; u < seat.units; ++u) few_.units[size_t(seat.unit + u)].unscale[seat.lane] = unscale;
  }

  int64_t tiles() const override {
    int64_t count = few_.token_tiles;
    for (const Fold& fold : folds_) count += fold.tiles;
    return count;
  }

  void pack_tile(int, int64_t tile) override {
    if (tile < few_.token_tiles) {
      const int64_t left = int64_t(few_.slots.size()) - tile * 16;
      for (int64_t s = 0; s < few_.steps; ++s)
        pack_bf16_tile(input_, few_.slots.data() + tile * 16, std::min<int64_t>(16, left), s * kBf16Step,
                       few_.x_tiles.bytes() + (tile * few_.steps + s) * kTileBytes);
      return;
    }
    tile -= few_.token_tiles;
    for (const Fold& fold : folds_) {
      if (tile < fold.tiles) return fold.pack_tile(input_, tile);
      tile -= fold.tiles;
    }
  }

  int64_t pieces() const override { return few_pieces_ + int64_t(folds_.size()) * fold_blocks_; }

  void piece(int, const Problem& p, int64_t piece, int64_t next) override {
    if (piece < few_pieces_) {
      Buffer acc(int64_t(few_.slots.size()) * few_rows_ * 4), scratch(16 * kTileBytes);
      const int64_t n0 = piece * few_rows_, next_n0 = next < 0 || next >= few_pieces_ ? n_ : next * few_rows_;
      few_.piece(p, n0, std::min(few_rows_, n_ - n0), next_n0, std::min(few_rows_, n_ - next_n0), acc.floats(),
                 scratch.bytes());
      return;
    }
    piece -= few_pieces_;
    const Fold& fold = folds_[size_t(piece / fold_blocks_)];
    const int64_t n0 = piece % fold_blocks_ * fold_rows_;
    Buffer folded(fold_rows_ * span_ * 2);
    Buffer c(std::min(round_up(fold.tiles, 2), kFoldTokens / 16) * (fold_rows_ / 16) * kTileBytes);
    use_full_tiles();
    fold.block(p, n0, std::min(fold_rows_, n_ - n0), folded.bytes(), c.floats());
  }

  void warm(const Problem& p, int64_t piece) const override {
    if (!p.w) return;
    const int64_t n0 = piece < few_pieces_ ? piece * few_rows_ : (piece - few_pieces_) % fold_blocks_ * fold_rows_;
    const auto* w = static_cast<const char*>(p.w) + n0 * p.w_ld * 2;
    const int64_t bytes = std::min(kBlockRows, n_ - n0) * p.w_ld * 2;
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(w + i, _MM_HINT_T1);
  }

 private:
  // Where the tables of one token go.
  struct Seat {
    int64_t unit = 0, units = 0, lane = 0;
  };

  void add_part(const Arrangement& arrangement, const Arrangement::Part& part) {
    const int64_t* tokens = arrangement.order.data() + part.begin;
    if (part.count >= kFoldFrom) {
      folds_.emplace_back(tokens, part.count, input_.k);
      for (const int32_t slot : part.slots) folds_.back().places.emplace_back(slot, 0);
      return;
    }
    auto& slots = few_.slots;
    const bool wide = !part.slots.empty() && part.count >= kWideTokens;
    if (wide) slots.resize(size_t(round_up(int64_t(slots.size()), kTileTokens)), -1);
    const int64_t first = int64_t(slots.size());
    slots.insert(slots.end(), tokens, tokens + part.count);
    const int64_t most = wide ? kWideUnit : 4;
    for (int64_t t0 = 0; t0 < part.count && !part.slots.empty(); t0 += most) {
      const int64_t some = std::min(most, part.count - t0);
      for (int64_t t = 0; t < some && !wide; ++t)
        seat_[size_t(tokens[t0 + t])] = {int64_t(few_.units.size()), int64_t(part.slots.size()), t};
      for (const int32_t slot : part.slots) {
        few_.units.push_back({wide ? Way::wide : Way::lookup, slot, 0, first + t0, some, nullptr, {}});
        first_table_.push_back(table_count_);  // planes share the tables of their tokens
      }
      if (!wide) table_count_ += some;
    }
  }

  const int64_t n_, padded_k_;
  Buffer rows_;  // bf16 [T, padded_k]
  std::vector<Seat> seat_;
  Problem input_;
  Few few_;
  std::vector<int64_t> first_table_;  // of each unit
  std::vector<Fold> folds_;
  int64_t table_count_ = 0, few_rows_ = 0, few_pieces_ = 0, fold_rows_ = 0, fold_blocks_ = 0, span_ = 0;
};

}  // namespace
}  // namespace amx

std::unique_ptr<Product> amx_product(const Problem& p, const Arrangement& arrangement, int workers) {
  if (amx::Streams::fits(p, arrangement)) return std::make_unique<amx::Streams>(p, arrangement, workers);
  return std::make_unique<amx::Blocked>(p, arrangement, workers);
}

void amx_leave() { _tile_release(); }

}  // namespace zt

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace zt {
std::unique_ptr<Product> amx_product(const Problem& p, const Arrangement& arrangement, int workers) {
  return rowwise_product(p, arrangement, workers, Path::plain);
}
void amx_leave() {}
}  // namespace zt
#endif
