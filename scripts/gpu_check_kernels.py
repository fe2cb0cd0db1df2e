"""The part of gpu_check.py that times the kernels on layer shapes of real models, beside the base's own product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from gpu_check import Check

DECODE_TOKENS = (1, 4, 16, 64)
DECODE_VARIANTS = (1, 4, 14)
PREFILL_TOKENS = (512, 2048, 8192)
SHAPES = {  # N, K of the layers of Llama 8B and 70B
    "8B qkv": (6144, 4096),
    "8B down": (4096, 14336),
    "70B up": (57344, 8192),
    "8B out": (4096, 4096),
    "8B up": (28672, 4096),
    "70B out": (8192, 8192),
    "70B qkv": (10240, 8192),
    "70B down": (8192, 28672),
}
DRY_SHAPES = {"dry": (48, 64)}
PREFILL_BOUND = 1.10
MANY_VARIANTS_BOUND = 2.2
FLOOR_SHARE = 1.15


def byte_floor(variants: int) -> float:
    """Bytes of a decode step over those of the base: (2 + V/8) / 2 for bf16 (serving arithmetic)."""
    return (2 + variants / 8) / 2


class Timer:
    """Median seconds of calls timed in turn, with the second-level cache flushed before each."""

    def __init__(self, dry: bool) -> None:
        import torch

        self.torch, self.dry = torch, dry
        size_bytes = 1 << 16 if dry else 4 * torch.cuda.get_device_properties(0).L2_cache_size
        self.flush = torch.empty(size_bytes, dtype=torch.uint8, device="cpu" if dry else "cuda")

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call on the device."""
        self.flush.zero_()
        if self.dry:
            before = time.perf_counter()
            call()
            return time.perf_counter() - before
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Some work in front keeps the device busy while the host queues the call, so that launch gaps do not count.
        self.torch.cuda._sleep(200_000)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def in_turn(self, calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
        """Median of `rounds` for each call, A and B alternating."""
        for call in calls.values():  # compiles and tunes
            call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(self.once(call))
        return {name: statistics.median(values) for name, values in times.items()}


def copy_bandwidth(check: Check, timer: Timer) -> float:
    """Bytes per second (read plus written) of a large device copy."""
    import torch

    size_bytes = 1 << 16 if check.dry else 1 << 30
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=timer.flush.device)
    target = torch.empty_like(source)
    seconds = timer.in_turn({"copy": lambda: target.copy_(source)}, 10)["copy"]
    check.line("copy", 2 * size_bytes / seconds / 1e9, "GB/s", "device copy, read plus write")
    return 2 * size_bytes / seconds


def graphed(call: Callable[[], object], dry: bool) -> Callable[[], object]:
    """The call as a CUDA graph, as an engine runs decode: shows that nothing in it needs the host."""
    if dry:
        return call
    import torch

    call()  # tuning must not happen during capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def time_shape(
    check: Check, timer: Timer, name: str, shape: tuple[int, int], copy_rate: float, prefill: bool
) -> None:
    """Decode or prefill of one layer shape."""
    import torch

    from zen_train.kernels.bitdelta_linear import DeltaBank, bitdelta_linear

    n, k = shape
    device = timer.flush.device
    dtype = torch.float32 if check.dry else torch.bfloat16
    slots = max(DECODE_VARIANTS)
    weight = torch.randn(n, k, dtype=dtype, device=device)
    bank = DeltaBank.zeros(variants=slots, out_features=n, in_features=k, device=device)
    bank.sign_VPNB.random_(0, 256)
    bank.row_scale_VPN.uniform_(0.001, 0.01)
    mixes = (
        [(tokens, 1) for tokens in PREFILL_TOKENS]
        if prefill
        else [
            (tokens, variants)
            for tokens in DECODE_TOKENS
            for variants in DECODE_VARIANTS
            if variants <= tokens
        ]
    )
    if check.dry:
        mixes = [(70, 1)] if prefill else [(1, 1), (16, 14)]
    for tokens, variants in mixes:
        if check.left_s < 15:
            check.say(f"{name}: left out from {tokens} tokens on, the time is spent")
            return
        x = torch.randn(tokens, k, dtype=dtype, device=device)
        variant = (torch.arange(tokens, device=device) % variants).to(torch.int32)

        def base(x: torch.Tensor = x) -> object:
            return torch.nn.functional.linear(x, weight)

        def fused(x: torch.Tensor = x, variant: torch.Tensor = variant) -> object:
            return bitdelta_linear(x, weight, bank, variant, backend="triton")

        calls = {
            "base": graphed(base, check.dry),
            "fused": graphed(fused, check.dry),
        }
        seconds = timer.in_turn(calls, 3 if check.dry else 15)
        case = f"{'prefill' if prefill else 'decode'} {name} M{tokens} V{variants}"
        floor = byte_floor(variants)
        bound = PREFILL_BOUND if prefill else (MANY_VARIANTS_BOUND if variants == 14 else FLOOR_SHARE * floor)
        check.line(case, seconds["fused"] / seconds["base"], "ratio", "fused / linear on the base", bound)
        moved = n * k * 2 * floor + variants * n * 4 + tokens * (n + k) * 2
        check.line(case, moved / 1e6, "MB", "bytes that must move")
        check.line(case, moved / seconds["fused"] / copy_rate, "share", "of the copy bandwidth")
        check.line(case, seconds["fused"] * 1e6, "us", f"median; base {seconds['base'] * 1e6:.1f} us")


def time_one_bit_code(check: Check, timer: Timer, copy_rate: float) -> None:
    """The code of trained weights, written after every step of one-bit-aware training, against a copy's bandwidth."""
    import torch

    from zen_train.kernels.one_bit_code import one_bit_code_

    name, shape = ("dry", DRY_SHAPES["dry"]) if check.dry else ("8B up", SHAPES["8B up"])
    base = torch.randn(shape, dtype=torch.bfloat16, device=timer.flush.device)
    latent, out = base.float() + 1e-3, torch.empty(shape, device=base.device)
    case = f"one-bit code {name}"
    for per_row in (True, False):
        alpha = "each row" if per_row else "the matrix"

        def write(per_row: bool = per_row) -> object:
            return one_bit_code_(
                out, latent, base, per_row=per_row, along_weight=8.0, dither=True, backend="triton"
            )

        seconds = timer.in_turn({"write": write}, 3 if check.dry else 10)["write"]
        moved = latent.nbytes + base.nbytes + out.nbytes
        check.line(case, moved / seconds / 1e9, "GB/s", f"an alpha for {alpha}")
        check.line(case, moved / seconds / copy_rate, "ratio", f"an alpha for {alpha} / copy bandwidth")


def time_kernels(check: Check) -> None:
    """All shapes, decode and prefill, until the time is spent."""
    timer = Timer(check.dry)
    copy_rate = copy_bandwidth(check, timer)
    time_one_bit_code(check, timer, copy_rate)
    for name, shape in (DRY_SHAPES if check.dry else SHAPES).items():
        for prefill in (False, True):
            time_shape(check, timer, name, shape, copy_rate, prefill)
