"""The compiled CPU kernels: AMX, AVX-512, AVX2 and plain C++ behind one set of torch operators.

Contract: `load()` says whether `torch.ops.zen_train.cpu_*` exist; `path_number()` says which instruction set a call
takes. ZEN_TRAIN_CPU_PATH=plain|avx2|avx512|avx512_bf16|amx forces one (for tests and comparisons).
"""

import os

import torch

from .build import cache_folder, load

PATHS = ("plain", "avx2", "avx512", "avx512_bf16", "amx")

__all__ = ["PATHS", "cache_folder", "load", "path_name", "path_number"]


@torch.compiler.assume_constant_result
def path_number() -> int:
    """Number of the forced instruction set, or -1 for the best one.

    Raises:
        ValueError: ZEN_TRAIN_CPU_PATH is not one of PATHS, or this processor does not run it.
    """
    name = os.environ.get("ZEN_TRAIN_CPU_PATH")
    if not name:
        return -1
    if name not in PATHS:
        raise ValueError(
            f"ZEN_TRAIN_CPU_PATH is {name!r}; allowed: {', '.join(PATHS)}. Unset it for the best one."
        )
    number = PATHS.index(name)
    if load() and number > (best := torch.ops.zen_train.cpu_best_path()):
        raise ValueError(
            f"ZEN_TRAIN_CPU_PATH is {name!r}; this processor runs {', '.join(PATHS[: best + 1])}. "
            "Unset it for the best one."
        )
    return number


def path_name() -> str:
    """The instruction set that a call takes here: the forced one, or the best. Needs `load()`."""
    forced = path_number()
    return PATHS[forced if forced >= 0 else torch.ops.zen_train.cpu_best_path()]
