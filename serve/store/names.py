"""Under which name each folder is served. Plain ASCII, so that no two look alike; never used as paths.

A name is the variant's own with a prefix. Two folders of one name are both reported and neither is
served, because nobody could tell which answers; one that was served before goes on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from zen_train.serve.store.seen import Broken, Seen
from zen_train.serve.types import Variant

_PART = r"[A-Za-z0-9][A-Za-z0-9._:@+-]*"
_NAME = re.compile(rf"(?=.{{1,128}}\Z){_PART}(?:/{_PART})*")
ALLOWED = "1 to 128 letters, digits and . _ : @ + - / (ASCII), each part beginning with a letter or digit"


def is_name(text: str) -> bool:
    """Whether something may be served under this name."""
    return _NAME.fullmatch(text) is not None


def served_name(variant: str, prefix: str) -> str:
    """`zen4-coder` for the variant `coder`; a variant that has the prefix already keeps its name."""
    return variant if prefix and variant.startswith(prefix) else prefix + variant


def name_scanned(
    scanned: Mapping[Path, Seen],
    *,
    prefix: str,
    reserved: Collection[str],
    elsewhere: Collection[str],
    before: Mapping[str, Variant],
) -> tuple[dict[str, Variant], list[Broken]]:
    """Names of what a scan found, and what has none.

    Args:
        reserved: names of something else (the base): an error.
        elsewhere: names that people gave away by hand: passed over in silence.
        before: what was served until now.
    """
    broken: list[Broken] = []
    folders: dict[str, list[Path]] = {}
    for folder, seen in scanned.items():
        if seen.variant is None:
            # Its description may be what is broken: the folder's name is what is left to go by.
            own = (folder.parent if folder.name == "delta" else folder).name
            name = served_name(own, prefix)
            if name not in elsewhere:
                broken.append(Broken(folder=folder, reason=seen.reason, name=name))
            continue
        name = served_name(seen.variant.name, prefix)
        if name in reserved:
            reason = (
                f"{folder} would be served as {name!r}, the name of the base; export it under another name"
            )
            broken.append(Broken(folder=folder, reason=reason))
        elif not is_name(name):
            reason = f"{folder} would be served as {name[:200]!r}; allowed: {ALLOWED}. Export it under another name"
            broken.append(Broken(folder=folder, reason=reason))
        elif name not in elsewhere:
            folders.setdefault(name, []).append(folder)
    named: dict[str, Variant] = {}
    for name, rivals in folders.items():
        found = {folder: variant for folder in rivals if (variant := scanned[folder].variant) is not None}
        served = [
            f for f, variant in found.items() if name in before and variant.folder == before[name].folder
        ]
        chosen = rivals if len(rivals) == 1 else served[:1]
        for folder in chosen:
            named[name] = replace(found[folder], name=name)
        for folder in rivals:
            if folder not in chosen:
                broken.append(Broken(folder=folder, reason=_several(name, rivals, chosen), name=name))
    return named, broken


def _several(name: str, folders: list[Path], served: list[Path]) -> str:
    listed = " and ".join(str(folder) for folder in folders)
    outcome = f"{served[0]} goes on being served" if served else "none of them is served"
    return (
        f"{listed} all have the name {name!r}; {outcome}. Move one out of the root, export it under another variant "
        "name, or load it under a name of its own"
    )
