// Scratch memory that a thread keeps between calls, because fresh pages cost more than the work done on them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace zt {

// A 64-byte aligned block, contents undefined. Taken from and given back to the calling thread's own list.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) {
    auto& kept = Kept::of_thread();
    size_t best = kept.blocks.size();
    for (size_t i = 0; i < kept.blocks.size(); ++i)
      if (kept.blocks[i].first >= bytes && (best == kept.blocks.size() || kept.blocks[i].first < kept.blocks[best].first))
        best = i;
    if (best < kept.blocks.size()) {
      std::tie(bytes_, data_) = kept.blocks[best];
      kept.total_bytes -= bytes_;
      kept.blocks.erase(kept.blocks.begin() + int64_t(best));
      return;
    }
    constexpr int64_t kHuge = 2 << 20;
    const int64_t align = bytes >= kHuge ? kHuge : 64;
    bytes_ = (bytes > 0 ? bytes + align - 1 : align) / align * align;
    data_ = static_cast<uint8_t*>(std::aligned_alloc(size_t(align), size_t(bytes_)));
    if (!data_) throw std::bad_alloc();
#if defined(__linux__)
    if (align == kHuge) madvise(data_, size_t(bytes_), MADV_HUGEPAGE);
#endif
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
    if (!data_) return;
    auto& kept = Kept::of_thread();
    if (kept.total_bytes + bytes_ > kMostKeptBytes) {
      std::free(data_);
      return;
    }
    kept.total_bytes += bytes_;
    kept.blocks.emplace_back(bytes_, data_);
  }
  uint8_t* bytes() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  static constexpr int64_t kMostKeptBytes = 64 << 20;
  struct Kept {
    std::vector<std::pair<int64_t, uint8_t*>> blocks;
    int64_t total_bytes = 0;
    static Kept& of_thread() {
      static thread_local Kept kept;
      return kept;
    }
    ~Kept() {
      for (auto& block : blocks) std::free(block.second);
    }
  };
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace zt
