"""Coded singular directions: the delta as its own leading directions, each vector quantised to a few bits.

    D = sum sigma_i u_i v_i   ~   sum over the kept i of  c_i l_i r_i,   l_i ~ u_i and r_i ~ v_i of b_i bits

Delta-CoMe (arXiv 2406.08903) keeps more bits for the leading directions too. Here the bits follow from the singular
values (see `direction_bits`), the quantiser is the best uniform one of its vector, and the vectors are fitted to each
other once: least squares of one side against the quantised other side, quantised in turn. The scales do not shrink:

    c_i <u_i sigma_i v_i, l_i r_i> = sigma_i^2

Least squares would keep 1 - e_i of every direction, and that share is missing in every layer, where the noise that
replaces it averages out (see `along`). Where directions lie so close that their vectors catch each other's share, all
scales of the matrix are made smaller until `<D_hat, D>` is no more than `||D||^2`.

Cost: the eigenvectors of the Gram matrix of the smaller side n in float64, n^3, some float64 copies of one matrix, and
three products with r directions. A stack keeps the factors of all of its matrices.

Shapes: E matrices of a stack, N rows, K columns, R directions, L entries of a vector.
"""

from dataclasses import dataclass

import torch

from zen_train.delta.codec import matrix_shape
from zen_train.delta.direction_bits import BEST_STEP, most_directions, spread_bits
from zen_train.delta.directions_parts import Directions, directions_product, pack_directions
from zen_train.delta.rows import all_finite, square_distance

_STEP_MULTIPLES = (1.0, 0.7, 0.8, 0.9, 1.12, 1.25)
"""Of the best step of a Gaussian: what is tried for a vector that is none."""
_LEAST_COSINE_SQUARE = 0.02
"""Of a direction and its vectors; below it, keeping all of it costs noise of 49 times its square. A vector that is a
spike is held like that in one bit; of real fine-tunes 0.08 was the least."""
_RIDGE = 1e-6  # of the mean diagonal
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class EncodedDirections:
    """A coded delta with what the code did to it."""

    parts: Directions
    zeros: float  # share of elements of D that are exactly zero
    delta_square: float  # ||D||^2
    error_square: float  # ||D - D_hat||^2
    least_square: float  # the same for the best multiple of D_hat: how well the directions fit


def encode_directions(
    base: torch.Tensor, tuned: torch.Tensor, *, bits: float, transposed: bool
) -> EncodedDirections | None:
    """Code `tuned - base` (two or more dimensions) in at most `bits` a weight, scales counted.

    None when that pays for no direction, nothing changed or a value is not finite. A stack shares one spread of bits
    over its matrices.
    """
    changed = tuned.to(torch.float32) - base.to(torch.float32)
    delta = changed.mT if transposed else changed
    rows, columns = matrix_shape(tuple(tuned.shape), transposed)[-2:]
    most = most_directions(rows, columns, bits)
    if not most or not bool(changed.any()) or not all_finite(changed):
        return None
    matrices_ENK = delta.reshape(-1, rows, columns)
    factors = [singular_factors(delta_NK, most) for delta_NK in matrices_ENK]
    square_R = torch.stack([square for _, _, square in factors]).mean(0)
    bits_R = torch.tensor(spread_bits(square_R.tolist(), rows=rows, columns=columns, bits=bits))
    order = torch.sort(bits_R, descending=True, stable=True).indices[: int((bits_R > 0).sum())]
    if not len(order):
        return None
    bits_R = bits_R[order]
    coded = [
        _coded(delta_NK, left[order], right[order], square[order], bits_R)
        for delta_NK, (left, right, square) in zip(matrices_ENK, factors, strict=True)
    ]
    counts = tuple(int((bits_R > plane).sum()) for plane in range(int(bits_R[0])))
    stack = delta.shape[:-2]
    left, right, scales = (
        torch.stack(parts).view(*stack, *parts[0].shape) for parts in zip(*coded, strict=True)
    )
    parts = pack_directions(left, right, scales, counts)
    made = directions_product(parts, columns)
    delta_square = square_distance(delta, torch.zeros_like(delta))
    error_square, made_square = square_distance(delta, made), square_distance(made, torch.zeros_like(made))
    along = (delta_square + made_square - error_square) / 2
    return EncodedDirections(
        parts=parts,
        zeros=1.0 - int(changed.count_nonzero()) / changed.numel(),
        delta_square=delta_square,
        error_square=error_square,
        least_square=max(delta_square - along**2 / made_square, 0.0) if made_square else delta_square,
    )


