"""A plausible finished run, made up for these tests only."""

import math
import random
from collections.abc import Callable

import pytest

from zen_train.report import (
    ArtifactSize,
    BaseModelInfo,
    Curves,
    DataSource,
    KindSize,
    Losses,
    MergePoint,
    MergeSummary,
    PhaseSeconds,
    Places,
    Provenance,
    RunResults,
    Sample,
    TensorRow,
    TrainPoint,
    ValidationPoint,
)

MODULES = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}


def make_results(*, layers: int = 30, steps: int = 60, merge_every: int = 20) -> RunResults:
    """A run of a SmolLM2-like shape whose loss falls from 2.1 to 1.6 with noise."""
    draw = random.Random(0)
    train = tuple(
        TrainPoint(
            step=step,
            loss=1.62 + 0.55 * math.exp(-step / (0.3 * steps)) + draw.gauss(0, 0.07),
            lr=2e-4 * min(1.0, step / 6) * 0.5 * (1 + math.cos(math.pi * step / steps)),
            tokens_per_s=620 + draw.gauss(0, 25),
        )
        for step in range(1, steps + 1)
    )
    merge_steps = range(merge_every, steps + 1, merge_every)
    validation = (
        ValidationPoint(step=0, loss=2.1438),
        *(ValidationPoint(step=s, loss=1.68 + 0.46 * math.exp(-s / (0.35 * steps))) for s in merge_steps),
    )
    merges = tuple(
        MergePoint(
            step=step,
            accepted=index != 1,
            seconds=4.2 + draw.random(),
            relative_change=0.0021 * (index + 1),
            energy_kept=0.93 - 0.02 * index,
            loss_before=1.80 - 0.05 * index,
            loss_after=1.79 - 0.05 * index + (0.031 if index == 1 else 0.0),
        )
        for index, step in enumerate(merge_steps)
    )
    tensors = [
        TensorRow(
            name="model.embed_tokens.weight",
            kind="dense",
            shape=(49152, 576),
            stored_bytes=49152 * 576 * 2,
            zeros=0.91,
            relative_error=None,
        )
    ]
    for layer in range(layers):
        for index, (module, (rows, columns)) in enumerate(MODULES.items()):
            tensors.append(
                TensorRow(
                    name=f"model.layers.{layer}.{module}.weight",
                    kind="sign",
                    shape=(rows, columns),
                    stored_bytes=rows * math.ceil(columns / 8) + 4 * rows,
                    zeros=0.002 + 0.001 * draw.random(),
                    relative_error=0.61 + 0.02 * index + 0.0015 * layer + draw.gauss(0, 0.008),
                )
            )
        tensors.append(
            TensorRow(
                name=f"model.layers.{layer}.input_layernorm.weight",
                kind="dense",
                shape=(576,),
                stored_bytes=1152,
            )
        )
    by_kind = tuple(
        KindSize(
            kind=kind,
            tensors=sum(row.kind == kind for row in tensors),
            weights=sum(math.prod(row.shape) for row in tensors if row.kind == kind),
            stored_bytes=sum(row.stored_bytes for row in tensors if row.kind == kind),
        )
        for kind in ("sign", "dense")
    )
    return RunResults(
        variant="coder",
        scale="quick",
        base=BaseModelInfo(
            name="SmolLM2-135M-Instruct",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            fingerprint="3b1f0c5e" * 8,
            parameters=134_515_008,
        ),
        losses=Losses(base=2.1438, fine_tune=1.7127, delta=1.7391, tokens=16_384),
        size=ArtifactSize(
            stored_bytes=sum(kind.stored_bytes for kind in by_kind),
            bf16_model_bytes=269_030_016,
            by_kind=by_kind,
        ),
        provenance=Provenance(
            device="CPU, 2 cores (AVX-512, AMX-bf16)",
            versions={
                "zen_train": "0.1.0",
                "torch": "2.13.0",
                "lightning": "2.6.6",
                "transformers": "5.24.0",
            },
            commit="0123456789abcdef0123456789abcdef01234567",
            command="python -m zen_train +variant=coder",
            started_at="2026-05-04T09:12:44+00:00",
            seed=0,
        ),
        places=Places(
            run="outputs/coder",
            artifact="outputs/coder/delta",
            base="bases/smollm2",
            report="outputs/coder/report.html",
            checkpoint="outputs/coder/checkpoints/last.ckpt",
        ),
        steps=steps,
        tokens=61_440,
        seconds=PhaseSeconds(train=171.4, merge=13.9, validate=22.5, export=3.1, evaluate=31.8, total=251.0),
        merge=MergeSummary(method="svd_average", rank=64, every_n_steps=merge_every, accept="if_not_worse"),
        config={
            "variant": {"name": "coder"},
            "optim": {"learning_rate": 2e-4, "betas": [0.9, 0.95]},
            "trainer": {"max_steps": steps, "precision": "bf16-mixed"},
            "merge": {"method": "svd_average", "rank": 64},
        },
        data=(
            DataSource(
                name="Python standard library",
                licence="PSF-2.0",
                version="3.11.7",
                url="https://docs.python.org/3/library/",
                train_documents=912,
                held_out_documents=48,
            ),
        ),
        language=("en",),
        tensors=tuple(tensors),
        curves=Curves(train=train, validation=validation, merges=merges),
        samples=(
            Sample(
                prompt="Write a Python function that returns the median of a list.",
                base="To find the median of a list, use the `sorted` function. First, sort the list.",
                fine_tune='def median(data):\n    """Return the median of data."""\n    data = sorted(data)\n'
                "    if not data:\n        raise StatisticsError('no median for empty data')\n",
                delta='def median(data):\n    """Return the median of numeric data."""\n'
                "    data = sorted(data)\n    return data[len(data) // 2]\n",
            ),
            Sample(
                prompt="What does this do?\n\nfor i in range(3):\n    print(i)",
                base="It prints the numbers.",
                fine_tune="Print the numbers 0, 1 and 2, each on a line of its own.",
                delta="Print the numbers 0, 1 and 2, one on each line.",
            ),
        ),
    )


@pytest.fixture
def make_run() -> Callable[..., RunResults]:
    """`make_results`, for tests that need other sizes."""
    return make_results


@pytest.fixture
def results() -> RunResults:
    """A quick run of the default size."""
    return make_results()
