"""What is served under which name: every artifact under one root, and what was added by hand.

Contract
- A name is the variant's own with a prefix (`zen4-coder`), or what `add` was given; it is unique
  (`names.py`).
- An artifact that cannot be served is reported with its reason and hides no other.
- Looking is cheap: descriptions and headers, and only of folders whose files changed; no tensor is read.
- `remove` holds: a rescan does not bring the name back, `add` does.
- Any thread may call; `variants` and `broken` are snapshots that never change in place.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from zen_train.delta import Fingerprint
from zen_train.delta.manifest import CONFIG_NAME
from zen_train.serve.errors import BadRequestError, ConflictError, UnknownModelError, VariantUnusableError
from zen_train.serve.store.names import ALLOWED, is_name, name_scanned
from zen_train.serve.store.opening import open_delta, why_unusable
from zen_train.serve.store.paths import is_inside, resolve_inside
from zen_train.serve.store.scan import find_artifacts
from zen_train.serve.store.seen import Broken, Changes, Seen, changes
from zen_train.serve.store.stamps import folder_stamp
from zen_train.serve.types import Variant


class Catalogue:
    """The artifacts under `root`, scanned at once. A root that does not exist holds nothing yet."""

    def __init__(
        self,
        root: str | Path,
        *,
        base: Fingerprint | None = None,
        base_label: str = "another",
        prefix: str = "zen4-",
        reserved: Collection[str] = (),
        size_of: Callable[[Path], int] | None = None,
    ) -> None:
        """Scan.

        Args:
            base: of the base that is served; artifacts for another are broken. None: not compared.
            base_label: how messages call it.
            prefix: before a variant's own name.
            reserved: names that no variant may have (the base's).
            size_of: bytes of an artifact where it is served (`Engine.device_bytes`), raising
                VariantUnusableError; None: the bytes it stores.
        """
        self.root = Path(root)
        self._base, self._base_label = base, base_label
        self._prefix, self._reserved = prefix, frozenset(reserved)
        self._size_of = size_of
        self._lock = threading.Lock()
        self._seen: dict[Path, Seen] = {}
        self._scanned: list[Path] = []
        self._unreadable: list[Broken] = []
        self._added: dict[str, Path] = {}
        self._removed: set[str] = set()
        self._variants: Mapping[str, Variant] = MappingProxyType({})
        self._broken: tuple[Broken, ...] = ()
        self.rescan()

    @property
    def variants(self) -> Mapping[str, Variant]:
        """What can be served, by name."""
        return self._variants

    @property
    def broken(self) -> tuple[Broken, ...]:
        """What cannot."""
        return self._broken

    def get(self, name: str) -> Variant:
        """The variant of a name.

        Raises:
            UnknownModelError: there is none; near names are given.
            VariantUnusableError: there is one, and it cannot be served.
        """
        variant = self._variants.get(name)
        if variant is not None:
            return variant
        for broken in self._broken:
            if broken.name == name:
                raise VariantUnusableError(broken.reason, param="model")
        raise self._unknown(name)

    def rescan(self) -> Changes:
        """Look at the root again, and at what was added."""
        with self._lock:
            before = self._variants
            self._scanned, self._unreadable = find_artifacts(self.root)
            self._seen = {folder: self._look(folder) for folder in (*self._scanned, *self._added.values())}
            self._name_all()
            return changes(before, self._variants, self._broken)

    def add(self, name: str, path: str | Path) -> Variant:
        """Serve a folder under `root` by this name from now on, instead of what the name meant before.

        Raises:
            BadRequestError: a name or path that is not allowed.
            ConflictError: the name is reserved.
            VariantUnusableError: the folder holds nothing that can be served. Nothing changes then.
        """
        if not is_name(name):
            raise BadRequestError(f"lora_name {name[:200]!r} is not allowed: {ALLOWED}", param="lora_name")
        if name in self._reserved:
            raise ConflictError(f"{name!r} is the name of the base; choose another", param="lora_name")
        folder = resolve_inside(self.root, path)
        with self._lock:
            seen = self._look(folder)
            if seen.variant is None:
                raise VariantUnusableError(seen.reason, param="lora_path")
            self._seen[folder] = seen
            self._added[name] = folder
            self._removed.discard(name)
            self._name_all()
            return self._variants[name]

    def remove(self, name: str) -> None:
        """Serve a name no longer, until it is added again. Raises UnknownModelError."""
        with self._lock:
            if name not in self._variants and name not in self._added:
                raise self._unknown(name)
            self._added.pop(name, None)
            self._removed.add(name)
            self._name_all()

    def _look(self, folder: Path) -> Seen:
        """Open a folder, unless its files are those of last time."""
        try:
            stamp = folder_stamp(folder)
        except OSError as error:
            return Seen(reason=f"{folder} cannot be read: {error.strerror or error}")
        last = self._seen.get(folder)
        if last is not None and last.stamp == stamp:
            return last
        try:
            return Seen(stamp=stamp, variant=self._open(folder))
        except VariantUnusableError as error:
            return Seen(stamp=stamp, reason=str(error))

    def _open(self, folder: Path) -> Variant:
        """Under the variant's own name."""
        real = folder.resolve()
        if not is_inside(self.root, real):
            raise VariantUnusableError(f"{folder} is a link to {real}, outside of {self.root}; copy it there")
        artifact = open_delta(real)
        if reason := why_unusable(artifact, self._base, self._base_label):
            raise VariantUnusableError(reason)
        stored_bytes = sum(row.size_bytes for row in artifact.tensor_report())
        try:
            created_s = (real / CONFIG_NAME).stat().st_mtime
        except OSError as error:
            raise VariantUnusableError(f"the variant in {folder} vanished: {error.strerror}") from error
        return Variant(
            name=artifact.config.variant,
            content_hash=artifact.content_hash,
            folder=real,
            size_bytes=self._size_of(real) if self._size_of else stored_bytes,
            created_unix_s=int(created_s),
        )

    def _name_all(self) -> None:
        """Publish names for what was seen. What was added by hand comes before what was found."""
        named, broken = name_scanned(
            {folder: self._seen[folder] for folder in self._scanned},
            prefix=self._prefix,
            reserved=self._reserved,
            elsewhere=self._removed | self._added.keys(),
            before=self._variants,
        )
        for name, folder in self._added.items():
            seen = self._seen[folder]
            if seen.variant is None:
                broken.append(Broken(folder=folder, reason=seen.reason, name=name))
            else:
                named[name] = replace(seen.variant, name=name)
        self._variants = MappingProxyType(dict(sorted(named.items())))
        self._broken = (*self._unreadable, *broken)

    def _unknown(self, name: str) -> UnknownModelError:
        near = difflib.get_close_matches(name[:200], list(self._variants), n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "/v1/models lists those that are"
        return UnknownModelError(f"model {name[:200]!r} is not served; {hint}", param="model")
