"""Digests and values of stored tensors, checked once for a content hash and the files it was read from."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from torch import Tensor

from zen_train.delta import tensor_digest
from zen_train.delta.rows import padding_is_zero
from zen_train.errors import DeltaError
from zen_train.serve.engine.parts import Part
from zen_train.serve.engine.tensor_files import FileStamp

Stamps = Mapping[Path, FileStamp]


class Checked:
    """Which variants were checked, and from which files. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}
        self._stamps: dict[str, Stamps] = {}

    @contextmanager
    def turn(self, content_hash: str) -> Iterator[None]:
        """One at a time for each variant, so that two who come together do not check it twice."""
        with self._lock:
            turn = self._turns.setdefault(content_hash, threading.Lock())
        with turn:
            yield

    def holds(self, content_hash: str, stamps: Stamps) -> bool:
        """Whether the bytes of these files were found good."""
        return self._stamps.get(content_hash) == stamps

    def note(self, content_hash: str, stamps: Stamps) -> None:
        """They were."""
        self._stamps[content_hash] = stamps

    def forget(self, content_hash: str) -> None:
        """Check it again next time."""
        with self._lock:
            self._stamps.pop(content_hash, None)
            self._turns.pop(content_hash, None)


def check_part(part: Part, stored: Tensor) -> None:
    """The digest, then what FORMAT.md demands of the values. Raises DeltaError."""
    found = tensor_digest(stored)
    if found != part.digest:
        raise DeltaError(
            f"{part.label} has digest {found[:16]}, expected {part.digest[:16]}; the file is damaged, fetch it again"
        )
    if part.kind in ("sign", "right", "left"):
        if not padding_is_zero(stored, part.columns):
            raise DeltaError(f"{part.label}: padding bits past column {part.columns} are not zero")
        return
    values = (
        stored.float().numpy()
    )  # numpy: torch would start threads for a large one, beside those of the steps
    if not np.isfinite(values).all() or (part.kind != "vector" and (values < 0).any()):
        raise DeltaError(f"{part.label} holds NaN, infinity or a negative scale")
