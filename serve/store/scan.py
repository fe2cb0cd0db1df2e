"""Where artifacts lie under a root: the root itself, `ROOT/NAME`, and training's `ROOT/NAME/delta`.

It looks at names of files only. Hidden folders are passed over (an export in progress is one), and so
is what holds nothing of an artifact (a run that has not exported yet).
"""

from __future__ import annotations

import os
from pathlib import Path

from zen_train.delta.manifest import CONFIG_NAME
from zen_train.serve.store.seen import Broken


def find_artifacts(root: Path) -> tuple[list[Path], list[Broken]]:
    """(folders to open, folders that cannot be looked into), sorted. A root that is absent holds nothing."""
    unreadable: list[Broken] = []

    def names_in(folder: Path) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            reason = f"{folder} cannot be read: {error.strerror or error}"
            unreadable.append(Broken(folder=folder, reason=reason))
            return []

    top = names_in(root)
    if _is_artifact(top):
        return [root], unreadable
    found = []
    for name in top:
        child = root / name
        if name.startswith(".") or not child.is_dir():
            continue
        for folder in (child, child / "delta"):
            if _is_artifact(names_in(folder)):
                found.append(folder)
                break
    return found, unreadable


def _is_artifact(names: list[str]) -> bool:
    """A folder with any part of an artifact is one, so that a broken one is reported and not passed over."""
    return any(
        name == CONFIG_NAME or (name.startswith("delta") and name.endswith(".safetensors")) for name in names
    )
