"""Run the named cases on the Triton backend and print one JSON object: {case: verdict}.

Started by the tests in a process of its own, because TRITON_INTERPRET=1 must be set before Triton is imported; on a
GPU `gpu_check.py` runs it as it is.
"""

import argparse
import json
from itertools import product

import torch

from tests.kernels import direction_cases
from tests.kernels.cases import CASES, LONG_CASES, RUNNERS, Case, build, judge, run_linear
from zen_train.kernels.bitdelta_embedding import bitdelta_embedding
from zen_train.kernels.bitdelta_linear import bitdelta_linear
from zen_train.kernels.directions_linear import direction_rows, directions_add_
from zen_train.kernels.one_bit_code import one_bit_code_
from zen_train.kernels.sign_pack import sign_pack

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def linear_verdicts(device: str, cases: list[Case]) -> dict[str, bool]:
    """Both entry points over all cases.

    Triton's interpreter truncates to bfloat16 where a GPU rounds, so there bfloat16 is held by the integer cases alone,
    and float16 and float32 share the others.
    """
    interpreted = device == "cpu"
    verdicts = {}
    for number, case in enumerate(cases):
        dtypes = ["float32" if number % 2 else "float16"] if interpreted else list(DTYPES)
        for dtype_name in dtypes:
            for entry, run in RUNNERS.items():
                inputs = build(case, DTYPES[dtype_name], device=device)
                verdicts[f"{entry}-{case.name}-{dtype_name}"] = judge(run(inputs, "triton"), inputs).passed
        if case.rank == 0:
            inputs = build(case, torch.bfloat16, integers=True, device=device)
            verdicts[f"integers-{case.name}"] = judge(run_linear(inputs, "triton"), inputs).bitwise
    return verdicts


def other_verdicts(device: str) -> dict[str, bool]:
    """Out-of-range indices, a mutation, packing and the embedding."""
    verdicts = {}
    for m in (6, 70):
        inputs = build(Case(m=m, n=20, k=40, mix="uniform"), torch.float32, device=device)
        inputs.variant[2], inputs.variant[4] = 4, -7
        y = bitdelta_linear(inputs.x, inputs.weight, inputs.bank, inputs.variant, backend="triton")
        bad = torch.isnan(y).all(dim=1).nonzero().flatten().tolist()
        verdicts[f"out-of-range-is-nan-M{m}"] = bad == [2, 4] and not bool(torch.isnan(y[5]).any())
    inputs = build(Case(m=14, n=40, k=67, mix="uniform"), torch.bfloat16, integers=True, device=device)
    inputs.bank.sign_VPNB[1, 0, 3, 2] ^= 1
    broken = run_linear(inputs, "triton")
    inputs.bank.sign_VPNB[1, 0, 3, 2] ^= 1
    verdicts["mutation-is-seen"] = not judge(broken, inputs).bitwise
    case = Case(m=9, n=30, k=1030, mix="uniform", planes=2, scale="row_col")
    inputs = build(case, torch.float32, device=device)
    ids = torch.arange(9, device=device) * 3
    both = [
        bitdelta_embedding(ids, inputs.weight, inputs.bank, inputs.variant, backend=b)
        for b in ("triton", "reference")
    ]
    verdicts["embedding"] = torch.allclose(both[0], both[1], rtol=1e-6, atol=1e-6)
    verdicts |= direction_verdicts(device)
    packs = [
        sign_pack(inputs.weight[:, :k], inputs.weight[:, :k] * 0.5, backend=b)
        for k in (1030, 13)
        for b in ("triton", "reference")
    ]
    verdicts["sign-pack"] = all(
        torch.equal(a.sign_NB, b.sign_NB)
        and torch.equal(a.zeros_N, b.zeros_N)
        and torch.allclose(a.abs_sum_N, b.abs_sum_N, rtol=1e-5)
        and torch.allclose(a.square_sum_N, b.square_sum_N, rtol=1e-5)
        for a, b in (packs[:2], packs[2:])
    )
    return verdicts | code_verdicts(device)


def code_verdicts(device: str) -> dict[str, bool]:
    """The one-bit code of trained weights, in every setting, on rows of one block and of two."""
    verdicts = {}
    for k in (13, 1030):
        generator = torch.Generator().manual_seed(k)
        base = torch.randn(7, k, generator=generator).to(torch.bfloat16)
        latent = (base.float() + 1e-3 * torch.randn(7, k, generator=generator)).to(device)
        latent[3, 5], base = base[3, 5].float(), base.to(device)
        for per_row, along_weight, dither in product((True, False), (1.0, 8.0), (False, True)):
            found, truth = (
                one_bit_code_(
                    torch.zeros_like(latent), latent, base,
                    per_row=per_row, along_weight=along_weight, dither=dither, backend=b,
                )
                for b in ("triton", "reference")
            )  # fmt: skip
            # Dithered, a value next to a step may fall on the other side of it.
            same = (found - truth).abs() <= 1e-6
            name = f"one-bit-code-K{k}-row-{per_row}-along-{along_weight}-dither-{dither}"
            verdicts[name] = bool(same.float().mean() > 0.999 if dither else same.all())
    return verdicts


def direction_verdicts(device: str) -> dict[str, bool]:
    """Coded directions: both products, few tokens and many, and the rows of a table."""
    verdicts = {}
    for rows in direction_cases.ROWS:
        for tokens in (9, 70):
            bank = direction_cases.build(rows, 72, variants=4, device=device)
            slot = (torch.arange(tokens, device=device) % 5 - 1).to(torch.int32)
            x = torch.randn(tokens, 72, generator=torch.Generator().manual_seed(1)).to(device)
            y = torch.zeros(tokens, sum(rows), device=device)
            found, truth = (
                directions_add_(y.clone(), x, bank, slot, backend=b) for b in ("triton", "reference")
            )
            verdicts[f"directions-{rows}-M{tokens}"] = torch.allclose(found, truth, rtol=1e-4, atol=1e-4)
    bank = direction_cases.build((90,), 72, variants=3, device=device)
    ids = torch.tensor([0, 89, 41, 7], dtype=torch.int32, device=device)
    slot = torch.tensor([2, 0, -1, 1], dtype=torch.int32, device=device)
    base = torch.ones(4, 72, device=device)
    found = direction_rows(base, ids, bank, slot, backend="triton")
    truth = direction_cases.exact_rows(base.cpu(), ids, direction_cases.build((90,), 72, variants=3), slot)
    verdicts["direction-rows"] = torch.allclose(found.cpu().double(), truth, rtol=1e-5, atol=1e-5)
    slot[1] = 3
    bad = torch.isnan(direction_rows(base, ids, bank, slot, backend="triton")).all(dim=1)
    verdicts["direction-rows-out-of-range-is-nan"] = bad.tolist() == [False, True, False, False]
    return verdicts


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--few", action="store_true", help="three cases only")
    options = parser.parse_args()
    cases = CASES if options.device == "cpu" else CASES + LONG_CASES
    verdicts = linear_verdicts(options.device, cases[:3] if options.few else cases)
    if not options.few:
        verdicts |= other_verdicts(options.device)
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main()
