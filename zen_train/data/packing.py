"""Examples packed into blocks of fixed length, with attention that never crosses into another document.

Legend: T block length in tokens, B blocks in a batch, N examples.

`position_ids` restart at 0 with each example. transformers (5.x) reads document borders from them when it
gets no `attention_mask` and no cache, so a forward must pass `use_cache=False`: `model_inputs` does. For a
model that ignores position ids, `document_mask` gives the 4-D mask, and `separates_documents` tells which
kind a model is. The plan of blocks is a pure function of (lengths, seed, index); it holds no tokens and no
torch state.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zen_train.data.token_set import TokenisedSet
from zen_train.data.tokenise import IGNORE

WINDOW_EXAMPLES = 2048
"""Examples that are shuffled and packed together: enough to fill blocks well, few enough to be lazy."""


def pack(lengths: Sequence[int], *, block_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: each example, longest first, goes to the fullest block that still takes it.

    Args:
        lengths: tokens of each example, each at most `block_tokens`.

    Returns:
        The indices in each block. Uses at most 11/9 of the best possible number of blocks, plus one
        (Johnson 1973).
    """
    assert all(0 < n <= block_tokens for n in lengths), "examples are cut to the block length before packing"
    blocks: list[list[int]] = []
    open_blocks: list[tuple[int, int]] = []  # (free tokens, block), sorted
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(open_blocks, (lengths[i], -1))
        if at < len(open_blocks):
            free, block = open_blocks.pop(at)
        else:
            free, block = block_tokens, len(blocks)
            blocks.append([])
        blocks[block].append(i)
        if free > lengths[i]:
            insort(open_blocks, (free - lengths[i], block))
    return blocks


class BlockPlan:
    """Which examples make up block 0, 1, 2, ... without end; every epoch is shuffled and packed anew.

    `plan[i]` is a tuple of example indices, a pure function of (lengths, block_tokens, seed, i). An epoch is
    cut into windows of about `WINDOW_EXAMPLES` shuffled examples; a window is packed when it is first needed.
    """

    def __init__(self, lengths: Sequence[int], *, block_tokens: int, seed: int) -> None:
        assert len(lengths) > 0
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._block_tokens = block_tokens
        self._seed = seed
        self._windows_per_epoch = -(-len(self._lengths) // WINDOW_EXAMPLES)
        self._first_block = [0]  # of each window seen so far, and of the one after
        self._recent: dict[int, list[tuple[int, ...]]] = {}

    def __getitem__(self, index: int) -> tuple[int, ...]:
        while self._first_block[-1] <= index:
            window = len(self._first_block) - 1
            self._first_block.append(self._first_block[-1] + len(self._packed(window)))
        window = bisect_left(self._first_block, index + 1) - 1
        return self._packed(window)[index - self._first_block[window]]

    def _packed(self, window: int) -> list[tuple[int, ...]]:
        if window not in self._recent:
            if len(self._recent) > 1:  # an order is read from front to back: two windows are enough
                self._recent.pop(next(iter(self._recent)))
            self._recent[window] = self._pack_window(window)
        return self._recent[window]

    def epoch_blocks(self) -> int:
        """How many blocks the first epoch has."""
        return sum(len(self._pack_window(window)) for window in range(self._windows_per_epoch))

    def fill_share(self) -> float:
        """Tokens over places in the first epoch: 1.0 means no padding at all."""
        return float(self._lengths.sum()) / (self.epoch_blocks() * self._block_tokens)

    def _pack_window(self, window: int) -> list[tuple[int, ...]]:
        epoch, part = divmod(window, self._windows_per_epoch)
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._lengths))
        members = np.array_split(order, self._windows_per_epoch)[part]
        blocks = pack(self._lengths[members].tolist(), block_tokens=self._block_tokens)
        # Best-fit decreasing leaves long examples in front and in each block; shuffle both levels.
        shuffle = np.random.default_rng([self._seed, epoch, part, 1])
        blocks = [blocks[i] for i in shuffle.permutation(len(blocks))]
        return [tuple(int(members[block[i]]) for i in shuffle.permutation(len(block))) for block in blocks]


@dataclass(frozen=True, slots=True)
class Block:
    """One packed block, arrays `[T]`; `names` are the records in it, in order."""

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    names: tuple[str, ...]


def fill_block(
    examples: TokenisedSet, members: Sequence[int], *, block_tokens: int, pad_token_id: int
) -> Block:
    """Lay `members` one after another into a block.

    The first label of each example is masked, so nothing is predicted across a border. Padding has position 0
    throughout, which makes each padding token a document of its own: it attends only to itself.
    """
    input_ids = np.full(block_tokens, pad_token_id, dtype=np.int64)
    labels = np.full(block_tokens, IGNORE, dtype=np.int64)
    position_ids = np.zeros(block_tokens, dtype=np.int64)
    at = 0
    for member in members:
        ids, own_labels = examples[member]
        end = at + len(ids)
        input_ids[at:end] = ids
        labels[at + 1 : end] = own_labels[1:]
        position_ids[at:end] = np.arange(len(ids))
        at = end
    return Block(input_ids, labels, position_ids, tuple(examples.name(member) for member in members))


def empty_block(*, block_tokens: int, pad_token_id: int) -> Block:
    """A block of padding only: no loss, no records. It evens out the batches of several ranks."""
    return Block(
        np.full(block_tokens, pad_token_id, dtype=np.int64),
        np.full(block_tokens, IGNORE, dtype=np.int64),
        np.zeros(block_tokens, dtype=np.int64),
        (),
    )


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor | bool]:
    """The keyword arguments of a packed forward: `model(**model_inputs(batch))`.

    Without `use_cache=False` transformers makes a cache, and with a cache it does not look for document
    borders.
    """
    return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}


def document_mask(position_ids: Tensor) -> Tensor:
    """May query i see key j? Boolean `[B, 1, T, T]`: in its document and not later. Position 0 starts one."""
    document_BT = (position_ids == 0).cumsum(-1)
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    return torch.tril(same_BTT)[:, None]


@torch.no_grad()
def separates_documents(model: torch.nn.Module, *, vocabulary: int, tolerance: float = 1e-3) -> bool:
    """Does `model` keep packed documents apart by their position ids alone?

    Two probes with the same second document and different first ones: its logits must not differ by more than
    `tolerance` times their own size. Leaves mode and global random state as they were.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    half = 8
    ids = torch.arange(2 * half, device=device)[None] * 7919 % vocabulary
    other = ids.clone()
    other[:, :half] = (other[:, :half] + vocabulary // 2) % vocabulary
    positions = torch.arange(half, device=device).repeat(2)[None].expand(2, -1)
    batch = {"input_ids": torch.cat([ids, other]), "position_ids": positions}
    logits = model(**model_inputs(batch)).logits[:, half:].float()
    model.train(was_training)
    return bool((logits[0] - logits[1]).abs().max() <= tolerance * logits.abs().max())
