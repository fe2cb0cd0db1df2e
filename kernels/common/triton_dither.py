# Triton gives parameters their types at launch; Python annotations on them would be wrong.
# ruff: noqa: ANN001, ANN201
# mypy: disallow-untyped-defs=false
"""`zen_train.kernels.common.dither` inside a Triton kernel."""

import triton
import triton.language as tl

from zen_train.kernels.common.dither import GOLDEN

_GOLDEN = tl.constexpr(GOLDEN)


@triton.jit
def dither(value, column):
    """float32 to values that bfloat16 holds exactly; `column` is each element's, in a shape that broadcasts."""
    bits = value.to(tl.int32, bitcast=True) + ((column * _GOLDEN) & 0xFFFF)
    return (bits & -65536).to(tl.float32, bitcast=True)
