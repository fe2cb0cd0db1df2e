"""Weights set aside on disk: the best so far, and the copy that a refused merge is rolled back from.

On disk, not in memory and not inside the checkpoint, so that peak memory and checkpoint size stay what the training
itself needs (Lightning #21823). A snapshot holds the trained parameters only. Replicated ranks share rank 0's file;
under FSDP2 every rank writes its own part. A file appears by rename, so no reader sees half of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from zen_train.callbacks.disk import whole_file
from zen_train.shards import local

Named = tuple[str, Tensor]


class Snapshot:
    """The trained parameters of one moment, read back one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def save(cls, path: Path, parameters: Iterable[Named], *, rank: int) -> Snapshot:
        """Write the parameters to `path` (with a rank suffix when they are sharded). All ranks call it.

        Raises:
            TrainingError: the disk is full; nothing is left behind.
        """
        named = list(parameters)
        snapshot = cls(_for_rank(path, named, rank))
        if rank == 0 or snapshot.path != path:
            with whole_file(snapshot.path) as temporary:
                save_file({name: local(parameter).contiguous() for name, parameter in named}, temporary)
        return snapshot

    @classmethod
    def find(cls, path: Path, parameters: Iterable[Named], *, rank: int) -> Snapshot | None:
        """The snapshot saved under `path`, or None when its file is gone."""
        snapshot = cls(_for_rank(path, list(parameters), rank))
        return snapshot if snapshot.path.is_file() else None

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Open the file, memory-mapped."""
        with safe_open(self.path, framework="pt") as file:
            yield Reader(file.get_tensor)

    @torch.no_grad()
    def restore_(self, parameters: Iterable[Named]) -> None:
        """Copy the saved values back in place."""
        with self.reader() as read:
            for name, parameter in parameters:
                local(parameter).copy_(read(name))

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


class Reader:
    """`reader(name)` gives this rank's part of a saved parameter."""

    def __init__(self, get: object) -> None:
        assert callable(get)
        self._get = get

    def __call__(self, name: str) -> Tensor:
        return self._get(name)


def _for_rank(path: Path, parameters: list[Named], rank: int) -> Path:
    sharded = any(isinstance(parameter, DTensor) for _, parameter in parameters)
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if sharded else path
