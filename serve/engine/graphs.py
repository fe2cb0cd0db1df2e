"""Replay a forward as a CUDA graph: one captured per form of the batch, at its first use.

Contract: tensors of batches of one form lie at the same addresses (`BatchBuilder`), so a captured graph
reads the current step's values. The result is the graph's own buffer, overwritten by the next replay: use it
before the next step. Importable without CUDA; it has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zen_train.serve.engine.batch import StepBatch

_WARM_UP_RUNS = 2  # Triton compiles and tunes in them, which a capture must not


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    scores: Tensor


class GraphedForward:
    """`forward` with the launches of a step replaced by one."""

    def __init__(self, forward: Callable[[StepBatch], Tensor]) -> None:
        self._forward = forward
        self._captured: dict[tuple[int, int, int, int, bool], _Captured] = {}
        self._memory: Any = None  # the pool that all graphs share

    def __call__(self, batch: StepBatch) -> Tensor:
        """The scores of `batch`."""
        captured = self._captured.get(batch.form)
        if captured is None:
            captured = self._captured[batch.form] = self._capture(batch)
        captured.graph.replay()
        return captured.scores

    def _capture(self, batch: StepBatch) -> _Captured:
        # A forward may be repeated: it writes the same keys and values to the same places.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                self._forward(batch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Loads go on in other threads meanwhile: their allocations must not spoil the capture.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            scores = self._forward(batch)
        self._memory = graph.pool()
        return _Captured(graph, scores)
