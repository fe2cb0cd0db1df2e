// Which instruction set runs, and the bridge to torch's thread pool.
#include <ATen/Parallel.h>

#include "decoder.h"
#include "pool.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace zt {
namespace {

#if defined(__x86_64__) && defined(__linux__)
bool bf16_available() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("bmi2");
}

// Asks the operating system for the tile registers, once.
bool amx_available() {
#if defined(ZT_EMULATED_AMX)  // tests/kernels/emulated_amx.h
  return true;
#endif
  static const bool available = [] {
    unsigned a = 7, b = 0, c = 0, d = 0;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    const unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
    if ((d & wanted) != wanted) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return available;
}
#endif

}  // namespace


Path best_path() {
#if defined(__x86_64__)
#if defined(__linux__)
  if (bf16_available()) return amx_available() ? Path::amx : Path::bf16;
#endif
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

const TiledOps* tiled_ops_for(Path path) {
  if (path == Path::amx) return &amx_ops;
  return path == Path::bf16 ? &bf16_ops : nullptr;
}

void run_workers(int workers, void (*body)(void*, int), void* context) {
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(context, int(i));
  });
}

}  // namespace zt
