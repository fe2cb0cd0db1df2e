"""Whether a folder's files are those of last time, without reading them."""

from __future__ import annotations

import os
from pathlib import Path

FolderStamp = tuple[tuple[str, int, int, int], ...]
"""(name, inode, bytes, mtime in ns) of the folder and of each file in it."""


def folder_stamp(folder: Path) -> FolderStamp:
    """Changes when the folder or a file of it is replaced or written to. Raises OSError when it is gone."""
    found = [(".", os.stat(folder).st_ino, 0, 0)]
    with os.scandir(folder) as entries:
        for entry in entries:
            # Links are followed: hub caches store files elsewhere. A dangling one counts as absent.
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue
            found.append((entry.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))
