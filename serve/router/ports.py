"""What the router needs of the catalogue: the part of it that it calls, and no more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from zen_train.serve.types import Variant


class Catalogue(Protocol):
    """The artifacts under one root, by served name. Its calls read the disk: they are made in a thread."""

    @property
    def variants(self) -> Mapping[str, Variant]:
        """What is served now."""

    def get(self, name: str) -> Variant:
        """The variant of a name; raises UnknownModelError, or VariantUnusableError with the reason."""

    def rescan(self) -> Any:
        """Look at the root again."""

    def add(self, name: str, path: Path) -> Variant:
        """Serve a folder under a name from now on, instead of what that name meant before."""

    def remove(self, name: str) -> Any:
        """Serve a name no longer."""


InThread = Callable[..., Awaitable[Any]]
"""Runs `function(*args)`, which reads the disk, while the event loop goes on: `asyncio.to_thread`."""
