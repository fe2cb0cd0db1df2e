"""The Lightning DataModule: a corpus in, packed batches out, with a fixed order that survives interruption.

Use it with `Trainer(use_distributed_sampler=False, max_steps=...)`: it shards by rank itself, and one pass
over the training loader is exactly `max_steps * accumulate` micro-batches, so Lightning sees a single
epoch. It knows nothing of Hydra, of the model, or of where the records come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import lightning
from transformers import PreTrainedTokenizerBase

from zen_train.data.loaders import Batch, Blocks, FixedLoader, TrainLoader, heldout_batches, tokenised_blocks
from zen_train.data.records import Corpus
from zen_train.data.tokenise import Counts, TooLong


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a run trains and is measured on, for reports. Tokens count text only, never padding."""

    corpus: str
    train_records: int
    train_documents: int
    train_tokens: int
    train_label_tokens: int
    heldout_records: int
    heldout_documents: int
    heldout_tokens: int
    heldout_label_tokens: int
    eval_label_tokens: int
    fill_share: float
    epochs: float
    train_counts: Counts
    heldout_counts: Counts


class TextDataModule(lightning.LightningDataModule):
    """Train and validation batches of `context_tokens` long blocks.

    Args:
        corpus: the records, or a function that fetches them; it is called once, in `setup`.
        tokenizer: a fast tokenizer; padding uses its pad token, else its end token.
        context_tokens: block length T; no example is longer.
        batch_size: blocks per micro-batch and rank.
        accumulate: micro-batches per optimizer step; must equal the Trainer's `accumulate_grad_batches`.
        max_steps: optimizer steps of the run.
        eval_tokens: places (tokens and padding) of the held-out blocks used for validation and evaluation.
        seed: of the order.
        too_long: what happens to a record longer than `context_tokens`.
        cache: keep tokenised records in the cache folder.
    """

    def __init__(
        self,
        corpus: Corpus | Callable[[], Corpus],
        *,
        tokenizer: PreTrainedTokenizerBase,
        context_tokens: int,
        batch_size: int,
        accumulate: int,
        max_steps: int,
        eval_tokens: int,
        seed: int,
        too_long: TooLong = "truncate",
        cache: bool = True,
    ) -> None:
        super().__init__()
        self._corpus_source = corpus
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        self._batch_size = batch_size
        self._accumulate = accumulate
        self._max_steps = max_steps
        self._eval_tokens = eval_tokens
        self._seed = seed
        self._too_long = too_long
        self._cache = cache
        self._corpus: Corpus | None = None
        self._train: Blocks | None = None
        self._heldout: Blocks | None = None

    def setup(self, stage: str | None = None) -> None:
        """Fetch and tokenise, once. Lightning calls it; `heldout_batches` and `facts` do so when needed.

        Raises:
            DataError: a record, file or corpus that cannot be trained on.
        """
        if self._corpus is not None:
            return
        source = self._corpus_source
        corpus = source if isinstance(source, Corpus) else source()
        self._train = self._blocks(corpus, "training")
        self._heldout = self._blocks(corpus, "held-out")
        self._corpus = corpus

    def train_dataloader(self) -> TrainLoader:
        """This rank's share of the order, from the front; Lightning loads a resumed position into it."""
        rank, world_size = self._place()
        return TrainLoader(
            self._ready()[0],
            batch_size=self._batch_size,
            accumulate=self._accumulate,
            steps=self._max_steps,
            rank=rank,
            world_size=world_size,
        )

    def val_dataloader(self) -> FixedLoader:
        """This rank's share of the held-out batches."""
        rank, world_size = self._place()
        return FixedLoader(self._heldout_batches(rank=rank, world_size=world_size))

    def heldout_batches(self) -> list[Batch]:
        """All held-out batches that evaluation uses, the same at every call and on every rank."""
        return self._heldout_batches(rank=0, world_size=1)

    def facts(self) -> DataFacts:
        """Counts of the corpus and of this run's share of it."""
        train, heldout = self._ready()
        corpus = self._corpus
        assert corpus is not None
        blocks_of_run = self._max_steps * self._accumulate * self._place()[1] * self._batch_size
        return DataFacts(
            corpus=corpus.name,
            train_records=len(corpus.train),
            train_documents=len({r.document for r in corpus.train}),
            train_tokens=len(train.examples.ids),
            train_label_tokens=int(train.examples.loss.sum()),
            heldout_records=len(corpus.heldout),
            heldout_documents=len({r.document for r in corpus.heldout}),
            heldout_tokens=len(heldout.examples.ids),
            heldout_label_tokens=int(heldout.examples.loss.sum()),
            eval_label_tokens=self.heldout_batches()[0]["window_tokens"],
            fill_share=train.plan.fill_share(),
            epochs=blocks_of_run / train.plan.epoch_blocks(),
            train_counts=train.examples.counts,
            heldout_counts=heldout.examples.counts,
        )

    def _heldout_batches(self, *, rank: int, world_size: int) -> list[Batch]:
        return heldout_batches(
            self._ready()[1],
            eval_tokens=self._eval_tokens,
            batch_size=self._batch_size,
            rank=rank,
            world_size=world_size,
        )

    def _ready(self) -> tuple[Blocks, Blocks]:
        self.setup()
        assert self._train is not None
        assert self._heldout is not None
        return self._train, self._heldout

    def _place(self) -> tuple[int, int]:
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size

    def _blocks(self, corpus: Corpus, part: str) -> Blocks:
        return tokenised_blocks(
            corpus.train if part == "training" else corpus.heldout,
            self._tokenizer,
            what=f"{corpus.name}, {part} part",
            block_tokens=self._context_tokens,
            too_long=self._too_long,
            cache=self._cache,
            seed=self._seed,
        )
