"""One job inside the engine: its tokens so far, how many of them have keys and values, and its places."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from zen_train.serve.engine.interface import Sink
from zen_train.serve.engine.slots import Place
from zen_train.serve.types import Job


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the step thread."""

    job: Job
    sink: Sink
    place: Place
    arrival: int
    """Older jobs have smaller numbers, a preempted one keeps its own."""
    tokens: list[int]
    """The prompt, then what was generated."""
    computed: int = 0
    """How many of `tokens` have keys and values in `pages`."""
    seat: int = -1
    """Row of the page table while it runs."""
    admission: int = 0
    """Number of its present stay in a seat; another stay has other pages."""
    pages: list[int] = field(default_factory=list)
    draws: random.Random = field(default_factory=random.Random)
    """Gives one number for each sampled token, whatever else is in the batch."""
    generated: Counter[int] = field(default_factory=Counter)
    """Generated tokens, counted; kept only for jobs with penalties."""
    prompt_set: frozenset[int] = frozenset()
    """Tokens of the prompt; kept only for jobs with a repetition penalty."""

    @classmethod
    def of(cls, job: Job, sink: Sink, place: Place, arrival: int) -> Sequence:
        """A sequence that has computed nothing yet."""
        repeats = job.sampling.repetition_penalty != 1.0
        return cls(
            job=job,
            sink=sink,
            place=place,
            arrival=arrival,
            tokens=list(job.prompt_tokens),
            draws=random.Random(job.sampling.seed),
            prompt_set=frozenset(job.prompt_tokens) if repeats else frozenset(),
        )

    @property
    def pending(self) -> int:
        """Tokens without keys and values: 1 while it decodes."""
        return len(self.tokens) - self.computed

    @property
    def generated_tokens(self) -> int:
        """How many tokens it has produced."""
        return len(self.tokens) - len(self.job.prompt_tokens)

    def __lt__(self, other: Sequence) -> bool:
        return self.arrival < other.arrival
