"""The same delta with other scales: signs, norms and whole tensors stay bit for bit as they are."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zen_train.delta.artifact import DeltaArtifact
from zen_train.delta.card import CARD_NAME, default_card
from zen_train.delta.codec import Plane, check_planes
from zen_train.delta.manifest import CONFIG_NAME, METADATA_KEY, DeltaConfig, part_name, rounded
from zen_train.delta.plan import header_room_bytes
from zen_train.delta.publish import new_folder
from zen_train.delta.shard_writer import DEFAULT_SHARD_BYTES, ShardWriter
from zen_train.delta.sources import TensorSource
from zen_train.delta.strict_json import compact, readable
from zen_train.errors import DeltaError

_ROOM_FOR_FIGURES_BYTES = 64  # a tensor: its recorded error may get longer


def rescale_artifact(
    artifact: DeltaArtifact,
    folder: str | Path,
    alphas: Mapping[str, Sequence[torch.Tensor]],
    *,
    base: TensorSource,
    tuned: TensorSource,
    provenance: Mapping[str, Any],
    overwrite: bool = False,
) -> DeltaConfig:
    """Write `artifact` to `folder` with the scales of the named parameters replaced, one tensor for each plane.

    The recorded errors are those against `tuned`; `provenance` is added to what the artifact has. Raises DeltaError for
    scales that do not fit or are not finite and positive, OutputError for the folder.
    """
    planes = {name: _planes(artifact, name, scales) for name, scales in alphas.items()}
    sidecars = [artifact.folder / name for name in artifact.config.files]
    merged = dict(artifact.config.provenance) | dict(provenance)
    draft = replace(artifact.config, provenance=merged)
    room_bytes = header_room_bytes(draft) + _ROOM_FOR_FIGURES_BYTES * len(draft.tensors)
    stored_bytes = sum(path.stat().st_size for path in artifact.folder.iterdir() if path.is_file())
    with new_folder(Path(folder), overwrite=overwrite, needed_bytes=stored_bytes + room_bytes) as temporary:
        with ShardWriter(
            temporary, "delta", header_room_bytes=room_bytes, max_shard_bytes=DEFAULT_SHARD_BYTES
        ) as writer:
            for name, entry in artifact.config.tensors.items():
                for suffix in entry.parts:
                    writer.add(f"{name}.{suffix}", _part(artifact, name, suffix, planes.get(name, ())))
            digests = writer.digests()
            entries = {
                name: replace(entry, parts={suffix: digests[f"{name}.{suffix}"] for suffix in entry.parts})
                for name, entry in artifact.config.tensors.items()
            }
            for name, changed in planes.items():
                original = base.get(artifact.base_name(name)).cpu()
                wanted = tuned.get(name).cpu()[: original.shape[0]]
                whole, left = artifact.squares(name, original, wanted, changed)
                error = rounded((left / whole) ** 0.5) if whole else 0.0
                entries[name] = replace(entries[name], relative_error=error)
            config = replace(draft, tensors=entries)
            writer.finish({METADATA_KEY: compact(config.to_json())})
        (temporary / CONFIG_NAME).write_text(readable(config.to_json()), encoding="utf-8")
        for path in sidecars:
            shutil.copyfile(path, temporary / path.name)
        (temporary / CARD_NAME).write_text(default_card(config), encoding="utf-8")
    return config


def _planes(artifact: DeltaArtifact, name: str, scales: Sequence[torch.Tensor]) -> tuple[Plane, ...]:
    entry, old = artifact.entry(name), artifact.planes(name, check_digest=True)
    if entry.directions:
        raise DeltaError(
            f"{artifact.folder}: {name} is held as coded directions, whose scales are not fitted; "
            "export it with code=signs"
        )
    planes = tuple(
        Plane(plane.sign, alpha.detach().cpu().float().view(plane.alpha.shape))
        for plane, alpha in zip(old, scales, strict=True)
    )
    check_planes(planes, entry.packed_shape(), transposed=entry.transposed)
    return planes


def _part(artifact: DeltaArtifact, name: str, suffix: str, planes: Sequence[Plane]) -> torch.Tensor:
    for number, plane in enumerate(planes):
        if suffix == part_name("alpha", number):
            return plane.alpha
    return artifact.part(name, suffix, check_digest=True)
