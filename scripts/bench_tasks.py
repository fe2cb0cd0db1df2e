"""Task scores of base, delta and full fine-tune: problems solved, greedy decoding, on our own engine.

python scripts/bench_tasks.py --variants DIR [--full DIR] [--limit N] [--out FILE] TASK [TASK ...]

math, math_seeds and reasoner: exact match on `reasoning-gym` problems not trained on: of templates, of seeds (new
numbers in trained templates) and of seeds; coder: pass@1 on HumanEval (pip install -c constraints.txt -e '.[eval]'),
each program in a sandbox. DIR of --variants holds the exported delta of each variant; DIR/VARIANT of --full the runs of
bench_fidelity.py (every weights.safetensors below it is measured). All models are run in float32, so that only the
weights differ. Intervals are of 95 %: Wilson's for a score, Newcombe's for what a model solves more than the base. JSON
lines on standard output, and appended to --out, where a case that is there already is not measured again. Six minutes a
task of 40 problems on one core that others use too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measure import Figures
from tasks_answers import Answer, answering, full_model
from tasks_intervals import paired, wilson
from tasks_problems import TASKS, Task, task_of

from zen_train.base import Base, prepare_base
from zen_train.delta import DeltaArtifact
from zen_train.errors import ZenTrainError
from zen_train.serve.config import read_config

WEIGHTS = "weights.safetensors"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("tasks", nargs="+", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--variants", type=Path, required=True, metavar="DIR", help="holds a delta a task")
    parser.add_argument("--full", type=Path, metavar="DIR", help="holds the weights of full fine-tunes")
    parser.add_argument("--limit", type=int, metavar="N", help="problems of each task (default: all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines; cases in it are not repeated")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--base", default="smollm2", help="of conf/base (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.limit is not None and arguments.limit < 1:
        parser.error(f"--limit={arguments.limit}: at least 1 problem is needed")
    for variant in (TASKS[task] for task in arguments.tasks):
        if not (arguments.variants / variant).is_dir():
            parser.error(
                f"--variants={arguments.variants}: no folder {variant} in it; export that variant first"
            )
    figures = Figures("tasks", arguments.out)
    try:
        base = prepare_base(read_config([f"base={arguments.base}"]).base)
        for name in arguments.tasks:
            Bench(task_of(name, arguments.limit), base, arguments, figures).measure()
    except ZenTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    figures.show()
    return 0


@dataclass(frozen=True)
class Model:
    """What is measured. `identity` says which bytes it is; `place`: the delta's folder, or the weights."""

    name: str
    identity: str
    place: Path | None = None


class Bench:
    """All figures of one task."""

    def __init__(self, task: Task, base: Base, arguments: argparse.Namespace, figures: Figures) -> None:
        self.task, self.base, self.figures, self.dtype = task, base, figures, arguments.dtype
        delta = arguments.variants / task.variant
        self.beside = [
            Model("base", base.fingerprint.root[:12]),
            Model("delta", DeltaArtifact.open(delta).content_hash[:12], delta),
        ]
        self.full = full_runs(arguments.full, task.variant) if arguments.full else []
        self.known = known_outcomes(arguments.out)

    def measure(self) -> None:
        """Base and delta in one batch, then each full fine-tune on an engine of its own."""
        if missing := [model for model in self.beside if self._known(model) is None]:
            with answering(self.base, dtype=self.dtype) as answerer:
                loaded = {m.name: None if m.place is None else answerer.load(m.place) for m in missing}
                found = answerer.answers(loaded, self.task.prompts, max_tokens=self.task.max_tokens)
            for model in missing:
                self._record(model, found[model.name])
        for model in self.full:
            if self._known(model) is None:
                assert model.place is not None
                with (
                    full_model(self.base, model.place) as folder,
                    answering(self.base, dtype=self.dtype, folder=folder) as answerer,
                ):
                    found = answerer.answers(
                        {model.name: None}, self.task.prompts, max_tokens=self.task.max_tokens
                    )
                self._record(model, found[model.name])
        self._gains()

    def _record(self, model: Model, answers: list[Answer]) -> None:
        right = self.task.score([answer.text for answer in answers])
        outcomes = "".join("01"[each] for each in right)
        self.known[self._case(model), self._against(model)] = outcomes
        self.figures.add(
            self._case(model),
            100 * sum(right) / len(right),
            "%",
            against=self._against(model),
            spread=wilson(sum(right), len(right)),
            outcomes=outcomes,
        )
        cut = sum(answer.cut for answer in answers)
        print(
            f"{self._case(model)}: {cut} of {len(answers)} answers were cut at their length", file=sys.stderr
        )

    def _gains(self) -> None:
        base, *others = [*self.beside, *self.full]
        for model in others:
            case = f"{self.task.name}/{model.name} over base"
            against = f"{self._against(model)}; base {base.identity}"
            if (case, against) not in self.known:
                before, after = self._known(base), self._known(model)
                assert before is not None
                assert after is not None
                gain, interval = paired(before, after)
                self.figures.add(case, gain, "points", against=against, spread=interval)

    def _known(self, model: Model) -> str | None:
        return self.known.get((self._case(model), self._against(model)))

    def _case(self, model: Model) -> str:
        return f"{self.task.name}/{model.name} {self.task.metric}"

    def _against(self, model: Model) -> str:
        task = self.task
        return (
            f"{len(task.prompts)} problems {task.digest} of {task.source}; {model.identity} in {self.dtype}"
        )


def full_runs(folder: Path, variant: str) -> list[Model]:
    """Every full fine-tune below `folder/variant`, named by its folder.

    Raises:
        ZenTrainError: there is none.
    """
    found = sorted((folder / variant).rglob(WEIGHTS))
    if not found:
        raise ZenTrainError(
            f"--full={folder}: no {WEIGHTS} below {folder / variant}; run bench_fidelity.py --work {folder}"
        )
    return [Model(path.parent.name, digest(path), path) for path in found]


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def known_outcomes(out: Path | None) -> dict[tuple[str, str], str]:
    """(case, against) -> outcomes of the figures that `out` holds."""
    lines = out.read_text().splitlines() if out is not None and out.is_file() else []
    rows = (json.loads(line) for line in lines)
    return {(row["case"], row["against"]): row.get("outcomes", "") for row in rows if row["bench"] == "tasks"}


if __name__ == "__main__":
    sys.exit(main())
