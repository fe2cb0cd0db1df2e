"""The iterables behind the DataModule: an order that can stop anywhere and go on, and a fixed held-out set.

Batches are dictionaries: `input_ids`, `labels`, `position_ids` `[B, T]` int64; `window_tokens`, a plain
int; `record_ids`, the names of the records in each block. Blocks are cut from arrays in memory, so there
are no worker processes: a batch costs microseconds against a training step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from zen_train.data.packing import Block, BlockPlan, empty_block, fill_block
from zen_train.data.records import Record
from zen_train.data.token_set import TokenisedSet, tokenised
from zen_train.data.tokenise import TooLong
from zen_train.errors import DataError


class Batch(TypedDict):
    """One micro-batch.

    `window_tokens` counts the labels of everything that the loss is averaged over: for training the
    optimizer step (all micro-batches of the accumulation window, over all ranks), for evaluation the whole
    held-out set. A sum of token losses divided by it, added up over those micro-batches and ranks, is the
    mean loss per token.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    window_tokens: int
    record_ids: list[list[str]]


def to_batch(blocks: Sequence[Block], *, window_tokens: int) -> Batch:
    """Stack blocks `[T]` into a batch `[B, T]`."""
    return {
        "input_ids": torch.from_numpy(np.stack([b.input_ids for b in blocks])),
        "labels": torch.from_numpy(np.stack([b.labels for b in blocks])),
        "position_ids": torch.from_numpy(np.stack([b.position_ids for b in blocks])),
        "window_tokens": window_tokens,
        "record_ids": [list(b.names) for b in blocks],
    }


class Blocks:
    """Block i of an endless shuffled order, and how many labels it has, without building it."""

    def __init__(self, examples: TokenisedSet, *, block_tokens: int, pad_token_id: int, seed: int) -> None:
        self.examples = examples
        self.block_tokens = block_tokens
        self.pad_token_id = pad_token_id
        self.seed = seed
        self.plan = BlockPlan(examples.lengths.tolist(), block_tokens=block_tokens, seed=seed)
        loss = examples.loss.astype(np.int64)
        loss[examples.starts[:-1]] = 0  # the first label of each example is masked in a block
        self._labels = np.add.reduceat(loss, examples.starts[:-1])

    def __getitem__(self, index: int) -> Block:
        return fill_block(
            self.examples, self.plan[index], block_tokens=self.block_tokens, pad_token_id=self.pad_token_id
        )

    def label_tokens(self, index: int) -> int:
        """How many tokens of block `index` carry loss."""
        return int(self._labels[list(self.plan[index])].sum())

    def empty(self) -> Block:
        """A block of padding."""
        return empty_block(block_tokens=self.block_tokens, pad_token_id=self.pad_token_id)

    def identity(self) -> str:
        """A digest of the tokens, the block length and the seed: of all that decides the order."""
        digest = hashlib.sha256(f"{self.block_tokens} {self.seed}".encode())
        digest.update(self.examples.starts.tobytes())
        digest.update(self.examples.ids.tobytes())
        return digest.hexdigest()[:32]


def tokenised_blocks(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    what: str,
    block_tokens: int,
    too_long: TooLong,
    cache: bool,
    seed: int,
) -> Blocks:
    """The records, tokenised and packed. Padding uses the tokenizer's pad token, else its end token.

    Raises:
        DataError: a record that cannot be used; `what` names the set.
    """
    examples = tokenised(
        records, tokenizer, what=what, max_tokens=block_tokens, too_long=too_long, cache=cache
    )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return Blocks(examples, block_tokens=block_tokens, pad_token_id=pad if pad is not None else 0, seed=seed)


class TrainLoader:
    """Exactly `steps * accumulate` batches for one rank; `state_dict` and `load_state_dict` go on mid-way.

    Step s takes the blocks from `s * accumulate * world_size * batch_size` on: its micro-batch a gives rank
    r the blocks at offset `(a * world_size + r) * batch_size`. So 1 x 4, 4 x 1 and two ranks see the same
    blocks a step. Lightning calls `load_state_dict` before `iter`, and an iterator without loaded state
    starts from the front.
    """

    def __init__(
        self,
        blocks: Blocks,
        *,
        batch_size: int,
        accumulate: int,
        steps: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._blocks = blocks
        self._batch_size = batch_size
        self._accumulate = accumulate
        self._steps = steps
        self._rank = rank
        self._world_size = world_size
        self._next = 0
        self._resume_at: int | None = None

    def __len__(self) -> int:
        return self._steps * self._accumulate

    def __iter__(self) -> Iterator[Batch]:
        self._next, self._resume_at = self._resume_at or 0, None
        while self._next < len(self):
            self._next += 1  # counted before it is handed out: a state saved while it is used excludes it
            yield self.batch(self._next - 1)

    def batch(self, index: int) -> Batch:
        """Micro-batch `index` of this rank."""
        step, micro = divmod(index, self._accumulate)
        per_step = self._accumulate * self._world_size * self._batch_size
        first = step * per_step + (micro * self._world_size + self._rank) * self._batch_size
        window_tokens = sum(self._blocks.label_tokens(step * per_step + i) for i in range(per_step))
        return to_batch(
            [self._blocks[first + i] for i in range(self._batch_size)], window_tokens=window_tokens
        )

    def state_dict(self) -> dict[str, Any]:
        """How many batches were handed out, and of which order."""
        return {"next_batch": self._next, "order": self._order()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batches that `state` counts.

        Raises:
            DataError: the state belongs to other data, another seed or another batch layout.
        """
        ours = self._order()
        if state["order"] != ours:
            changed = ", ".join(key for key in ours if state["order"].get(key) != ours[key])
            raise DataError(
                f"the checkpoint cannot be resumed: its order of batches differs in {changed} "
                f"(checkpoint {state['order']}, now {ours}). Resume with the same data, seed, batch size, "
                "accumulation and number of processes, or start afresh."
            )
        self._resume_at = int(state["next_batch"])

    def _order(self) -> dict[str, Any]:
        return {
            "blocks": self._blocks.identity(),
            "batch_size": self._batch_size,
            "accumulate": self._accumulate,
            "world_size": self._world_size,
        }


class FixedLoader:
    """The same batches at every pass."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = list(batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def heldout_batches(
    blocks: Blocks, *, eval_tokens: int, batch_size: int, rank: int = 0, world_size: int = 1
) -> list[Batch]:
    """The first blocks of one epoch, up to `eval_tokens` places; each rank gets as many batches."""
    count = min(max(1, eval_tokens // blocks.block_tokens), blocks.plan.epoch_blocks())
    window_tokens = sum(blocks.label_tokens(i) for i in range(count))
    per_round = batch_size * world_size
    mine = [first + rank * batch_size + i for first in range(0, count, per_round) for i in range(batch_size)]
    chosen = [blocks[i] if i < count else blocks.empty() for i in mine]
    if world_size == 1:
        chosen = chosen[:count]  # the last batch may be smaller; with several ranks shapes stay equal
    return [
        to_batch(chosen[i : i + batch_size], window_tokens=window_tokens)
        for i in range(0, len(chosen), batch_size)
    ]
