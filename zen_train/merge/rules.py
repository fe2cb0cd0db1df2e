"""Three ways to merge one parameter of several checkpoints of one base: `svd_average`, `monosoup`, `mean`.

Each rule takes the base value W0 and k >= 1 checkpoint values of the same shape, ordered oldest to newest;
the newest is the current weight. Formulas: `README.md`. Weights are float32, spectra float64.

What counts as a matrix: a 2-D tensor is one; a 3-D tensor is a stack of them (experts, [E, out, in]), each
merged by itself; four and more dimensions are one convolution, [out, in * kernel]. Smaller tensors have no
singular values.

A tensor that cannot be merged (NaN, a factorisation that fails) is returned unchanged with the reason in
`skipped`. Only a wrong call raises MergeError.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zen_train.errors import MergeError
from zen_train.merge.factorise import spectrum
from zen_train.merge.inputs import as_stack, check_rank, checked, unusable
from zen_train.merge.norms import norm
from zen_train.merge.result import TensorMerge, finished, skip
from zen_train.merge.shrinkage import check_energy, monosoup_shrinkage

# Published threshold (arXiv 2602.09689): below it a delta is rounding noise and its spectrum means nothing.
_SMALLEST_RELATIVE_DELTA = 1e-6


class MergeRule(Protocol):
    """A rule as `merge_tensor` calls it; a rule ignores the options that it has no use for."""

    def __call__(
        self,
        base: Tensor,
        checkpoints: Sequence[Tensor],
        *,
        rank: int | float | None,
        energy: float | None,
        seed: int,
    ) -> TensorMerge: ...


def mean(base: Tensor, checkpoints: Sequence[Tensor]) -> TensorMerge:
    """Elementwise mean of the checkpoints, any shape. The base only scales `relative_change`."""
    base, checkpoints = checked(base, checkpoints)
    reason = unusable(base, checkpoints)
    if reason is not None:
        return skip(checkpoints[-1], reason)
    return finished(_mean(checkpoints), base, checkpoints[-1])


def svd_average(
    base: Tensor, checkpoints: Sequence[Tensor], *, rank: int | float | None, seed: int = 0
) -> TensorMerge:
    """`W0 + (1/k) * sum of tau_i`, tau_i the best rank-r approximation of `W_i - W0`.

    rank: directions kept in every matrix; a float in (0, 1) is that share of the smaller side, at least one;
        None keeps all. Where nothing is cut (None, or a rank that is not below the smaller side) this is
        `mean`, and no factorisation runs.
    seed: see `svd`.
    """
    base, checkpoints = checked(base, checkpoints)
    check_rank(rank)
    reason = unusable(base, checkpoints)
    if reason is not None:
        return skip(checkpoints[-1], reason)
    if base.ndim < 2 or rank is None:
        return finished(_mean(checkpoints), base, checkpoints[-1])
    smaller = min(as_stack(base).shape[1:])
    kept = max(1, round(rank * smaller)) if isinstance(rank, float) else rank
    if kept >= smaller:
        return finished(_mean(checkpoints), base, checkpoints[-1], energy_kept=1.0, rank=smaller)

    weight = base.clone(memory_format=torch.contiguous_format)
    energy, energy_kept, methods = 0.0, 0.0, set()
    for checkpoint in checkpoints:
        for target, w0, w1 in zip(as_stack(weight), as_stack(base), as_stack(checkpoint), strict=True):
            delta = w1 - w0
            if not delta.any():
                continue
            try:
                directions = spectrum(delta, rank=kept, seed=seed)
            except MergeError as error:
                return skip(checkpoints[-1], str(error))
            directions.add_projection_(target, delta, rank=kept, scale=1.0 / len(checkpoints))
            energy += directions.energy
            energy_kept += directions.energy * directions.energy_kept
            methods.add(directions.method)
    share = energy_kept / energy if energy > 0.0 else 1.0
    return finished(weight, base, checkpoints[-1], energy_kept=share, rank=kept, method=_joined(methods))


def monosoup(
    base: Tensor, checkpoints: Sequence[Tensor], *, energy: float | None = None, seed: int = 0
) -> TensorMerge:
    """MonoSoup: damp the low-energy directions of one task vector; truncate nothing.

    One checkpoint: the published method. Several: the "pairwise" form, the same edit on their mean.
    energy: None for the published entropy cut, or a share in (0, 1] (see `monosoup_shrinkage`).
    seed: see `svd`.
    A matrix whose delta is below 1e-6 of the base's norm stays as the newest checkpoint has it. A tensor that
    is not a matrix keeps the value of a single checkpoint, and is averaged for several.
    """
    base, checkpoints = checked(base, checkpoints)
    if energy is not None:
        check_energy(energy)
    reason = unusable(base, checkpoints)
    if reason is not None:
        return skip(checkpoints[-1], reason)
    if base.ndim < 2:
        return finished(_mean(checkpoints), base, checkpoints[-1])

    weight = checkpoints[-1].clone(memory_format=torch.contiguous_format)
    total, high, rank, methods = 0.0, 0.0, 0, set()
    for target, w0, *trained in zip(*map(as_stack, (weight, base, *checkpoints)), strict=True):
        # The mean of the differences: W_i - W0 loses no digit, a mean of the W_i would.
        delta = sum((w - w0 for w in trained[1:]), start=trained[0] - w0) / len(trained)
        delta_norm = norm(delta)
        if delta_norm == 0.0 or delta_norm < _SMALLEST_RELATIVE_DELTA * norm(w0):
            continue
        try:
            directions = spectrum(delta, seed=seed)
        except MergeError as error:
            return skip(checkpoints[-1], str(error))
        edit = monosoup_shrinkage(directions.s, energy=energy)
        # lam_high D_high + lam_low D_low, D_low being D - D_high: only the k leading vectors are multiplied.
        torch.add(w0, delta, alpha=edit.lam_low, out=target)
        directions.add_projection_(target, delta, rank=edit.rank, scale=edit.lam_high - edit.lam_low)
        total += directions.energy
        high += directions.energy * edit.energy_high
        rank = max(rank, edit.rank)
        methods.add(directions.method)
    if not methods:
        return skip(checkpoints[-1], f"delta below {_SMALLEST_RELATIVE_DELTA:g} of the base's norm")
    return finished(
        weight, base, checkpoints[-1], energy_kept=high / total, rank=rank, method=_joined(methods)
    )


RULES: dict[str, MergeRule] = {
    "svd_average": lambda base, checkpoints, *, rank, energy, seed: svd_average(
        base, checkpoints, rank=rank, seed=seed
    ),
    "monosoup": lambda base, checkpoints, *, rank, energy, seed: monosoup(
        base, checkpoints, energy=energy, seed=seed
    ),
    "mean": lambda base, checkpoints, *, rank, energy, seed: mean(base, checkpoints),
}


def merge_tensor(
    rule: str,
    base: Tensor,
    checkpoints: Sequence[Tensor],
    *,
    rank: int | float | None,
    seed: int,
    energy: float | None = None,
) -> TensorMerge:
    """Merge one parameter by the rule called `rule`, a key of `RULES`; the other arguments are the rules'.

    Raises MergeError for an unknown rule, no checkpoint, shapes that differ, rank or energy out of range.
    """
    if rule not in RULES:
        close = difflib.get_close_matches(rule, RULES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise MergeError(f"merge: unknown rule {rule!r}; allowed: {', '.join(RULES)}{hint}")
    return RULES[rule](base, checkpoints, rank=rank, energy=energy, seed=seed)


def _mean(checkpoints: Sequence[Tensor]) -> Tensor:
    total = checkpoints[0].clone(memory_format=torch.contiguous_format)
    for checkpoint in checkpoints[1:]:
        total += checkpoint
    return total / len(checkpoints) if len(checkpoints) > 1 else total


def _joined(methods: set[str]) -> str:
    return "+".join(sorted(methods)) or "none"
