"""Runs in a process of its own: scores answers to tasks of `reasoning-gym` with the package's own `score_answer`.

`python tasks_gym.py FOLDER SEED`, with PYTHONHASHSEED=0 as when the tasks were made; JSON lines on standard input with
`document` and `question` of a record of the corpora math or reasoner, and `text`, what a model said; out come lines
with `answer`, what was taken from the text, and `score`, 1.0 for a right one. The task is made anew from the document's
seeds, since a record does not hold all that scoring needs.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from zen_train.data.corpora import gym_worker

_NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?")
_MARKED = (
    re.compile(r"\banswer(?:\s+is)?\s*:\s*(.+)|\banswer\s+is\s+(.+)", re.IGNORECASE),
    re.compile(r"\\boxed\{([^}]*)\}"),
)
_PER_TEMPLATE = 200
"""At least as many problems of a template as a corpus holds."""


def extract(text: str, oracle: str) -> str:
    """The answer within `text`: what stands last after "Answer:" (as trained), in a box, or at the end.

    The last number of it where the right answer is a number, so that a unit or a thousands separator costs nothing.
    """
    lines = text.strip().splitlines()
    numeric = re.fullmatch(r"-?[\d,]+(\.\d+)?", oracle) is not None
    for pattern in _MARKED:
        if found := pattern.findall(text):
            answer = "".join(found[-1])
            break
    else:
        answer = text if numeric else (lines[-1] if lines else "")
    if numeric:
        numbers = _NUMBER.findall(answer)
        return numbers[-1].replace(",", "") if numbers else ""
    answer = answer.strip(" *`\"'\t")
    return answer if oracle.endswith(".") else answer.removesuffix(".")


def score(document: str, question: str, text: str, seed: int) -> dict[str, Any]:
    """`answer` and `score` of what a model said to a record's question."""
    data, entries = _template(document, seed) if document.startswith("template") else _block(document, seed)
    entry = entries[question]
    answer = extract(text, str(entry["answer"]).strip())
    return {"answer": answer, "score": float(data.score_answer(answer, entry))}


@cache
def _template(document: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """A data set that scores, and the problems of one template by their question."""
    importlib.import_module("reasoning_gym.coaching")
    symbolic = importlib.import_module("reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic")
    number = int(document.split()[1])
    part = "generators_00_49" if number < 50 else "generators_50_99"
    module = importlib.import_module(f"reasoning_gym.arithmetic.gsm_symbolic.{part}")
    generate = getattr(module, f"generate_{number}")
    made = (generate(Random(f"{seed} {number} {i}"), 1.0) for i in range(_PER_TEMPLATE))
    data = symbolic.GSMSymbolicDataset(symbolic.GSMSymbolicDatasetConfig(seed=0, size=1))
    return data, {" ".join(entry["question"].split()): entry for entry in made}


@cache
def _block(document: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """The same for a document of puzzles, named like `gcd seeds 3000 to 3024`."""
    name, _, first, _, last = document.split()
    importlib.import_module("reasoning_gym.coaching")
    path, options, _ = gym_worker.TASKS[name]
    importlib.import_module(f"reasoning_gym.{path}")
    factory = importlib.import_module("reasoning_gym.factory")
    size = int(last) - int(first) + 1
    data = factory.create_dataset(name, size=size, seed=seed * 1_000_000 + int(first), **options)
    return data, {gym_worker._question(name, data[i]): data[i] for i in range(size)}


def _rows() -> Iterator[dict[str, str]]:
    for line in sys.stdin:
        yield json.loads(line)


def main(folder: str, seed: str) -> None:
    gym_worker.stand_in(Path(folder))
    sys.path.insert(0, folder)
    for row in _rows():
        print(json.dumps(score(row["document"], row["question"], row["text"], int(seed))))


if __name__ == "__main__":
    main(*sys.argv[1:])