def singular_factors(delta_NK: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The leading `sqrt(sigma) u` `[R, N]` and `sqrt(sigma) v` `[R, K]` in float32, and sigma^2 `[R]` in float64."""
    wide = delta_NK.shape[0] < delta_NK.shape[1]
    tall = (delta_NK.mT if wide else delta_NK).to(torch.float64)
    _, vectors = torch.linalg.eigh(tall.mT @ tall)
    inner = vectors[:, -most:].flip(1)
    outer = tall @ inner
    sigma_R = outer.norm(dim=0)
    root_R = sigma_R.sqrt()
    outer_RL = (outer / root_R.clamp_min(_TINY)).mT.to(torch.float32).contiguous()
    inner_RL = (inner * root_R).mT.to(torch.float32).contiguous()
    left, right = (inner_RL, outer_RL) if wide else (outer_RL, inner_RL)
    return left, right, sigma_R.square()


def _coded(
    delta_NK: torch.Tensor,
    left_RN: torch.Tensor,
    right_RK: torch.Tensor,
    square_R: torch.Tensor,
    bits_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Left and right vectors on their levels, and the scale of each direction."""
    left, right = fitted(left_RN, delta_NK, bits_R)
    scales_R = unbiased_scales(
        square_R,
        share_R=_products(left_RN, left) * _products(right_RK, right),
        own_R=_products(left, left) * _products(right, right),
    )
    along = (scales_R * _products(left @ delta_NK, right)).sum()
    whole = delta_NK.to(torch.float64).square().sum()
    scales_R *= (whole / along).clamp_max(1.0) if along > 0 else 1.0  # not more than all of D
    return left, right, scales_R.to(torch.float32)


def fitted(
    left_RN: torch.Tensor, delta_NK: torch.Tensor, bits_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Left and right vectors on their levels: right fitted to the quantised left, then left to the quantised right."""
    left = quantised(left_RN, bits_R)
    right = quantised(_least_squares(left, delta_NK), bits_R)
    return quantised(_least_squares(right, delta_NK.mT), bits_R), right


def unbiased_scales(square_R: torch.Tensor, share_R: torch.Tensor, own_R: torch.Tensor) -> torch.Tensor:
    """Scales that keep all of each direction, and 0 where the vectors point elsewhere or nearly so.

    Args:
        square_R: sigma^2.
        share_R: `<u sigma v, l r>`.
        own_R: `||l r||^2`.
    """
    held_R = (share_R > 0) & (share_R.square() > _LEAST_COSINE_SQUARE * square_R * own_R)
    return torch.where(held_R, square_R / share_R.clamp_min(_TINY), 0.0)


def quantised(vectors_RL: torch.Tensor, bits_R: torch.Tensor) -> torch.Tensor:
    """Each vector on the levels of its bits, odd multiples of 2^-(b-1): the direction that is nearest to its own."""
    out = torch.empty_like(vectors_RL)
    for bits in bits_R.unique().tolist():
        out[bits_R == bits] = _nearest(vectors_RL[bits_R == bits], bits)
    return out


def _nearest(vectors_RL: torch.Tensor, bits: int) -> torch.Tensor:
    half = 2 ** (bits - 1)
    unit_R1 = vectors_RL.square().mean(1, keepdim=True).sqrt().clamp_min(_TINY) * BEST_STEP[bits - 1]
    best, best_R = torch.empty(0), torch.full((len(vectors_RL),), -float("inf"), dtype=torch.float64)
    for multiple in _STEP_MULTIPLES if bits > 1 else (1.0,):  # one bit is the sign, whatever the step
        cells = (vectors_RL / (unit_R1 * multiple)).floor_().clamp_(-half, half - 1)
        values = cells.mul_(2.0).add_(1.0).div_(half)
        cosine_R = _products(values, vectors_RL) / _products(values, values).sqrt()
        better_R = cosine_R > best_R
        best = torch.where(better_R[:, None], values, best) if len(best) else values
        best_R = torch.where(better_R, cosine_R, best_R)
    return best


def _least_squares(factor_RN: torch.Tensor, target_NK: torch.Tensor) -> torch.Tensor:
    """The X `[R, K]` that makes `factor^T X` nearest to the target."""
    gram_RR = (factor_RN @ factor_RN.mT).to(torch.float64)
    gram_RR.diagonal().add_(_RIDGE * gram_RR.diagonal().mean())
    product_RK = (factor_RN @ target_NK).to(torch.float64)
    return torch.linalg.solve(gram_RR, product_RK).to(torch.float32)


def _products(a_RL: torch.Tensor, b_RL: torch.Tensor) -> torch.Tensor:
    """Inner products of rows, multiplied in float32 and summed in float64."""
    return (a_RL * b_RL).sum(1, dtype=torch.float64)
