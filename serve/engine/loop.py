"""The engine's thread: takes commands, runs steps, hands out events.

Contract: every accepted job gets exactly one event with `finish` set, also when the thread dies or is
stopped. What goes wrong in one job (scores that are not finite, a sink that raises) ends that job; anything
else is the end of the engine: `death` says why, and every job ends with an EngineDeadError. Between steps
without work the thread waits on a condition. It does not know HTTP, files or slots.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from zen_train.serve.engine.sampler import Sampled, has_penalties, sample
from zen_train.serve.engine.scheduler import Scheduler, Span
from zen_train.serve.engine.sequence import Sequence
from zen_train.serve.errors import EngineDeadError, ServeError
from zen_train.serve.types import FinishReason, TokenEvent

IDLE_WAIT_S = 1.0
"""An idle thread renews its heartbeat this often."""

_log = logging.getLogger(__name__)


class StepLoop:
    """One thread around a scheduler and a forward."""

    def __init__(
        self,
        scheduler: Scheduler,
        scores: Callable[[list[Span]], Tensor],
        *,
        ended: Callable[[Sequence], None],
        threads: int | None,
    ) -> None:
        """`ended` is called for each job just before its last event; `threads` are the CPU threads of a
        step.
        """
        self._scheduler = scheduler
        self._scores = scores
        self._ended = ended
        self._threads = threads
        self._wake = threading.Condition()
        self._new: deque[Sequence] = deque()
        self._cancelled: deque[str] = deque()
        self._stopping = False
        self._jobs: dict[str, Sequence] = {}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self.heartbeat_s = time.monotonic()
        self.steps = 0
        self.tokens_generated = 0
        self.death: str | None = None

    @property
    def alive(self) -> bool:
        """Whether steps are run."""
        return self._ready.is_set() and not self._stopping and self.death is None

    def start(self) -> None:
        """Start the thread; returns when it takes commands."""
        self._thread.start()
        self._ready.wait()

    def submit(self, sequence: Sequence) -> None:
        """Queue a job. Raises EngineDeadError; no event follows then."""
        with self._wake:
            if not self.alive:
                raise EngineDeadError(f"the engine does not run ({self.death or 'not started, or stopped'})")
            self._new.append(sequence)
            self._wake.notify()

    def cancel(self, job_id: str) -> None:
        """End a job before the next step, if it is there."""
        with self._wake:
            self._cancelled.append(job_id)
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after the current step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        self._ready.set()
        try:
            with torch.inference_mode():
                while self._take_commands():
                    if self._scheduler.has_work():
                        self._step()
        except Exception as error:
            self._die(error)
        else:
            self._end_all("cancelled", None)

    def _take_commands(self) -> bool:
        """Wait for work, then take what was asked meanwhile. False: stop."""
        with self._wake:
            self.heartbeat_s = time.monotonic()
            while not (self._new or self._cancelled or self._stopping or self._scheduler.has_work()):
                self._wake.wait(IDLE_WAIT_S)
                self.heartbeat_s = time.monotonic()
            if self._stopping:
                return False
            new, self._new = self._new, deque()
            cancelled, self._cancelled = self._cancelled, deque()
        for sequence in new:
            self._jobs[sequence.job.id] = sequence
            self._scheduler.add(sequence)
        for job_id in cancelled:
            if job_id in self._jobs:
                self._end(self._jobs[job_id], "cancelled")
        return True

    def _step(self) -> None:
        spans = self._scheduler.plan()
        assert spans, "work, and nothing to compute"
        ending = [span.sequence for span in spans if span.reaches_end]
        scores_SN = self._scores(spans)
        sampled = sample(scores_SN, ending) if ending else []
        for span in spans:
            span.sequence.computed += span.count
        self.steps += 1
        for sequence, choice in zip(ending, sampled, strict=True):
            self._deliver(sequence, choice)

    def _deliver(self, sequence: Sequence, choice: Sampled) -> None:
        job, token = sequence.job, choice.token
        if token is None:
            variant = "the base" if job.variant_hash is None else f"variant {job.variant_hash[:16]}"
            message = (
                f"job {job.id}: {variant} gave scores that are not finite after {len(sequence.tokens)} tokens"
            )
            _log.error(message)
            self._end(sequence, "error", error=ServeError(message))
            return
        sequence.tokens.append(token)
        self.tokens_generated += 1
        if has_penalties(sequence):
            sequence.generated[token] += 1
        finish: FinishReason | None = None
        if token in job.stop_tokens and sequence.generated_tokens > job.min_tokens:
            finish = "stop"
        elif sequence.generated_tokens >= job.max_tokens:
            finish = "length"
        if finish is None:
            self._send(
                sequence, TokenEvent(job_id=job.id, token=token, logprob=choice.logprob, top=choice.top)
            )
        else:
            self._end(sequence, finish, choice=choice)

    def _send(self, sequence: Sequence, event: TokenEvent) -> None:
        try:
            sequence.sink(event)
        except Exception:
            _log.exception("the sink of job %s failed; the job ends", sequence.job.id)
            if event.finish is None:
                self._forget(sequence)

    def _end(
        self,
        sequence: Sequence,
        finish: FinishReason,
        *,
        choice: Sampled | None = None,
        error: Exception | None = None,
    ) -> None:
        self._forget(sequence)
        last = choice or Sampled(None)
        event = TokenEvent(
            job_id=sequence.job.id,
            token=last.token,
            finish=finish,
            logprob=last.logprob,
            top=last.top,
            error=error,
        )
        self._send(sequence, event)

    def _forget(self, sequence: Sequence) -> None:
        del self._jobs[sequence.job.id]
        self._scheduler.remove(sequence)
        self._ended(sequence)

    def _die(self, error: Exception) -> None:
        _log.critical("the engine died", exc_info=error)
        with self._wake:
            self.death = f"{type(error).__name__}: {error}"
        self._end_all("error", EngineDeadError(f"the engine died: {self.death}"))

    def _end_all(self, finish: FinishReason, error: Exception | None) -> None:
        """The last events. After a death the scheduler may be in any state, so it is not asked."""
        with self._wake:
            sequences = [*self._jobs.values(), *self._new]
            self._new.clear()
        self._jobs.clear()
        for sequence in sequences:
            self._ended(sequence)
            self._send(sequence, TokenEvent(job_id=sequence.job.id, token=None, finish=finish, error=error))
