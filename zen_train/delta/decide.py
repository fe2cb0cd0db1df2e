"""Decide how one parameter is held, and code it. CPU tensors in and out; nothing is read or written here."""

from dataclasses import replace
from math import prod

import torch

from zen_train.delta.codec import EncodedTensor, encode
from zen_train.delta.decision import Decision, decide_directions
from zen_train.delta.dtypes import ARITHMETIC_DTYPES, dtype_code
from zen_train.delta.export_options import ExportOptions
from zen_train.delta.low_rank import leading_factors, shifted, worth_it
from zen_train.delta.manifest import TensorEntry, part_name
from zen_train.delta.pairing import Pair
from zen_train.delta.rows import all_finite, square_distance
from zen_train.errors import DeltaError

SMALL_DENSE_NUMEL = 1 << 16
"""Up to this size a dense tensor keeps float32: a norm costs nothing."""
DENSE_MAX_RELATIVE_ERROR = 0.05
"""A larger dense tensor is stored in the base's dtype when that rounding loses no more of ||D|| than this."""


def plain_entry(pair: Pair) -> TensorEntry:
    """The entry of a pair before anything is decided."""
    return TensorEntry(
        kind="dense",
        shape=pair.tuned.shape,
        dtype=dtype_code(pair.base.dtype),
        base_tensor=pair.base_name if pair.base_name != pair.name else None,
    )


def decide(
    pair: Pair, base: torch.Tensor, tuned: torch.Tensor, options: ExportOptions, model_type: str | None
) -> Decision:
    """Code one parameter. Raises DeltaError for NaN or infinity in either tensor."""
    entry = plain_entry(pair)
    if not {base.dtype, tuned.dtype} <= ARITHMETIC_DTYPES:
        if base.dtype == tuned.dtype and not pair.grown and torch.equal(base, tuned):
            return Decision(entry=replace(entry, kind="same"), parts={})
        return Decision(entry=entry, parts={"dense": tuned})
    shared = tuned[: base.shape[0]] if pair.grown else tuned
    planes = options.planes_of(pair.name)
    coded: EncodedTensor | None = None
    factors: tuple[torch.Tensor, ...] = ()
    if shared.dim() >= 2 and planes:
        transposed = options.is_transposed(pair.name, model_type)
        if options.code == "directions" and not pair.grown:
            found = decide_directions(
                entry,
                base,
                tuned,
                bits=options.direction_bits,
                transposed=transposed,
                bound=options.max_relative_error(pair.name),
            )
            if found is not None:
                return found
        from_base, factors = _low_rank_part(base, shared, options.low_rank, transposed)
        coded = encode(
            from_base,
            shared,
            scale=options.scale,
            planes=planes,
            transposed=transposed,
            along_weight=options.along_weight,
        )
    # The code knows the size of what it coded, which is the delta unless some of it went elsewhere.
    delta_square = coded.delta_square if coded and not factors else square_distance(shared, base)
    if not delta_square < float("inf"):
        raise DeltaError("it holds NaN or infinite values")
    if shared.dim() >= 2 and not planes and delta_square > 0 and not pair.grown:
        return Decision(
            entry=replace(entry, kind="same", relative_error=1.0),
            parts={},
            delta_square=delta_square,
            error_square=delta_square,
        )
    packs = delta_square > 0 and coded is not None and _may_pack(pair, coded, factors, delta_square, options)
    if delta_square > 0 and not packs:
        stored, error_square = stored_form(tuned, base.dtype, delta_square)
        relative_error = (error_square / delta_square) ** 0.5
        entry = replace(entry, relative_error=relative_error)
        return Decision(
            entry=entry, parts={"dense": stored}, delta_square=delta_square, error_square=error_square
        )
    parts: dict[str, torch.Tensor] = {}
    if packs and coded is not None:
        entry = replace(
            entry,
            scale=options.scale,
            planes=len(coded.planes),
            transposed=coded.transposed,
            zeros=coded.zeros,
            rank=options.low_rank if factors else 0,
            relative_error=(coded.error_square / delta_square) ** 0.5,
        )
        parts |= zip(("u", "v"), factors, strict=False)
        for number, plane in enumerate(coded.planes):
            parts[part_name("sign", number)] = plane.sign
            parts[part_name("alpha", number)] = plane.alpha
    if pair.grown:
        added = tuned[base.shape[0] :]
        parts["rows"], _ = stored_form(added, base.dtype, square_distance(added, torch.zeros_like(added)))
        entry = replace(entry, kind="rows", base_rows=base.shape[0])
    else:
        entry = replace(entry, kind="sign" if packs else "same")
    return Decision(
        entry=entry,
        parts=parts,
        delta_square=delta_square,
        error_square=coded.error_square if packs and coded is not None else 0.0,
        noisy_zeros=coded.noisy_zeros if packs and coded is not None else 0.0,
    )


def stored_form(tensor: torch.Tensor, dtype: torch.dtype, delta_square: float) -> tuple[torch.Tensor, float]:
    """`tensor` in the base's `dtype` where that is exact or costs little, else float32; and the squared
    loss.
    """
    low = tensor.to(dtype)
    error_square = square_distance(low, tensor)
    bound = 0.0 if tensor.numel() <= SMALL_DENSE_NUMEL else DENSE_MAX_RELATIVE_ERROR**2 * delta_square
    if error_square > bound or not error_square < float("inf"):
        low, error_square = tensor.to(torch.float32), 0.0
    if not all_finite(low):
        raise DeltaError("it holds NaN or infinite values")
    return low, error_square


def _low_rank_part(
    base: torch.Tensor, tuned: torch.Tensor, rank: int, transposed: bool
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(`base + u v`, (u, v)), or (base, ()) where there is no such part."""
    if not worth_it(tuple(tuned.shape), rank):
        return base, ()
    change = tuned.float() - base.float()
    if not bool(change.any()) or not all_finite(change):
        return base, ()  # nothing to factorise, or an error that the code names
    u, v = leading_factors(change.mT if transposed else change, rank)
    return shifted(base, u, v, transposed=transposed), (u, v)


def _may_pack(
    pair: Pair,
    coded: EncodedTensor,
    factors: tuple[torch.Tensor, ...],
    delta_square: float,
    options: ExportOptions,
) -> bool:
    """Packed is smaller than whole, and the error keeps its bound."""
    packed_bytes = sum(p.sign.numel() + 4 * p.alpha.numel() for p in coded.planes)
    packed_bytes += sum(2 * factor.numel() for factor in factors)
    if packed_bytes >= prod(coded.shape) * pair.base.dtype.itemsize:
        return False
    bound = options.max_relative_error(pair.name)
    return bound is None or (coded.least_square / delta_square) ** 0.5 <= bound
