"""Write a small file whole or not at all. Does not create folders."""

import contextlib
import os
import secrets
from pathlib import Path

from zen_train.errors import OutputError


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically: a temporary sibling, fsync, rename.

    Raises OutputError naming the path when it cannot be written; the file that was there is then untouched.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}. Nothing was changed; "
            "free some space or choose another output folder"
        ) from error
