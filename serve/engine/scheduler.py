"""Which tokens go into the next step: continuous batching with chunked prefill. Pure Python, no tensors.

Rules:
- Every running job that decodes takes part in every step with its one token.
- Beside them at most `prefill_chunk_tokens` prompt tokens are computed. Half of them go to the oldest
  prompt, so that it always advances; the rest to the prompts with the fewest tokens left, so that a short
  one need not wait for a long one.
- Jobs start in the order of arrival when there is a seat and room for all their tokens so far. A job keeps
  its pages until it ends or is preempted.
- When a decoding job needs a page and none is free, the youngest running job loses all of its pages and
  waits again; its tokens so far are computed anew later. The oldest job is never preempted, and each job
  fits alone (checked at submit), so every job ends.

It does not know variants, and nothing here samples or touches the device.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from zen_train.serve.engine.pages import PagePool
from zen_train.serve.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Span:
    """`count` tokens of a sequence from its `computed` on."""

    sequence: Sequence
    count: int

    @property
    def reaches_end(self) -> bool:
        """Whether its last token's scores choose the next token."""
        return self.count == self.sequence.pending


class Scheduler:
    """The waiting and running jobs of one engine."""

    def __init__(self, pool: PagePool, *, max_jobs: int, prefill_chunk_tokens: int) -> None:
        self._pool = pool
        self._chunk = prefill_chunk_tokens
        self._free_seats = list(range(max_jobs - 1, -1, -1))
        self._max_jobs = max_jobs
        self.waiting: list[Sequence] = []
        """A heap, oldest first."""
        self.running: list[Sequence] = []
        """Oldest first."""
        self.preemptions = 0
        self._admissions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a new job."""
        heapq.heappush(self.waiting, sequence)

    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return bool(self.running or self.waiting)

    def remove(self, sequence: Sequence) -> None:
        """Forget a job that ended, running or waiting."""
        if sequence.seat >= 0:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
            heapq.heapify(self.waiting)

    def plan(self) -> list[Span]:
        """The next step, with pages taken for all of its tokens. Empty when there is nothing to do."""
        self._grow()
        self._admit()
        decoding = [Span(sequence, 1) for sequence in self.running if sequence.pending == 1]
        return decoding + self._prefill()

    def _grow(self) -> None:
        """A page for each decoding job that is at the end of its last one, the oldest first."""
        for sequence in list(self.running):
            if sequence.seat < 0 or len(sequence.tokens) <= len(sequence.pages) * self._pool.page_tokens:
                continue
            while not self._pool.free and sequence.seat >= 0:
                self._preempt(self.running[-1])
            if sequence.seat >= 0:
                sequence.pages += self._pool.take(1)

    def _preempt(self, victim: Sequence) -> None:
        assert len(self.running) > 1, "a job that does not fit alone was accepted"
        self.running.remove(victim)
        self._release(victim)
        heapq.heappush(self.waiting, victim)
        self.preemptions += 1

    def _admit(self) -> None:
        """Seats for waiting jobs. One free page for each running job stays in reserve, else a job that was
        just preempted would come back and be preempted again at the next page.
        """
        while self.waiting and self._free_seats:
            sequence = self.waiting[0]
            needed = self._pool.needed(len(sequence.tokens))
            if self._pool.free < needed + len(self.running):
                return
            heapq.heappop(self.waiting)
            self._admissions += 1
            sequence.seat, sequence.admission = self._free_seats.pop(), self._admissions
            sequence.pages += self._pool.take(needed)
            self.running.append(sequence)
            self.running.sort()

    def _prefill(self) -> list[Span]:
        filling = [sequence for sequence in self.running if sequence.pending > 1]
        if not filling:
            return []
        counts: dict[Sequence, int] = {}
        left = self._chunk
        share = left if len(filling) == 1 else (left + 1) // 2
        counts[filling[0]] = min(share, filling[0].pending)
        left -= counts[filling[0]]
        for sequence in sorted(filling[1:], key=lambda sequence: (sequence.pending, sequence.arrival)):
            take = min(left, sequence.pending)
            if take:
                counts[sequence] = take
                left -= take
        counts[filling[0]] += min(left, filling[0].pending - counts[filling[0]])
        return [Span(sequence, counts[sequence]) for sequence in filling if sequence in counts]

    def _release(self, sequence: Sequence) -> None:
        self._pool.give_back(sequence.pages)
        self._free_seats.append(sequence.seat)
        sequence.seat, sequence.computed = -1, 0

    def check(self) -> None:
        """The invariants: every page and every seat is free or held once, pages cover what was computed."""
        held = [page for sequence in self.running for page in sequence.pages]
        assert len(held) == len(set(held))
        assert len(held) + self._pool.free == self._pool.total
        seats = [sequence.seat for sequence in self.running]
        assert sorted(seats + self._free_seats) == list(range(self._max_jobs))
        assert self.running == sorted(self.running)
        for sequence in self.running:
            assert sequence.computed <= len(sequence.pages) * self._pool.page_tokens
        for sequence in self.waiting:
            assert (sequence.seat, sequence.pages, sequence.computed) == (-1, [], 0)
