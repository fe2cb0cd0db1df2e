"""Named shape and traffic cases of the kernels, and the check of one case. No pytest in here: the interpreter tests and
`scripts/gpu_check.py` import it in processes of their own.

A case passes when the RMS error against float64 is at most twice the error PyTorch itself makes at the same dtype
(a dense linear layer on the rounded merged weight), and at most 0.005 of the RMS of the result. Integer cases must
match bit for bit. Inputs have zero mean. A fixed bug adds a case.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zen_train.kernels.bitdelta_linear import DeltaBank, bitdelta_add_, bitdelta_linear, dense_delta

RATIO_ALLOWED = 0.005
OWN_ERRORS_ALLOWED = 2.0
FLOOR = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float16: 2e-4}
"""A few outputs may be exact in PyTorch by luck; below this share of the result an error always passes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape (M tokens, N outputs, K inputs) and one traffic mix over `variants` slots."""

    m: int
    n: int
    k: int
    mix: str
    variants: int = 4
    planes: int = 1
    scale: str = "row"
    rank: int = 0
    strided: bool = False
    bias: bool = True

    @property
    def name(self) -> str:
        """The test id."""
        extra = "".join(
            part
            for part in (
                f"-P{self.planes}" if self.planes > 1 else "",
                f"-{self.scale}" if self.scale != "row" else "",
                f"-rank{self.rank}" if self.rank else "",
                "-strided" if self.strided else "",
            )
        )
        return f"M{self.m}-N{self.n}-K{self.k}-{self.mix}{extra}"


CASES = [
    Case(m=1, n=133, k=96, mix="one"),
    Case(m=1, n=64, k=64, mix="base"),
    Case(m=1, n=1, k=1, mix="one"),
    Case(m=0, n=16, k=32, mix="one"),
    Case(m=14, n=69, k=200, mix="distinct", variants=14),
    Case(m=14, n=50, k=71, mix="distinct", variants=14, planes=2, scale="row_col"),
    Case(m=13, n=40, k=129, mix="zipf"),
    Case(m=9, n=33, k=65, mix="uniform", scale="matrix", strided=True),
    Case(m=7, n=50, k=320, mix="uniform", rank=4, bias=False),
    Case(m=64, n=48, k=104, mix="one", variants=2),
    Case(m=70, n=50, k=136, mix="skewed", variants=6),
    Case(m=150, n=40, k=100, mix="skewed", variants=3, planes=2, scale="row_col"),
    Case(m=260, n=34, k=90, mix="one", variants=2, scale="matrix"),
    Case(m=140, n=35, k=64, mix="base"),
]
LONG_CASES = [
    Case(m=3, n=32, k=4200, mix="distinct"),
    Case(m=140, n=40, k=4200, mix="skewed", variants=2),
    Case(m=1030, n=64, k=64, mix="one", variants=1),
]


def at_threads(count: int, work: Callable[[], Tensor]) -> Tensor:
    """What `work` gives with so many threads of torch."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        return work()
    finally:
        torch.set_num_threads(before)


