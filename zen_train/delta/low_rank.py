"""A few leading singular directions of a delta, kept in bf16 beside the signs, which then code what is left.

    D ~ u v + sum of alpha S,   u v: the best approximation of D of that rank, S and alpha: of D - u v

The directions go first: they carry what many columns share, which signs code badly, and leave them noise, which they
code well. (Signs first and an SVD of what they leave is worse at equal bits: CHANGELOG.md.)
"""

import torch

_MORE_DIRECTIONS = 8  # than asked for, in the iteration
_ROUNDS = 6


def leading_factors(delta: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(u `[..., N, rank]`, v `[..., rank, K]`) of `delta` `[..., N, K]`, in bf16; by subspace iteration, fixed start.

    The singular values are shared evenly between both.
    """
    whole = delta.to(torch.float32)
    width = min(rank + _MORE_DIRECTIONS, *whole.shape[-2:])
    generator = torch.Generator().manual_seed(0)
    start = torch.randn((*whole.shape[:-2], whole.shape[-1], width), generator=generator).to(whole.device)
    right = torch.linalg.qr(start).Q
    for _ in range(_ROUNDS):
        right = torch.linalg.qr(whole.mT @ torch.linalg.qr(whole @ right).Q).Q
    left, values, mixed = torch.linalg.svd(whole @ right, full_matrices=False)
    root = values[..., None, :rank].sqrt()
    u = left[..., :rank] * root
    v = (right @ mixed.mT)[..., :rank] * root
    return u.bfloat16(), v.mT.bfloat16().contiguous()


def shifted(base: torch.Tensor, u: torch.Tensor, v: torch.Tensor, *, transposed: bool) -> torch.Tensor:
    """`base + u v` in float32, in the stored shape."""
    product = u.to(torch.float32) @ v.to(torch.float32)
    return (product.mT if transposed else product).add_(base)


def worth_it(shape: tuple[int, ...], rank: int) -> bool:
    """Whether two factors are smaller than the matrix itself."""
    return rank > 0 and rank * (shape[-2] + shape[-1]) < shape[-2] * shape[-1]
