"""Publish a folder in one step: readers see the old folder or the new one, never a mixture or a half.

The new folder is filled beside the target, every file is fsynced, then one rename puts it in place (over an
existing folder: an exchange of both names, the old one is deleted afterwards). Files that another process has
open or mapped live on until it lets go. A failure removes what was begun and leaves the target as it was.
"""

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zen_train.errors import OutputError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def new_folder(target: str | Path, *, overwrite: bool, needed_bytes: int) -> Iterator[Path]:
    """Yield an empty temporary sibling of `target`; publish it when the block ends without an error.

    `needed_bytes` is an upper bound, told to the user when the disk is full. Raises OutputError for a
    target that exists (unless `overwrite`), a parent that cannot be written, or a write that fails.
    """
    target = Path(target)
    if target.exists() or target.is_symlink():
        if not overwrite:
            raise OutputError(f"{target} exists; choose another folder or ask for it to be overwritten")
        if target.is_symlink() or not target.is_dir():
            raise OutputError(f"{target} is not a plain folder; it will not be overwritten")
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        yield temporary
        _sync_files(temporary)
        os.chmod(temporary, 0o777 & ~_umask())
        _move_into_place(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise _as_output_error(error, target, needed_bytes) from error
    finally:
        # After an exchange this is the old folder; after a plain rename it is gone.
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def replace_file(path: str | Path, content: bytes) -> None:
    """Write one file atomically: temporary sibling, fsync, rename."""
    path = Path(path)
    handle, temporary = -1, ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fchmod(out.fileno(), 0o666 & ~_umask())
            os.fsync(out.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise _as_output_error(error, path, len(content)) from error


def _move_into_place(new: Path, target: Path) -> None:
    if not target.exists():
        os.rename(new, target)
        return
    if _exchange(new, target):
        return
    # A file system without exchange: two renames, between which the target is absent for an instant.
    aside = new.with_suffix(".old")
    os.rename(target, aside)
    try:
        os.rename(new, target)
    except OSError:
        os.rename(aside, target)
        raise
    os.rename(aside, new)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step (Linux renameat2); False where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))


def _sync_files(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _as_output_error(error: OSError, target: Path, needed_bytes: int) -> OutputError:
    if error.errno in _FULL:
        parent = next(p for p in [target.parent, *target.parent.parents] if p.exists())
        free_bytes = shutil.disk_usage(parent).free
        return OutputError(
            f"{target} was not written: no space ({error.strerror}); up to {needed_bytes:,} bytes are needed "
            f"and {free_bytes:,} are free. Free some space or choose another disk; nothing was changed"
        )
    return OutputError(
        f"{target} was not written: {error.strerror or error} ({error.filename or target.parent})"
    )
