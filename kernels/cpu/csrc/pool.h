// Work sharing on torch's own thread pool, so that no second pool competes for the cores.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace zt {

constexpr int64_t kSmallWork = 1 << 15;  // weights below which one thread is faster

// Call body(context, worker) once on each of `workers` threads of torch's intra-op pool.
void run_workers(int workers, void (*body)(void*, int), void* context);

template <typename F>
void run_workers(int workers, F& body) {
  run_workers(workers, [](void* context, int worker) { (*static_cast<F*>(context))(worker); }, &body);
}

// Hands out 0 .. count - 1, so that a core that is busy elsewhere takes fewer pieces.
class Pieces {
 public:
  explicit Pieces(int64_t count) : count_(count) {}
  int64_t next() {
    const int64_t piece = taken_.fetch_add(1, std::memory_order_relaxed);
    return piece < count_ ? piece : -1;
  }

 private:
  std::atomic<int64_t> taken_{0};
  const int64_t count_;
};

// Waits until `count` pieces are done. Workers finish what they took before they wait, so a worker that the operating
// system has not started holds nobody up; a second parallel region would wait for it.
class Done {
 public:
  explicit Done(int64_t count) : count_(count) {}
  void add_one() { done_.fetch_add(1, std::memory_order_release); }
  void wait() const {
    while (done_.load(std::memory_order_acquire) < count_) std::this_thread::yield();
  }

 private:
  std::atomic<int64_t> done_{0};
  const int64_t count_;
};

}  // namespace zt
