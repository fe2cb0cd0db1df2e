"""Run mixed batches with the C++ kernels and with the Triton kernels, and print what each said as JSON.

In a process of its own: TRITON_INTERPRET=1 must be set before Triton is imported. Argument: an empty folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.serve.engine.models import Family, engine_of, job, load, make_base, make_variant, prompt, run
from zen_train.kernels.bitdelta_embedding import registration as embedding
from zen_train.kernels.bitdelta_linear import registration as linear
from zen_train.kernels.directions_linear import registration as directions
from zen_train.serve.types import Job, TokenEvent

TOKENS = 5
BATCHES = {
    "one plane": (None, "a", "b"),
    "two planes": (None, "two"),
    "directions": (None, "a", "coded"),
}
"""With one plane the embedding has a kernel of its own; further planes and directions are added by `bitdelta_add_`."""


def counted(module: object, name: str, calls: list[str]) -> None:
    """Note every call of a Triton operator."""
    operator = getattr(module, name)
    setattr(module, name, lambda *given: calls.append(name) or operator(*given))


def work_of(family: Family, name: str | None) -> Job:
    """A greedy job of a variant, or of the base."""
    return job(name or "base", name and family.hash(name), prompt(5, seed=len(name or "")), max_tokens=TOKENS)


def facts(event: TokenEvent) -> tuple[int | None, float | None, list[int]]:
    """Token, log probability, alternatives."""
    return event.token, event.logprob, [other.token for other in event.top]


def main() -> None:
    """Entry point."""
    folder, calls = Path(sys.argv[1]), []
    for module, name in (
        (embedding, "triton_embedding"),
        (linear, "triton_linear"),
        (linear, "triton_add_"),
        (directions, "triton_rows"),
    ):
        counted(module, name, calls)
    base = make_base(folder / "base", "llama-tied")
    family = Family(
        base,
        {
            "a": make_variant(base, folder / "a", seed=11),
            "b": make_variant(base, folder / "b", seed=12, scale="matrix"),
            "two": make_variant(base, folder / "two", seed=13, planes=2),
            "coded": make_variant(base, folder / "coded", seed=15, code="directions"),
        },
    )
    said = {}
    for kernels in ("auto", "triton"):
        engine = engine_of(family, kernels=kernels, pad_decode=True, max_jobs=3, slots=5)
        load(engine, family, family.variants)
        said[kernels] = {}
        for batch, names in BATCHES.items():
            calls.clear()
            running = run(engine, *(work_of(family, name) for name in names))
            said[kernels][batch] = {
                "kernels": sorted(set(calls)),
                "said": {name: list(map(facts, events)) for name, events in running.events.items()},
            }
        engine.stop()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
