"""Merging and saving need a few tensors of memory, not another model (Lightning #21823)."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

MEASURE = """
import threading, sys
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from tests.small_run import small_run
from zen_train.base import prepare_base, save_plain
from zen_train.callbacks.snapshot import Snapshot
from zen_train.config import BaseSection, MergeSection
from zen_train.module import trained_parameters
from zen_train.tiny import tiny_tokenizer

folder = Path(sys.argv[1])
tokenizer = tiny_tokenizer()
config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=256, intermediate_size=1024, num_hidden_layers=40,
    num_attention_heads=4, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
model = LlamaForCausalLM(config)
save_plain(model, tokenizer, folder / "base")
model_bytes = sum(4 * p.numel() for p in model.parameters())
del model
base = prepare_base(BaseSection(name="hf", kind="hf", path=str(folder / "base")))
run = small_run(base, folder, max_steps=1, merge=MergeSection(method="svd_average", rank=8, every_n_steps=1),
    validate_every_n_steps=1, save_every_n_steps=100).fit()
partner = run.validation.best.snapshot(run.module)

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

def peak(work):
    before, most, done = anonymous(), [0], threading.Event()
    def watch():
        while not done.wait(0.002):
            most[0] = max(most[0], anonymous() - before)
    watcher = threading.Thread(target=watch); watcher.start()
    work()
    done.set(); watcher.join()
    return most[0]

def merge():
    with partner.reader() as read:
        run.merge._merge_weights(run.module, read)

merge()  # allocators and thread pools warm up once
print(model_bytes, peak(merge), peak(lambda: run.trainer.save_checkpoint(run.checkpoint)),
    peak(lambda: Snapshot.save(folder / "again.safetensors", trained_parameters(run.module), rank=0)))
"""


def test_merging_and_saving_stay_far_below_the_size_of_the_model(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    model, merge, save, snapshot = map(int, done.stdout.split()[-4:])
    assert model > 100_000_000
    assert merge < 0.4 * model, f"merging took {merge / 1e6:.0f} MB"
    assert save < 0.4 * model, f"saving took {save / 1e6:.0f} MB"
    assert snapshot < 0.2 * model, f"a snapshot took {snapshot / 1e6:.0f} MB"
