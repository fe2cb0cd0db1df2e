// Which instruction set runs, and the bridge to torch's thread pool.
#include <ATen/Parallel.h>

#include "pool.h"
#include "zt.h"

namespace zt {

Path best_path() {
#if defined(__x86_64__)
  if (amx_available()) return Path::amx;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return Path::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    return Path::avx2;
#endif
  return Path::plain;
}

const Ops& ops_for(Path path) {
  if (path == Path::plain) return ops_plain();
  if (path == Path::avx2) return ops_avx2();
  return ops_avx512();
}

void run_workers(int workers, void (*body)(void*, int), void* context) {
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(context, int(i));
  });
}

}  // namespace zt
