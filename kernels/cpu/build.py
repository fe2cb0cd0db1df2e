"""Build the CPU kernels once and load them: `load()`.

Contract: the first call on a machine compiles `csrc/` with `torch.utils.cpp_extension` (one line on stderr says so);
later calls, in any process, load the file cached under the hash of the sources, the flags and the versions of torch
and Python. Processes that start together wait for one build. Without a working compiler, `load()` warns once and
returns False, and callers use the reference.
It does not choose an instruction set: that happens at run time inside the library.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from .fakes import register_fakes

_SOURCE_DIR = Path(__file__).parent / "csrc"
_FLAGS = ("-O3", "-std=c++20", "-fopenmp", "-w")


def cache_folder() -> Path:
    """Where compiled kernels are kept: ZEN_TRAIN_KERNEL_CACHE, or a folder of the user's cache directory."""
    chosen = os.environ.get("ZEN_TRAIN_KERNEL_CACHE")
    if chosen:
        return Path(chosen)
    user_cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(user_cache) / "zen_train" / "kernels"


def source_hash() -> str:
    """Hash of everything that decides what the compiled file holds."""
    digest = hashlib.sha256()
    for part in (torch.__version__, sys.version, os.environ.get("CXX", "c++"), *_FLAGS):
        digest.update(part.encode() + b"\0")
    for path in sorted(_SOURCE_DIR.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _only_one(lock_path: Path) -> Iterator[None]:
    """Hold an advisory file lock; the operating system frees it when a process dies."""
    import fcntl

    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(target: Path) -> None:
    from torch.utils import cpp_extension

    name = target.stem
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    try:
        print(
            f"zen_train: building the CPU kernels once (under a minute) into {target}",
            file=sys.stderr,
            flush=True,
        )
        started_s = time.monotonic()
        cpp_extension.load(
            name=name,
            sources=[str(path) for path in sorted(_SOURCE_DIR.glob("*.cpp"))],
            extra_cflags=list(_FLAGS),
            build_directory=str(scratch),
            is_python_module=False,
        )
        os.replace(scratch / f"{name}.so", target)
        print(f"zen_train: built in {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@torch.compiler.assume_constant_result
def load() -> bool:
    """Make the `torch.ops.zen_train.cpu_*` operators available; False when they cannot be built here."""
    return _load_once()


@cache
def _load_once() -> bool:
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"zen_train_cpu_{source_hash()}.so"
        with _only_one(folder / f"{target.stem}.lock"):
            if target.exists():
                torch.ops.load_library(str(target))
            else:
                _compile(target)
    except (OSError, RuntimeError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"zen_train: no CPU kernels ({reason}); the slow reference is used. Install a C++20 compiler (g++ 12 or "
            "newer, or clang 16) and ninja, or pass backend='reference' to say that this is intended.",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    register_fakes()
    return True
