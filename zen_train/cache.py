"""Where zen_train keeps what it can fetch or compute again, and a lock for those who share it.

`ZEN_TRAIN_CACHE` names the folder; without it, the user's cache folder of the platform is taken. Nothing in
it is precious: deleting it costs time only. It does not limit its own size.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


def cache_root() -> Path:
    """The root of the cache, whether or not it exists yet."""
    named = os.environ.get("ZEN_TRAIN_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    home = Path.home()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "zen_train" / "Cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "zen_train"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "zen_train"


def cache_dir(*parts: str) -> Path:
    """The folder `parts` below the cache root, made when it is missing."""
    folder = cache_root().joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` (made when missing); other processes and threads wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path):
        yield
