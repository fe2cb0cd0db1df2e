"""The order of training: the same for any split into micro-batches, and the same after an interruption."""

from __future__ import annotations

import copy

import lightning
import pytest
import torch

from tests.data.support import byte_tokenizer, sums, tiny_model, token_set
from zen_train.data.loaders import Blocks, TrainLoader, heldout_batches
from zen_train.data.module import TextDataModule
from zen_train.data.packing import model_inputs
from zen_train.data.records import Corpus, ask
from zen_train.data.tokenise import IGNORE
from zen_train.errors import DataError


def _blocks(seed: int = 0, count: int = 120) -> Blocks:
    return Blocks(token_set(sums(count), byte_tokenizer()), block_tokens=256, pad_token_id=7, seed=seed)


def _names(batches) -> list[list[list[str]]]:
    return [batch["record_ids"] for batch in batches]


def test_resumed_batches_are_the_ones_that_were_left():
    """Lightning #19764: the data order after a resume equals that of an uninterrupted run."""
    whole = list(TrainLoader(_blocks(), batch_size=2, accumulate=3, steps=20))
    loader = TrainLoader(_blocks(), batch_size=2, accumulate=3, steps=20)
    iterator = iter(loader)
    for _ in range(25):
        next(iterator)
    state = loader.state_dict()
    resumed = TrainLoader(_blocks(), batch_size=2, accumulate=3, steps=20)
    resumed.load_state_dict(copy.deepcopy(state))
    rest = list(resumed)
    assert len(rest) == 60 - 25
    assert _names(rest) == _names(whole[25:])
    assert torch.equal(rest[0]["input_ids"], whole[25]["input_ids"])
    assert len(resumed) == 60, "Lightning counts the batches of the whole run"
    assert _names(resumed) == _names(whole), "without a loaded state an iterator starts from the front"


