"""How much host memory variants may take, and pinned memory that is given back when its last user is gone.

torch's own pinned allocator rounds sizes up to powers of two and keeps what is freed, so a budget would not
hold; here ordinary memory is registered with CUDA for as long as it lives.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np
import torch

from zen_train.errors import BaseModelError
from zen_train.serve.store.host import HostTier

GPU_SHARE = 4
"""With host_bytes=None a GPU's host tier takes one part in so many of the memory."""
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """What this process may use: the machine's memory, or its container's limit where that is lower."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return machine
    return min(machine, int(limit)) if limit.isdigit() else machine


def make_host_tier(host_bytes: int | None, device: torch.device) -> HostTier | None:
    """The host tier of `EngineConfig.host_bytes`; None: there is none.

    Raises:
        BaseModelError: more than the memory there is.
    """
    on_gpu = device.type == "cuda"
    there_is = memory_bytes()
    budget_bytes = host_bytes if host_bytes is not None else (there_is // GPU_SHARE if on_gpu else 0)
    if budget_bytes > there_is:
        raise BaseModelError(
            f"host_bytes={budget_bytes} is more than the memory there is; allowed: 0 to {there_is}. Lower it, or "
            "leave it out."
        )
    if budget_bytes == 0:
        return None
    return HostTier(budget_bytes=budget_bytes, allocate=pinned_memory if on_gpu else _plain_memory)


def pinned_memory(size_bytes: int) -> memoryview:
    """Uninitialised memory that a GPU copies from beside its steps. Raises MemoryError."""
    array = np.empty(size_bytes, np.uint8)
    runtime, address = torch.cuda.cudart(), array.ctypes.data
    if error := int(runtime.cudaHostRegister(address, size_bytes, _PORTABLE)):
        raise MemoryError(f"{size_bytes} bytes could not be pinned (CUDA error {error})")
    # An array calls its finalizers before it lets its memory go.
    weakref.finalize(array, runtime.cudaHostUnregister, address).atexit = False
    return array.data


def _plain_memory(size_bytes: int) -> memoryview:
    return np.empty(size_bytes, np.uint8).data