def traffic(case: Case, generator: torch.Generator) -> Tensor:
    """Variant of each token, int64 `[M]`: slots from -1 (base) to variants - 1."""
    m, v = case.m, case.variants
    if case.mix == "base":
        return torch.full((m,), -1)
    if case.mix == "one":
        return torch.full((m,), v - 1)
    if case.mix == "distinct":
        return torch.randperm(v, generator=generator).repeat(m // v + 1)[:m]
    if case.mix == "uniform":
        return torch.randint(-1, v, (m,), generator=generator)
    if case.mix == "zipf":
        weight = 1.0 / torch.arange(1, v + 2)
        return torch.multinomial(weight, m, replacement=True, generator=generator) - 1
    if case.mix == "skewed":  # nearly all tokens on slot 0, a few on the base and the last slot
        index = torch.zeros(m, dtype=torch.int64)
        index[:: max(1, m // 3)] = v - 1
        index[1 :: max(1, m // 2)] = -1
        return index
    raise ValueError(f"mix is {case.mix!r}")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All tensors of one case."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    bank: DeltaBank
    variant: Tensor


def build(
    case: Case, dtype: torch.dtype, *, integers: bool = False, seed: int = 0, device: str = "cpu"
) -> Inputs:
    """Make the inputs. Integer inputs are small enough that every sum and every folded weight is exact."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        if integers:
            return torch.randint(0, 2, shape, generator=g) * 2.0 - 1.0  # never zero: a wrong bit always shows
        return torch.randn(shape, generator=g) * std

    bank = DeltaBank.zeros(
        variants=case.variants,
        out_features=case.n,
        in_features=case.k,
        planes=case.planes,
        per_matrix=case.scale == "matrix",
        with_columns=case.scale == "row_col",
        rank=case.rank,
    )
    for slot in range(case.variants):
        rows = 1 if case.scale == "matrix" else case.n
        unit = 0.3 / case.k**0.5
        exact = [1.0, 2.0]
        scale = (
            torch.tensor(exact)[torch.randint(0, 2, (case.planes, rows), generator=g)]
            if integers
            else (torch.rand(case.planes, rows, generator=g) + 0.5) * unit
        )
        col = (
            torch.randint(1, 3, (case.planes, case.k), generator=g).float()
            if integers
            else torch.rand(case.planes, case.k, generator=g) + 0.5
        )
        bank.put(
            slot,
            sign_PNB=torch.randint(
                0, 256, (case.planes, case.n, (case.k + 7) // 8), generator=g, dtype=torch.uint8
            ),
            row_scale_PN=scale,
            col_scale_PK=col if case.scale == "row_col" else None,
            left_NR=normal(case.n, case.rank, std=0.1) if case.rank else None,
            right_RK=normal(case.rank, case.k, std=case.k**-0.5) if case.rank else None,
        )
    # A wider buffer makes rows that are not contiguous; NaN in the gaps shows a read beyond the row.
    gap = 3 if case.strided else 0

    def rows_of(values: Tensor) -> Tensor:
        buffer = torch.full((values.shape[0], values.shape[1] + gap), float("nan"), dtype=dtype)
        buffer[:, : values.shape[1]] = values.to(dtype)
        return buffer.to(device)[:, : values.shape[1]]

    bank_there = DeltaBank(
        in_features=case.k,
        **{name: tensor.to(device) for name, tensor in bank._tensors().items()},
    )
    return Inputs(
        x=rows_of(normal(case.m, case.k)),
        weight=rows_of(normal(case.n, case.k, std=case.k**-0.5)),
        bias=normal(case.n).to(dtype).to(device) if case.bias else None,
        bank=bank_there,
        variant=traffic(case, g).to(device),
    )


def exact_result(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The result in float64 and the result PyTorch itself gets at this dtype from the merged, rounded weight."""
    bank, dtype = inputs.bank, inputs.x.dtype
    x64, w64 = inputs.x.double(), inputs.weight.double()
    bias = inputs.bias
    truth = x64 @ w64.T
    own = torch.nn.functional.linear(inputs.x, inputs.weight)
    for slot in range(bank.variants):
        col = None if bank.col_scale_VPK is None else bank.col_scale_VPK[slot]
        merged = (
            w64 + dense_delta(bank.sign_VPNB[slot], bank.row_scale_VPN[slot], col, bank.in_features).double()
        )
        if bank.left_VNR is not None and bank.right_VRK is not None:
            merged = merged + bank.left_VNR[slot].double() @ bank.right_VRK[slot].double()
        mine = (inputs.variant == slot).unsqueeze(1)
        truth = torch.where(mine, x64 @ merged.T, truth)
        own = torch.where(mine, torch.nn.functional.linear(inputs.x, merged.to(dtype)), own)
    if bias is not None:
        truth, own = truth + bias.double(), own + bias
    return truth, own


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """RMS errors relative to the RMS of the exact result."""

    error: float
    own: float
    dtype: torch.dtype
    bitwise: bool

    @property
    def passed(self) -> bool:
        """Within both bounds."""
        allowed = max(OWN_ERRORS_ALLOWED * self.own, FLOOR[self.dtype])
        return self.error <= min(allowed, RATIO_ALLOWED)


def judge(result: Tensor, inputs: Inputs) -> Outcome:
    """Compare a result with float64. A NaN never passes."""
    truth, own = exact_result(inputs)
    if truth.numel() == 0:
        return Outcome(error=0.0, own=0.0, dtype=inputs.x.dtype, bitwise=result.shape == truth.shape)
    size = max(float(truth.square().mean().sqrt()), 1e-30)

    def rms(value: Tensor) -> float:
        return float((value.double() - truth).square().mean().sqrt()) / size

    return Outcome(
        error=rms(result),
        own=rms(own),
        dtype=inputs.x.dtype,
        bitwise=torch.equal(result, truth.to(result.dtype)),
    )


def run_linear(inputs: Inputs, backend: str, bank: DeltaBank | None = None) -> Tensor:
    """The fused entry point; `bank` replaces the case's own for mutation tests."""
    return bitdelta_linear(
        inputs.x, inputs.weight, bank or inputs.bank, inputs.variant, bias_N=inputs.bias, backend=backend
    )


def run_add(inputs: Inputs, backend: str) -> Tensor:
    """The delta term added onto a base product made by PyTorch."""
    y = torch.nn.functional.linear(inputs.x, inputs.weight, inputs.bias)
    return bitdelta_add_(y, inputs.x, inputs.bank, inputs.variant, backend=backend)


Runner = Callable[[Inputs, str], Tensor]
RUNNERS: dict[str, Runner] = {"linear": run_linear, "add": run_add}
