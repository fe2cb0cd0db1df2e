"""A step's tokens as the tensors that the decoder operator takes, in memory that is there from the start.

One flat int32 buffer on the host holds, one after another: token ids, positions, sequence rows, vector rows,
the slots of each plane, the slots of coded directions, and the rows whose scores are wanted. On a GPU it is
pinned and goes over in one copy; the tensors of the batch are views of its device twin, so a CUDA graph finds
them at the same addresses in every step of the same form. The page table is kept across steps and only touched
where a sequence got a page.

Padding: a batch of T tokens may be filled up to more. The extra tokens are of the base and of a sequence of
their own, whose pages belong to nobody else; nobody reads their scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from zen_train.kernels.decoder import TokenBatch
from zen_train.serve.engine.scheduler import Span
from zen_train.serve.engine.sequence import Sequence


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count` (1 or more)."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatch:
    """What a forward reads."""

    token_T: Tensor
    """int32"""
    tokens: TokenBatch
    wanted_S: Tensor
    """int32; rows whose scores are wanted."""

    @property
    def form(self) -> tuple[int, int, int, int, bool]:
        """Steps of the same form have their tensors at the same addresses: tokens, planes, wanted rows,
        table width, and whether some token has directions.
        """
        planes, tokens = self.tokens.plane_PT.shape
        width, directed = self.tokens.page_table_SJ.shape[1], self.tokens.direction_T is not None
        return tokens, planes, self.wanted_S.shape[0], width, directed


class BatchBuilder:
    """Turns spans into a `StepBatch`. Used by the step thread alone."""

    def __init__(
        self,
        *,
        max_jobs: int,
        prefill_chunk_tokens: int,
        max_planes: int,
        context_tokens: int,
        page_tokens: int,
        device: torch.device,
    ) -> None:
        most_padded = power_of_two(max_jobs)
        max_tokens = max(most_padded, max_jobs + prefill_chunk_tokens)
        self._page_tokens = page_tokens
        self._max_planes = max_planes
        self._padding_row = max_jobs
        self.padding_pages = -(-most_padded // page_tokens)
        """Pages that padding tokens write to; the pool has them beyond those it hands out."""
        self._views = lru_cache(maxsize=64)(self._make_views)
        pinned = device.type == "cuda"
        entries = max_tokens * (6 + max_planes)
        self._host = torch.zeros(entries, dtype=torch.int32, pin_memory=pinned)
        self._device = self._host if not pinned else torch.zeros(entries, dtype=torch.int32, device=device)
        self._values = self._host.numpy()
        widest = max(-(-context_tokens // page_tokens), self.padding_pages)
        self._host_table = torch.full((max_jobs + 1, widest), -1, dtype=torch.int32, pin_memory=pinned)
        self._table = self._host_table.numpy()
        self._table_version = 0
        self._narrow_tables: dict[int, Tensor] = {}
        self._narrow_versions: dict[int, int] = {}
        self._known_pages = [0] * max_jobs
        self._admission = [0] * max_jobs

    def set_padding_pages(self, first: int) -> None:
        """The pages of the padding sequence are `first` and the ones after it."""
        self._table[self._padding_row, : self.padding_pages] = np.arange(first, first + self.padding_pages)

    def build(self, spans: list[Span], *, tokens: int | None = None) -> StepBatch:
        """The batch of these spans, filled up to `tokens` tokens (and, if so, as many wanted rows)."""
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        vectors: list[int] = []
        slots: list[tuple[int, ...]] = []
        directed: list[int] = []
        wanted: list[int] = []
        longest_pages = 1
        for span in spans:
            sequence = span.sequence
            start, count, place = sequence.computed, span.count, sequence.place
            ids += sequence.tokens[start : start + count]
            positions += range(start, start + count)
            rows += [sequence.seat] * count
            vectors += [place.vector] * count
            slots += [() if place.directions else place.planes] * count
            directed += [place.planes[0] if place.directions else -1] * count
            if span.reaches_end:
                wanted.append(len(ids) - 1)
            longest_pages = max(longest_pages, self._update_table(sequence))
        if tokens is not None:
            padding = tokens - len(ids)
            wanted += range(len(ids), len(ids) + tokens - len(wanted))
            ids += [0] * padding
            positions += range(padding)
            rows += [self._padding_row] * padding
            vectors += [0] * padding
            slots += [()] * padding
            directed += [-1] * padding
            longest_pages = max(longest_pages, -(-padding // self._page_tokens))
        planes = max(1, max(map(len, slots)))
        entries = ids + positions + rows + vectors
        for plane in range(planes):
            entries += [own[plane] if plane < len(own) else -1 for own in slots]
        entries += directed
        entries += wanted
        self._values[: len(entries)] = entries
        if self._device is not self._host:
            self._device[: len(entries)].copy_(self._host[: len(entries)], non_blocking=True)
        token_T, position_T, sequence_T, vector_T, plane_PT, direction_T, wanted_S = self._views(
            len(ids), planes, len(wanted)
        )
        return StepBatch(
            token_T=token_T,
            tokens=TokenBatch(
                position_T=position_T,
                sequence_T=sequence_T,
                vector_T=vector_T,
                plane_PT=plane_PT,
                page_table_SJ=self._table_of_width(longest_pages),
                direction_T=direction_T if max(directed) >= 0 else None,
            ),
            wanted_S=wanted_S,
        )

    def _make_views(self, tokens: int, planes: int, wanted: int) -> tuple[Tensor, ...]:
        """Token ids, positions, sequence rows, vector rows, slots `[planes, tokens]`, slots of directions and wanted
        rows in the buffer.
        """
        sizes = [tokens] * 4 + [planes * tokens, tokens, wanted]
        *columns, plane_slots, direction_T, wanted_S = self._device[: sum(sizes)].split(sizes)
        return *columns, plane_slots.view(planes, tokens), direction_T, wanted_S

    def _update_table(self, sequence: Sequence) -> int:
        """Write a sequence's new pages to its row; how many it has."""
        seat, pages = sequence.seat, sequence.pages
        if self._admission[seat] != sequence.admission:
            self._admission[seat], self._known_pages[seat] = sequence.admission, 0
            self._table[seat] = -1
        known = self._known_pages[seat]
        if known < len(pages):
            self._table[seat, known : len(pages)] = pages[known:]
            self._known_pages[seat] = len(pages)
            self._table_version += 1
        return len(pages)

    def _table_of_width(self, pages: int) -> Tensor:
        """The page table's first columns: a power of two of them, so that few widths occur. Contiguous, at
        one address for each width, and copied only when the table has changed.
        """
        width = min(power_of_two(pages), self._host_table.shape[1])
        if width not in self._narrow_tables:
            shape = (self._host_table.shape[0], width)
            self._narrow_tables[width] = torch.zeros(shape, dtype=torch.int32, device=self._device.device)
            self._narrow_versions[width] = -1
        table = self._narrow_tables[width]
        if self._narrow_versions[width] != self._table_version:
            table.copy_(self._host_table[:, :width], non_blocking=True)
            self._narrow_versions[width] = self._table_version
        return table
