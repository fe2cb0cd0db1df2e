"""The decoder operator on SmolLM2-135M's shapes with random weights: whole steps, embedding and head included.

python scripts/bench_decoder.py [--seconds S] [--cases decode1,...] [--paths avx2 ...] >> scripts/results/decoder.jsonl

`OMP_NUM_THREADS` decides the threads. Calls of one case are timed in turn, so that other load on the machine meets them
alike; the value is the median, `spread` the 20th and 80th percentile. Bounds are for two cores of a Xeon with AMX.
`--paths` forces instruction sets, one after the other; without it the best one runs.
`variants` are held as signs, `directions` are the same slots read as coded directions.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measure import Figures, median, spread

from zen_train.kernels.bitdelta_embedding import bitdelta_embedding
from zen_train.kernels.common import DeltaBank, DirectionBank
from zen_train.kernels.cpu import PATHS, load, path_name
from zen_train.kernels.decoder import (
    Block,
    DecoderShape,
    KvPool,
    PreparedBlocks,
    Rotary,
    TokenBatch,
    decoder_stack,
    head_logits,
    prepare_blocks,
    rms_norm,
    top_scores,
    use_huge_pages,
)
from zen_train.kernels.directions_linear import direction_rows

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, WORDS = 30, 576, 9, 3, 64, 1536, 49152
VARIANTS = 14
PAGE_TOKENS = 32
SHAPE = DecoderShape(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, norm_eps=1e-5)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Random weights of the real size, 14 random deltas on every matrix."""

    stack: PreparedBlocks
    table_NK: Tensor
    table_bank: DeltaBank
    table_directions: DirectionBank
    norm_MD: Tensor
    rotary: Rotary


def random_bank(n: int, k: int) -> DeltaBank:
    bank = DeltaBank.zeros(variants=VARIANTS, out_features=n, in_features=k)
    bank.sign_VPNB.random_(0, 256)
    bank.row_scale_VPN.uniform_(0.01 * k**-0.5, 0.02 * k**-0.5)
    return bank


