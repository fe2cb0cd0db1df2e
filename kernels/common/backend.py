"""Which implementation runs: `reference`, `cpu` (C++) or `triton`.

Contract: an explicit name is used or refused, never replaced. `auto` takes the device's own kernel: `triton` for CUDA
tensors, `cpu` for CPU tensors; where no CPU kernel can be built, `auto` is the reference, after one warning.
"""

import os

import torch

from zen_train.kernels.cpu import load

BACKENDS = ("auto", "reference", "cpu", "triton")


def triton_runs_on(device: torch.device) -> bool:
    """Whether Triton kernels run on tensors of this device (on CPU: under its interpreter only)."""
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def choose_backend(backend: str, device: torch.device) -> str:
    """Resolve a backend name for tensors on `device`.

    Raises:
        ValueError: unknown name, or a backend that does not run on this device.
    """
    if backend == "reference":
        return backend
    if backend == "auto":
        if device.type == "cuda":
            return "triton"
        return "cpu" if device.type == "cpu" and load() else "reference"
    if backend == "cpu":
        if device.type != "cpu" or not load():
            raise ValueError(
                f"backend is 'cpu' for tensors on {device}; it needs CPU tensors and a C++ compiler. "
                "Use backend='auto' or backend='reference'."
            )
        return backend
    if backend == "triton":
        if not triton_runs_on(device):
            raise ValueError(
                f"backend is 'triton' for tensors on {device}; it needs a CUDA device, or TRITON_INTERPRET=1 for "
                "CPU tensors. Use backend='auto' or backend='reference'."
            )
        return backend
    raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}. Use backend='auto'.")
