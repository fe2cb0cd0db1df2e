"""Put base and delta together: tensor by tensor in memory, or as a full Hugging Face model folder.

`W = W0 + D_hat` in float32; `dense` replaces, `rows` appends, `same` keeps, `tied` repeats. The base must
match the fingerprint: quickly before anything is written, and byte by byte while its tensors stream past.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from zen_train.delta import roles
from zen_train.delta.artifact import DeltaArtifact
from zen_train.delta.codec import add_delta
from zen_train.delta.dtypes import ARITHMETIC_DTYPES, dtype_code
from zen_train.delta.fingerprint import check_digest, full_check, quick_check
from zen_train.delta.model_files import copy_side_files, write_model_config
from zen_train.delta.publish import new_folder
from zen_train.delta.rows import all_finite, convert, square_distance
from zen_train.delta.shard_reader import TensorSpec
from zen_train.delta.shard_writer import DEFAULT_SHARD_BYTES, ShardWriter, header_entry_bytes
from zen_train.delta.sources import FolderSource, TensorSource
from zen_train.errors import DeltaError
from zen_train.kernels.common.dither import dither_bf16

OutputDtype = Literal["auto", "float32", "bfloat16", "float16"]
_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """`rounding_loss`: ||round(W) - W|| / ||D_hat||, what storing in `dtype` takes from the delta (0:
    nothing).
    """

    folder: Path
    dtype: str
    bytes_total: int
    tensors: int
    rounding_loss: float


def iter_applied(
    artifact: DeltaArtifact, base: TensorSource, *, check: Literal["quick", "full"] = "quick"
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) for every parameter of the variant, tied names included; floating tensors in float32.

    Two tied names get the same tensor object. Digests of the delta are always checked, those of the base by
    `check`. Raises DeltaError for another base or damaged data, before the tensor concerned is handed out.
    """
    config = artifact.config
    compare = full_check if check == "full" else quick_check
    compare(base, config.base.fingerprint, expected_label=config.base.label)
    aliases: dict[str, list[str]] = {}
    for name, entry in config.tensors.items():
        if entry.target is not None:
            aliases.setdefault(entry.target, []).append(name)
    for name, entry in config.tensors.items():
        if entry.target is None:
            tensor = applied_tensor(artifact, name, base.get(artifact.base_name(name)).cpu())
            yield name, tensor
            for alias in aliases.get(name, ()):
                yield alias, tensor
            del tensor  # two tensors at a time would double the memory


def applied_tensor(artifact: DeltaArtifact, name: str, base: torch.Tensor) -> torch.Tensor:
    """One parameter of the variant, float32 when it is floating; `base` is its base tensor."""
    entry = artifact.entry(name)
    if entry.kind == "dense":
        return _widened(artifact.whole(name, "dense", check_digest=True))
    planes = artifact.planes(name, check_digest=True)
    base = artifact.shifted_base(name, base, check_digest=True)
    tensor = add_delta(base, planes, transposed=entry.transposed) if planes else _widened(base)
    if entry.base_rows is None:
        return tensor
    return torch.cat([tensor, _widened(artifact.whole(name, "rows", check_digest=True))])


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return convert(tensor, torch.float32) if tensor.dtype in ARITHMETIC_DTYPES else tensor.clone()


def apply_delta(
    artifact: DeltaArtifact,
    base_folder: str | Path,
    out_folder: str | Path,
    *,
    dtype: OutputDtype = "auto",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
) -> ApplyReport:
    """Write the variant as a model folder that transformers loads, published in one step.

    `dtype="auto"` keeps the base's dtype of every tensor. Tokenizer and chat template come from the artifact,
    else from the base. Raises DeltaError for another base or damaged data, OutputError for the folder.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise DeltaError(f"dtype {dtype!r} is unknown; allowed: auto, {', '.join(_DTYPES)}")
    config, base = artifact.config, FolderSource(base_folder)
    expected, label = config.base.fingerprint, config.base.label
    quick_check(base, expected, expected_label=label)
    plan = {
        name: TensorSpec(_output_dtype(artifact, name, dtype), entry.shape)
        for name, entry in config.tensors.items()
        if entry.target is None or not (config.tied and (roles.is_head(name) or roles.is_embedding(name)))
    }
    room = 64 + sum(
        header_entry_bytes(name, dtype_code(spec.dtype), spec.shape) for name, spec in plan.items()
    )
    needed_bytes = room + sum(spec.size_bytes for spec in plan.values())
    lost = total = 0.0
    unchecked = set(expected.specs)
    with new_folder(out_folder, overwrite=overwrite, needed_bytes=needed_bytes) as temporary:
        with ShardWriter(
            temporary, "model", header_room_bytes=room, max_shard_bytes=max_shard_bytes
        ) as writer:
            for name, spec in plan.items():
                base_name = artifact.base_name(name)
                original = base.get(base_name)
                check_digest(base, base_name, original, expected, label)
                unchecked.discard(base_name)
                exact = applied_tensor(artifact, name, original)
                stored = stored_as(exact, spec.dtype, transposed=artifact.entry(name).transposed)
                if stored.dtype in ARITHMETIC_DTYPES:
                    _check_range(name, stored)
                    changes = _rounding_and_change(stored, exact, original)
                    lost, total = lost + changes[0], total + changes[1]
                writer.add(name, stored)
                del exact, stored
            for base_name in sorted(unchecked):
                check_digest(base, base_name, base.get(base_name), expected, label)
            writer.finish({})
        copy_side_files(artifact, Path(base_folder), temporary)
        write_model_config(base.config, artifact, dtype, temporary / "config.json")
        bytes_total = sum(path.stat().st_size for path in temporary.iterdir())
    return ApplyReport(
        folder=Path(out_folder),
        dtype=dtype if dtype != "auto" else config.base.dtype,
        bytes_total=bytes_total,
        tensors=len(plan),
        rounding_loss=(lost / total) ** 0.5 if total else 0.0,
    )


def stored_as(exact: torch.Tensor, dtype: torch.dtype, *, transposed: bool) -> torch.Tensor:
    """`exact` in `dtype`. A matrix is dithered to bf16 along its input columns: rounded to nearest, changes below half
    a step of bf16, most of a delta beside large weights, would vanish and take their share of the gain with them.
    """
    if exact.dtype == dtype:
        return exact
    if dtype != torch.bfloat16 or exact.dim() < 2:
        return convert(exact, dtype)
    return dither_bf16(exact.mT).mT.contiguous() if transposed else dither_bf16(exact)


def _output_dtype(artifact: DeltaArtifact, name: str, dtype: OutputDtype) -> torch.dtype:
    stored = artifact.config.base.fingerprint.specs[artifact.base_name(name)].dtype
    if artifact.entry(name).kind == "dense":
        whole = artifact.part(name, "dense").dtype
        stored = stored if {stored, whole} <= ARITHMETIC_DTYPES else whole
    return stored if dtype == "auto" or stored not in ARITHMETIC_DTYPES else _DTYPES[dtype]


def _rounding_and_change(
    stored: torch.Tensor, exact: torch.Tensor, original: torch.Tensor
) -> tuple[float, float]:
    """(||stored - exact||^2, ||exact - original||^2) over the rows that the base has too."""
    if exact.shape != original.shape:
        rows = original.shape[0]
        stored, exact = stored[:rows], exact[:rows]
    return square_distance(stored, exact), square_distance(exact, original)


def _check_range(name: str, stored: torch.Tensor) -> None:
    if not all_finite(stored):
        raise DeltaError(f"{name}: values beyond the range of {stored.dtype}; use dtype float32")