def directions_of(bank: DeltaBank, *rows: int) -> DirectionBank:
    """The bank's bytes read as directions: shares of one to four bits as those of a fine-tune's matrices."""
    held = DirectionBank.over(bank, rows)
    for part, span in enumerate(held.spans()):
        room = (span.stop - span.start) // 8
        counts = [8 * max(1, room * share // 16) for share in (11, 3, 1, 1)]
        for slot in range(bank.variants):
            held.describe(slot, part, counts)
    return held


def random_model(dtype: torch.dtype) -> Model:
    """About 500 MB in bf16."""

    def weight(n: int, k: int) -> Tensor:
        return torch.randn(n, k).mul_(k**-0.5).to(dtype)

    def vector() -> Tensor:
        return torch.rand(VARIANTS + 1, HIDDEN) + 0.5

    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    n_qkv = queries + 2 * keys

    def with_directions(block: Block) -> Block:
        return replace(
            block,
            qkv_directions=directions_of(block.qkv_bank, queries, keys, keys),
            o_directions=directions_of(block.o_bank, HIDDEN),
            gate_up_directions=directions_of(block.gate_up_bank, MLP, MLP),
            down_directions=directions_of(block.down_bank, HIDDEN),
        )

    blocks = [
        Block(
            attention_norm_MD=vector(),
            qkv_NK=weight(n_qkv, HIDDEN),
            qkv_bias_MN=None,
            q_norm_ME=None,
            k_norm_ME=None,
            o_NK=weight(HIDDEN, HEADS * HEAD_DIM),
            mlp_norm_MD=vector(),
            gate_up_NK=weight(2 * MLP, HIDDEN),
            down_NK=weight(HIDDEN, MLP),
            qkv_bank=random_bank(n_qkv, HIDDEN),
            o_bank=random_bank(HIDDEN, HEADS * HEAD_DIM),
            gate_up_bank=random_bank(2 * MLP, HIDDEN),
            down_bank=random_bank(HIDDEN, MLP),
        )
        for _ in range(LAYERS)
    ]
    angle = torch.outer(torch.arange(2048.0), 1e5 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM / 2)))
    table_NK, table_bank = weight(WORDS, HIDDEN), random_bank(WORDS, HIDDEN)
    use_huge_pages(table_NK, table_bank.sign_VPNB)
    for block in blocks:
        banks = (block.qkv_bank, block.o_bank, block.gate_up_bank, block.down_bank)
        use_huge_pages(*(bank.sign_VPNB for bank in banks))
    return Model(
        stack=prepare_blocks([with_directions(block) for block in blocks], shape=SHAPE),
        table_NK=table_NK,
        table_bank=table_bank,
        table_directions=directions_of(table_bank, WORDS),
        norm_MD=vector(),
        rotary=Rotary(cos=angle.cos(), sin=angle.sin()),
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step: chunks of `tokens` from position `past` on, chunk i of variant `variants[i]` (-1: base)."""

    past: int
    tokens: int
    variants: list[int]
    directions: bool = False

    def batch(self) -> TokenBatch:
        sequences = len(self.variants)
        pages = -(-(self.past + self.tokens) // PAGE_TOKENS)

        def each(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32).repeat_interleave(self.tokens)

        return TokenBatch(
            position_T=torch.arange(self.past, self.past + self.tokens, dtype=torch.int32).repeat(sequences),
            sequence_T=each(list(range(sequences))),
            plane_PT=each([-1 if self.directions else v for v in self.variants]).unsqueeze(0),
            direction_T=each(self.variants) if self.directions else None,
            vector_T=each([v + 1 for v in self.variants]),
            page_table_SJ=torch.randperm(sequences * pages).to(torch.int32).view(sequences, pages),
        )

    def pool(self, dtype: torch.dtype) -> KvPool:
        pages = len(self.variants) * -(-(self.past + self.tokens) // PAGE_TOKENS)
        kv = torch.randn(LAYERS, 2, pages, KV_HEADS, PAGE_TOKENS, HEAD_DIM).to(dtype)
        use_huge_pages(kv)
        return KvPool(kv=kv)


def step(model: Model, work: Workload, dtype: torch.dtype) -> Callable[[], object]:
    """Embedding, all blocks, final norm, head (of each sequence's last token), greedy choice."""
    batch, kv = work.batch(), work.pool(dtype)
    ids = torch.randint(0, WORDS, (len(batch.position_T),), dtype=torch.int32)
    last = torch.arange(work.tokens - 1, len(ids), work.tokens)
    plane, planes, vector = batch.plane_PT[0], batch.plane_PT[:, last].contiguous(), batch.vector_T[last]
    direction = batch.direction_T
    directions = None if direction is None else direction[last]

    def call() -> object:
        hidden = bitdelta_embedding(ids, model.table_NK, model.table_bank, plane)
        if direction is not None:
            hidden = direction_rows(hidden, ids, model.table_directions, direction)
        hidden = decoder_stack(hidden, model.stack, shape=SHAPE, batch=batch, kv=kv, rotary=model.rotary)
        normed = rms_norm(hidden.index_select(0, last), model.norm_MD, vector, SHAPE.norm_eps)
        scores = head_logits(
            normed,
            model.table_NK,
            model.table_bank,
            planes,
            directions=model.table_directions,
            direction_T=directions,
        )
        return top_scores(scores)

    return call


def torch_linears(model: Model, tokens: int) -> Callable[[], object]:
    """The base's linears alone in eager torch: what a step costs there before attention, norms and deltas."""
    hidden = torch.randn(tokens, HIDDEN).to(model.table_NK.dtype)

    def call() -> object:
        x = hidden
        for block in model.stack.blocks:
            linear(x, block.qkv_NK)
            linear(x, block.o_NK)
            linear(linear(x, block.gate_up_NK)[:, :MLP], block.down_NK)
        return linear(x, model.table_NK)

    return call


def in_turn(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Seconds of each call, one of each a round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(next(iter(times.values()))) < 5:
        for name, call in calls.items():
            before = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - before)
    return times


def check(model: Model, dtype: torch.dtype) -> None:
    """The timed operator agrees with the `torch` backend here."""
    work = Workload(past=3, tokens=2, variants=[0, 5, -1])
    batch, kv = work.batch(), work.pool(dtype)
    hidden = torch.randn(6, HIDDEN).to(dtype)
    results = [
        decoder_stack(
            hidden.clone(),
            model.stack,
            shape=SHAPE,
            batch=batch,
            kv=KvPool(kv=kv.kv.clone()),
            rotary=model.rotary,
            backend=backend,
        ).float()
        for backend in ("auto", "torch")
    ]
    ratio = float((results[0] - results[1]).square().mean().sqrt() / results[1].square().mean().sqrt())
    if not ratio <= 0.05:
        raise SystemExit(f"the operator is wrong here: RMS difference {ratio:.4g} from the torch backend")


CASES: dict[str, tuple[Workload, float]] = {
    "decode1": (Workload(past=100, tokens=1, variants=[3]), 1 / 150),
    "decode14": (Workload(past=100, tokens=1, variants=list(range(VARIANTS))), VARIANTS / 450),
    "prefill37": (Workload(past=0, tokens=37, variants=[3]), 0.040),
    "prefill256": (Workload(past=0, tokens=256, variants=[3]), 256 / 1500),
}
"""Name, work of one step and the seconds it should take at most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="for each case")
    parser.add_argument("--cases", default=",".join(CASES), help="names, with commas")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--paths", nargs="*", choices=PATHS, metavar="PATH", help=f"of {', '.join(PATHS)}")
    options = parser.parse_args()
    unknown = set(options.cases.split(",")) - set(CASES)
    if unknown:
        parser.error(f"--cases has {sorted(unknown)}; allowed: {', '.join(CASES)}")
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    figures = Figures("decoder")
    load()
    with torch.inference_mode():
        model = random_model(dtype)
        for path in options.paths or [path_name()]:
            os.environ["ZEN_TRAIN_CPU_PATH"] = path
            check(model, dtype)
            for name in options.cases.split(","):
                work, bound_s = CASES[name]
                case = f"{path}: {name}"
                base = replace(work, variants=[-1] * len(work.variants))
                tokens = work.tokens * len(work.variants)
                times = in_turn(
                    {
                        "variants": step(model, work, dtype),
                        "directions": step(model, replace(work, directions=True), dtype),
                        "own base": step(model, base, dtype),
                        "torch linears": torch_linears(model, tokens),
                    },
                    options.seconds,
                )
                for call, taken in times.items():
                    bound = bound_s if call == "variants" else None
                    figures.add(f"{case} {call}", median(taken), "s", bound=bound, spread=spread(taken))
                    figures.add(f"{case} {call} best", min(taken), "s")
                ratio = median(times["variants"]) / median(times["own base"])
                figures.add(f"{case} over own base", ratio, "ratio", against="own base, same run")
                ratio = median(times["directions"]) / median(times["variants"])
                figures.add(f"{case} directions over signs", ratio, "ratio", against="variants, same run")
                figures.add(f"{case} tokens a second", tokens / median(times["variants"]), "1/s")
    figures.show()


if __name__ == "__main__":
    main()
