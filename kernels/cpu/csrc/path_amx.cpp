// The tiled kernels on processors with AMX.
#include "decoder.h"

#if defined(__x86_64__) && defined(__linux__)
#include <algorithm>
#include <array>
#include <bit>
#include <memory>

#include "pool.h"
ZT_BEGIN_TARGET("amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx512vnni,fma,f16c,bmi2")
#define ZT_TILES amx
#include "tiles_amx.h"
#include "tiled_linear.h"

namespace zt {
namespace amx {
#include "amx_digits.inc"
#include "tiled_linear.inc"
#include "tiled_decoder.inc"
}  // namespace amx

const TiledOps amx_ops = {amx::linear, amx::product, amx::leave_tiles};

}  // namespace zt

ZT_END_TARGET
#else
namespace zt {
const TiledOps amx_ops = {};
}  // namespace zt
#endif
