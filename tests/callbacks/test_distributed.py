"""Two processes with gloo, replicated (DDP) and sharded (FSDP2): same weights, same merges, the same artifact."""

import pytest
import torch
from safetensors.torch import load_file

from tests.two_ranks import on_two_ranks
from zen_train.delta import verify_artifact

pytestmark = pytest.mark.alone

RUN = """
import gc, hashlib, json, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from tests.conftest import prepare_base, BaseSection
from tests.small_run import small_run
from zen_train.callbacks.export import ExportCallback
from zen_train.config import ExportSection, MergeSection
from zen_train.delta import BaseInfo
from zen_train.shards import read_full
from zen_train.trainer import leave_process_group
import zen_train.callbacks.merge as merging

def train():
    folder, strategy_name, method, steps, resume, slow_s = sys.argv[1:7]
    folder, steps = Path(folder), int(steps)
    if float(slow_s):
        rule = merging.merge_tensor
        def slow(*args, **kwargs):
            if dist.get_rank() == 0 and args[1].ndim == 2 and not slow.slept:
                slow.slept = True
                time.sleep(float(slow_s))
            return rule(*args, **kwargs)
        slow.slept = False
        merging.merge_tensor = slow
    base = prepare_base(BaseSection(name="tiny", kind="random", licence="CC0-1.0", dtype="bfloat16"))
    export = ExportCallback(ExportSection(), folder=folder / "delta", variant="sums",
        base_info=BaseInfo.from_folder(base.folder, known=base.fingerprint),
        checkpoint_every_n_steps=100, provenance=dict)
    gloo = {"process_group_backend": "gloo", "timeout": timedelta(seconds=float(slow_s) / 2 or 600)}
    strategy = (ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **gloo)
        if strategy_name == "fsdp2" else DDPStrategy(**gloo))
    run = small_run(base, folder, max_steps=8, strategy=strategy, devices=2, accumulate=2, batch_size=1,
        merge=MergeSection(method=method, every_n_steps=2, rank=8), extra_callbacks=(export,),
        export=ExportSection(aware=strategy_name == "ddp-aware"))
    run.trainer.fit_loop.epoch_loop.max_steps = steps
    run.fit(resume=run.checkpoint if resume == "resume" else None)
    digest = hashlib.sha256()
    for name, parameter in run.module.model.named_parameters():
        digest.update(read_full(parameter).numpy().tobytes())
    merges = [[e.step, e.accepted, e.relative_change] for e in run.merge.events]
    return {"digest": digest.hexdigest(), "merges": merges,
        "scores": [p["loss"] for p in run.validation.points], "report": export.report is not None}

result = train()
leave_process_group()
left = [type(found).__name__ for found in gc.get_objects() if isinstance(found, (torch.nn.Parameter, DTensor))]
print(json.dumps(result | {"left": left, "group": dist.is_initialized()}))
"""


def fit(folder, strategy, *, method="svd_average", steps=8, resume="", slow_s=0.0):
    return on_two_ranks(RUN, str(folder), strategy, method, str(steps), resume, str(slow_s))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run under each strategy: (folder, what rank 0 and rank 1 report)."""
    folders = {strategy: tmp_path_factory.mktemp(strategy) for strategy in ("ddp", "fsdp2")}
    return {strategy: (folder, fit(folder, strategy)) for strategy, folder in folders.items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_both_ranks_hold_identical_weights_after_merges(whole, strategy):
    """peft PR#2225, pytorch #77206: an SVD differs between ranks; one owner computes, the other receives."""
    _, (first, second) = whole[strategy]
    assert first["digest"] == second["digest"]
    assert [step for step, *_ in first["merges"]] == [4, 6, 8]
    assert first["merges"] == second["merges"]
    assert first["report"]
    assert not second["report"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_nothing_of_a_run_is_left_for_a_thread_to_free_at_exit(whole, strategy):
    """pytorch #190489: gloo's thread frees a tensor while the interpreter ends, and a run that went well aborts."""
    for rank in whole[strategy][1]:
        assert not rank["left"]
        assert not rank["group"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_resumed_run_equals_an_uninterrupted_one_on_two_ranks(whole, tmp_path, strategy):
    """Lightning #21757, torchtune #1142: resume under DDP and FSDP2."""
    _, uninterrupted = whole[strategy]
    fit(tmp_path, strategy, steps=4)
    resumed = fit(tmp_path, strategy, resume="resume")
    for key in ("digest", "merges", "scores"):
        assert resumed[0][key] == uninterrupted[0][key]


def test_a_slow_merge_outlasts_a_short_process_group_timeout(tmp_path):
    """torchtune #2093, accelerate #3250: the group's own timeout is half of what one merge takes here."""
    first, second = fit(tmp_path, "ddp", steps=4, slow_s=12.0)
    assert first["digest"] == second["digest"]


def test_sharded_and_replicated_exports_are_the_same_delta(whole, tiny_base):
    """pytorch #192485: uint8 sign tensors from sharded parameters."""
    replicated, sharded = (
        load_file(whole[strategy][0] / "delta" / "delta.safetensors") for strategy in ("ddp", "fsdp2")
    )
    assert replicated.keys() == sharded.keys()
    same = [
        (tensor == sharded[name]).float().mean().item()
        for name, tensor in replicated.items()
        if tensor.dtype == torch.uint8
    ]
    # Gradients are summed in another order, so a delta next to zero may fall on the other side.
    assert sum(same) / len(same) > 0.9
    verify_artifact(whole["fsdp2"][0] / "delta", base=tiny_base.source(), tuned=None)


def test_one_bit_aware_training_holds_the_same_weights_on_both_ranks(tiny_base, tmp_path):
    one, other = fit(tmp_path, "ddp-aware", method="mean")
    assert one["digest"] == other["digest"]
    assert one["scores"] == other["scores"]
    assert len(one["merges"]) == 3
    verify_artifact(tmp_path / "delta", base=tiny_base.source(), tuned=None)
