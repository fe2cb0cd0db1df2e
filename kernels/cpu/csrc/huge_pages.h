// Huge pages for tensors that every step reads: a weight stream of 4 KiB pages costs an address translation each 64 lines.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace zt {

// Asks for huge pages behind a range, and, with `now`, moves what is there already. Best effort: false where the kernel
// does not, and nothing is different then. Untouched memory of the range is taken by `now`, and only then.
inline bool use_huge_pages(const void* from, int64_t bytes, bool now) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = 2 << 20;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, Linux 6.1
  const auto begin = reinterpret_cast<uintptr_t>(from), end = begin + uintptr_t(bytes);
  const uintptr_t outer[2] = {begin & ~(kHuge - 1), (end + kHuge - 1) & ~(kHuge - 1)};
  const uintptr_t inner[2] = {(begin + kHuge - 1) & ~(kHuge - 1), end & ~(kHuge - 1)};
  for (const uintptr_t* range : {outer, inner}) {  // the neighbours' pages too, where they belong to this process's heap
    if (range[1] <= range[0]) continue;
    void* at = reinterpret_cast<void*>(range[0]);
    const size_t size = range[1] - range[0];
    if (madvise(at, size, MADV_HUGEPAGE) != 0) continue;
    if (!now || madvise(at, size, kCollapse) == 0) return true;
  }
#endif
  return false;
}

}  // namespace zt
