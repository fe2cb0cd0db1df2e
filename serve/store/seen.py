"""What a look at folders found: values that the catalogue hands out and keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zen_train.serve.store.stamps import FolderStamp
from zen_train.serve.types import Variant


@dataclass(frozen=True, kw_only=True)
class Broken:
    """An artifact that is not served, and why."""

    folder: Path
    reason: str
    name: str | None = None
    """Under which it would be served, as far as that is known."""


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What a rescan found, by name."""

    added: tuple[Variant, ...] = ()
    replaced: tuple[tuple[Variant, Variant], ...] = ()
    """(before, now): same name, other weights."""
    removed: tuple[Variant, ...] = ()
    broken: tuple[Broken, ...] = ()
    """All that are broken now, not only those that became so."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A folder as it was last looked at: a variant under its own name, or the reason why there is none."""

    stamp: FolderStamp | None = None
    variant: Variant | None = None
    reason: str = ""


def changes(before: Mapping[str, Variant], now: Mapping[str, Variant], broken: tuple[Broken, ...]) -> Changes:
    """What is different under the names."""
    both = [(before[name], variant) for name, variant in now.items() if name in before]
    return Changes(
        added=tuple(variant for name, variant in now.items() if name not in before),
        replaced=tuple(pair for pair in both if pair[0].content_hash != pair[1].content_hash),
        removed=tuple(variant for name, variant in before.items() if name not in now),
        broken=broken,
    )
