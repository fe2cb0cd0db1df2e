"""Files that appear whole or not at all, and one clear message when the disk is full."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from zen_train.errors import TrainingError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRITE_FAILED = ("write", "unexpected pos", "iostream error")
"""What torch's zip writer and safetensors say when a write fell short, by where in the file it did."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling to write to; it becomes `path` when the block ends without an error.

    Raises:
        TrainingError: the disk is full; what stood at `path` before is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError, SafetensorError) as error:
        if not _is_full(error):
            raise
        kept = f"The previous {path.name} is kept." if path.exists() else "There is no earlier one."
        free_bytes = shutil.disk_usage(path.parent).free
        raise TrainingError(
            f"{path} could not be written ({error}); {free_bytes / 1e9:.2f} GB are free there. {kept} Free space, "
            "or set output_dir to another disk, then continue with resume=auto."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _is_full(error: Exception) -> bool:
    """torch and safetensors report a failed write in types of their own, which carry no number."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    text = str(error)
    return any(os.strerror(code) in text for code in _FULL) or any(
        words in text.lower() for words in _WRITE_FAILED
    )
