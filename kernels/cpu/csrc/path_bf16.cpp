// The tiled kernels on processors with AVX-512 for bf16 but without AMX: AMD's since Zen 4, laptops among them.
#include "decoder.h"

#if defined(__x86_64__) && defined(__linux__)
#include <algorithm>
#include <array>
#include <bit>
#include <memory>

#include "pool.h"
ZT_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx512vnni,fma,f16c,bmi2")
#define ZT_TILES bf16
#include "tiles_bf16.h"
#include "tiled_linear.h"

namespace zt {
namespace bf16 {
#include "tiled_linear.inc"
#include "tiled_decoder.inc"
}  // namespace bf16

const TiledOps bf16_ops = {bf16::linear, bf16::product, bf16::leave_tiles};

}  // namespace zt

ZT_END_TARGET
#else
namespace zt {
const TiledOps bf16_ops = {};
}  // namespace zt
#endif
