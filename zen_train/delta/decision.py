"""What was decided of one parameter, and the decision for coded directions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from zen_train.delta.directions import encode_directions
from zen_train.delta.manifest import TensorEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """An entry still without digests, the tensors it stores by suffix, and what was lost (squared norms)."""

    entry: TensorEntry
    parts: Mapping[str, torch.Tensor]
    delta_square: float = 0.0
    error_square: float = 0.0
    noisy_zeros: float = 0.0


def decide_directions(
    entry: TensorEntry,
    base: torch.Tensor,
    tuned: torch.Tensor,
    *,
    bits: float,
    transposed: bool,
    bound: float | None,
) -> Decision | None:
    """As coded directions; None where they pay for nothing, break the bound or a value is bad: as signs, then.

    `bound` is on the error of the best multiple of what is coded, as that of signs is on the error of least squares.
    """
    if bound is not None and bound < 0:
        return None
    coded = encode_directions(base, tuned, bits=bits, transposed=transposed)
    if coded is None or not coded.error_square < float("inf"):
        return None
    if coded.parts.size_bytes >= tuned.numel() * base.dtype.itemsize:
        return None
    if bound is not None and coded.least_square > bound**2 * coded.delta_square:
        return None
    return Decision(
        entry=replace(
            entry,
            kind="directions",
            directions=coded.parts.counts,
            transposed=transposed,
            zeros=coded.zeros,
            relative_error=(coded.error_square / coded.delta_square) ** 0.5,
        ),
        parts={"right": coded.parts.right, "left": coded.parts.left, "scales": coded.parts.scales},
        delta_square=coded.delta_square,
        error_square=coded.error_square,
        noisy_zeros=coded.zeros,
    )