class _Recorder(lightning.LightningModule):
    """Keeps the records it sees; learns nothing worth having."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[list[str]]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["record_ids"])
        return (self.weight * batch["window_tokens"]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class _StopAfter(lightning.Callback):
    """Saves and stops when an optimizer step is done, as an interrupted run would."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def _fit(max_steps, accumulate, callbacks=(), resume=None) -> _Recorder:
    data = TextDataModule(
        Corpus(name="sums", train=sums(40), heldout=sums(8, first=1000)),
        tokenizer=byte_tokenizer(),
        context_tokens=256,
        batch_size=2,
        accumulate=accumulate,
        max_steps=max_steps,
        eval_tokens=512,
        seed=5,
        cache=False,
    )
    module = _Recorder()
    trainer = lightning.Trainer(
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    assert trainer.current_epoch <= 1
    return module


def test_a_lightning_run_interrupted_in_its_second_epoch_of_data_goes_on_with_the_same_batches(tmp_path):
    """Lightning #19764, #11029, through a real Trainer: 40 records are seen more than twice in 15 steps."""
    whole = _fit(15, 3)
    assert len(whole.seen) == 45
    assert len({name for batch in whole.seen for block in batch for name in block}) == 40
    path = tmp_path / "stopped.ckpt"
    before = _fit(15, 3, callbacks=[_StopAfter(7, path)])
    assert len(before.seen) == 21
    after = _fit(15, 3, resume=path)
    assert before.seen + after.seen == whole.seen


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "world_size"), [(1, 4, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
)
def test_a_step_has_the_same_blocks_however_it_is_divided(batch_size, accumulate, world_size):
    """torchtune PR#1875: batch 4 x accumulation 1 and 1 x 4, or two ranks, are the same optimizer step."""
    blocks = _blocks()
    reference = TrainLoader(blocks, batch_size=4, accumulate=1, steps=6)
    loaders = [
        TrainLoader(
            blocks, batch_size=batch_size, accumulate=accumulate, steps=6, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    for step, whole in enumerate(reference):
        parts = [loader.batch(step * accumulate + a) for a in range(accumulate) for loader in loaders]
        assert [block for part in parts for block in part["record_ids"]] == whole["record_ids"]
        assert {part["window_tokens"] for part in parts} == {whole["window_tokens"]}
        assert whole["window_tokens"] == int((whole["labels"][:, 1:] != IGNORE).sum())


def _gradient(model, batches, window_tokens) -> torch.Tensor:
    model.zero_grad()
    for batch in batches:
        logits = model(**model_inputs(batch)).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(
            logits, batch["labels"][:, 1:].flatten(), ignore_index=IGNORE, reduction="sum"
        )
        (loss / window_tokens).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_four_by_one_and_one_by_four_give_the_same_gradient_with_unequal_token_counts():
    """torchtune PR#1875, in float64 on a tiny Llama."""
    blocks = _blocks()
    whole = TrainLoader(blocks, batch_size=4, accumulate=1, steps=1).batch(0)
    quarters = [TrainLoader(blocks, batch_size=1, accumulate=4, steps=1).batch(i) for i in range(4)]
    counts = {int((quarter["labels"] != IGNORE).sum()) for quarter in quarters}
    assert len(counts) > 1, "the quarters must differ, or the test shows nothing"
    model = tiny_model("llama", "sdpa")
    together = _gradient(model, [whole], whole["window_tokens"])
    apart = _gradient(model, quarters, quarters[0]["window_tokens"])
    torch.testing.assert_close(apart, together, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("change", ["seed", "data", "batch_size", "accumulate", "world_size"])
def test_a_state_of_another_order_is_refused(change):
    state = TrainLoader(_blocks(), batch_size=2, accumulate=2, steps=9).state_dict()
    blocks = _blocks(seed=1) if change == "seed" else _blocks(count=119) if change == "data" else _blocks()
    layout = {"batch_size": 2, "accumulate": 2, "world_size": 1}
    if change in layout:
        layout[change] += 1
    loader = TrainLoader(blocks, steps=9, **layout)
    with pytest.raises(DataError, match=change if change in layout else "blocks"):
        loader.load_state_dict(state)


def test_heldout_batches_are_the_same_every_time_and_count_their_labels():
    blocks = _blocks()
    first = heldout_batches(blocks, eval_tokens=1500, batch_size=2)
    again = heldout_batches(blocks, eval_tokens=1500, batch_size=2)
    assert sum(len(batch["record_ids"]) for batch in first) == 1500 // 256
    assert [batch["input_ids"].tolist() for batch in first] == [
        batch["input_ids"].tolist() for batch in again
    ]
    labels = sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in first)
    assert {batch["window_tokens"] for batch in first} == {labels}


@pytest.mark.parametrize("eval_tokens", [300, 1500, 10**6])
def test_ranks_share_the_heldout_blocks_evenly(eval_tokens):
    blocks = _blocks()
    whole = heldout_batches(blocks, eval_tokens=eval_tokens, batch_size=2)
    shares = [
        heldout_batches(blocks, eval_tokens=eval_tokens, batch_size=2, rank=r, world_size=3) for r in range(3)
    ]
    assert len({len(share) for share in shares}) == 1
    names = [block for share in shares for batch in share for block in batch["record_ids"] if block]
    assert sorted(names) == sorted(block for batch in whole for block in batch["record_ids"])
    assert {b["window_tokens"] for share in shares for b in share} == {whole[0]["window_tokens"]}


def test_a_heldout_set_smaller_than_the_budget_is_used_once():
    blocks = _blocks()
    used = [
        n
        for b in heldout_batches(blocks, eval_tokens=10**6, batch_size=4)
        for block in b["record_ids"]
        for n in block
    ]
    assert sorted(used) == sorted(record.document for record in sums(120))


def _module(train, **changes) -> TextDataModule:
    settings = {
        "context_tokens": 128,
        "batch_size": 2,
        "accumulate": 1,
        "max_steps": 4,
        "eval_tokens": 256,
        "seed": 0,
    }
    corpus = Corpus(name="c", train=train, heldout=sums(5, first=500))
    return TextDataModule(corpus, tokenizer=byte_tokenizer(), **{**settings, **changes})


def test_the_corpus_is_fetched_once_and_only_when_it_is_needed():
    calls = []

    def fetch() -> Corpus:
        calls.append(1)
        return Corpus(name="c", train=sums(20), heldout=sums(5, first=500))

    data = TextDataModule(
        fetch, tokenizer=byte_tokenizer(), context_tokens=128, batch_size=2, accumulate=1, max_steps=4,
        eval_tokens=256, seed=0,
    )  # fmt: skip
    assert calls == []
    data.heldout_batches()
    data.setup("fit")
    data.facts()
    assert calls == [1]


def test_facts_count_what_is_trained_on():
    facts = _module(sums(20)).facts()
    assert (facts.train_records, facts.train_documents, facts.heldout_records) == (20, 20, 5)
    assert 0 < facts.train_label_tokens < facts.train_tokens
    assert 0 < facts.fill_share <= 1
    assert facts.eval_label_tokens <= facts.heldout_label_tokens


def test_a_part_in_which_every_record_is_too_long_is_an_error():
    long = [ask(f"d{i}", "q", "a" * 300) for i in range(3)]
    with pytest.raises(
        DataError, match=r"c, training part: all 3 records are longer than data\.context_tokens=128"
    ):
        _module(long, too_long="skip").setup()


def test_logged_batches_name_the_records_of_a_block():
    batch = _module(sums(20)).train_dataloader().batch(0)
    assert len(batch["record_ids"]) == 2
    assert all(name.startswith("sum ") for block in batch["record_ids"] for name in block)
