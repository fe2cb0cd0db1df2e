"""Launch of the Triton kernel of operator 2."""

from torch import Tensor

from .triton_kernel import sign_pack_kernel

BLOCK_K = 1024
WARPS = 4


def launch_sign_pack(
    w1: Tensor, w0: Tensor | None, sign: Tensor, abs_sum: Tensor, square_sum: Tensor, zeros: Tensor
) -> None:
    """Fill the four outputs for w1 `[N, K]` and w0 (same shape, or None)."""
    n, k = w1.shape
    if n == 0:
        return
    w1 = w1 if w1.stride(1) == 1 else w1.contiguous()
    w0 = w0 if w0 is None or w0.stride(1) == 1 else w0.contiguous()
    sign_pack_kernel[(n,)](
        w1,
        w1 if w0 is None else w0,
        sign,
        abs_sum,
        square_sum,
        zeros,
        k,
        w1.stride(0),
        0 if w0 is None else w0.stride(0),
        HAS_W0=w0 is not None,
        BLOCK_K=BLOCK_K,
        num_warps=WARPS,
    )
