"""Export, verify and apply stream: memory stays near the largest tensor, however large the model is."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

from zen_train.delta.shard_writer import ShardWriter

LARGEST_BYTES = 32 << 20
TENSORS = 14

MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from zen_train.delta import *

def anonymous_bytes():
    # Mapped file pages are not counted: the system takes them back when it needs memory.
    line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def growth(work):
    before = peak = anonymous_bytes()
    stop = threading.Event()
    def watch():
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, anonymous_bytes())
            time.sleep(0.001)
    thread = threading.Thread(target=watch)
    thread.start()
    work()
    stop.set()
    thread.join()
    return peak - before

folder = Path(sys.argv[1])
base, tuned = FolderSource(folder / "base"), FolderSource(folder / "tuned")
info = BaseInfo(name="b", fingerprint=fingerprint(base), vocab_size=4096, dtype="BF16", tied=False)
def write():
    write_artifact(folder / "delta", base=base, tuned=tuned, base_info=info, variant="v", step=1)
def verify():
    verify_artifact(folder / "delta", base=base, tuned=tuned)
def apply():
    apply_delta(DeltaArtifact.open(folder / "delta"), folder / "base", folder / "out", dtype=sys.argv[2])
def stream():
    for name, tensor in iter_applied(DeltaArtifact.open(folder / "delta"), base):
        del tensor
for work in (write, verify, stream, apply):
    print(work.__name__, growth(work))
"""


@pytest.fixture(scope="module")
def large_models(tmp_path_factory):
    """A base and a fine-tune of 14 tensors of 32 MiB each (470 MB), in several shards."""
    folder = tmp_path_factory.mktemp("large")
    rows = 4096 + TENSORS  # tensors are windows of one buffer: different values, made once
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, 4096, generator=generator).mul_(0.05).bfloat16()
    noise = torch.randn(rows, 4096, generator=generator).mul_(0.01).bfloat16()
    sparse = noise * (
        noise > 0.03
    )  # few changes: beyond the error bound of an embedding, so it is stored whole
    for name in ("base", "tuned"):
        tuned = name == "tuned"
        matrices, embedding = (values + noise, values + sparse) if tuned else (values, values)
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(
            json.dumps({"vocab_size": 4096, "tie_word_embeddings": False})
        )
        with ShardWriter(
            folder / name, "model", header_room_bytes=9000, max_shard_bytes=4 * LARGEST_BYTES
        ) as writer:
            for index in range(TENSORS - 1):
                writer.add(f"layers.{index}.weight", matrices[index : index + 4096])
            writer.add("model.embed_tokens.weight", embedding[:4096])
            writer.finish({})
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_near_the_largest_tensor(large_models):
    """mergekit #107, #549: offline export; Lightning #21823: peak memory while saving."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE), str(large_models), "bfloat16"],
        capture_output=True,
        text=True,
        check=True,
    )
    growth = {line.split()[0]: int(line.split()[1]) / LARGEST_BYTES for line in done.stdout.splitlines()}
    print({name: round(value, 2) for name, value in growth.items()}, "times the largest tensor")
    assert growth["write"] < 3
    assert growth["verify"] < 2
    assert growth["stream"] < 3  # a float32 tensor is twice the bfloat16 one
    assert growth["apply"] < 5  # that, its rounded form, and the one being written
    assert 2 * max(growth.values()) < TENSORS, "the model is too small to tell streaming from loading"
