"""Loading, replacing and unloading variants, beside running jobs; everything that is refused leaves nothing
behind.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch

from tests.serve.engine.models import (
    Gate,
    Running,
    assert_equals_dense,
    job,
    load,
    make_base,
    make_variant,
    prompt,
    run,
    unload,
)
from zen_train.delta import DeltaArtifact
from zen_train.serve.engine import checking
from zen_train.serve.engine.variant_plan import plan_variant
from zen_train.serve.errors import VariantUnusableError


def slots_are_empty(engine):
    """Nothing resident, every slot free, every scale zero."""
    scales = (bank.row_scale_VPN for bank in engine._model.banks.values())
    return (
        not engine.stats().resident
        and engine._slots.free == engine._slots.total
        and not any(bool(scale.any()) for scale in scales)
    )


def refused(engine, content_hash, folder):
    """The error that loading `folder` gives; nothing is left of it."""
    with pytest.raises(VariantUnusableError) as caught:
        asyncio.run(engine.load(content_hash, folder))
    assert slots_are_empty(engine)
    with pytest.raises(ValueError, match="is not loaded"):
        engine.submit(job("never", content_hash), print)
    return str(caught.value)


def test_loading_during_running_generations_changes_none_of_them(family, start):
    """vllm#13698: 50 generations run while variants come and go; all finish and equal a quiet run."""
    works = [
        job(
            f"job-{index}",
            family.hash("a") if index % 2 else None,
            prompt(6 + index % 9, seed=index),
            max_tokens=20,
        )
        for index in range(50)
    ]
    quiet = start()
    load(quiet, family, ["a"])
    expected = run(quiet, *works)
    engine = start()
    load(engine, family, ["a"])
    gate = Gate(engine)
    running = Running(engine).submit(*works)
    for _ in range(4):
        gate.allow(12)
        load(engine, family, ["b", "two", "mlp"])
        for name in ("b", "two", "mlp"):
            unload(engine, family.hash(name))
        assert engine.stats().running_jobs
    gate.open()
    running.wait()
    for work in works:
        assert running.tokens(work.id) == expected.tokens(work.id)
        assert running.finish(work.id) == "length"


def test_new_weights_under_the_same_folder_serve_as_in_a_fresh_engine(family, start, tmp_path):
    """vllm#42125, #30931: everything is keyed by the content hash."""
    folder = tmp_path / "variant"
    shutil.copytree(family.variants["a"], folder)
    engine = start()
    old, new = family.hash("a"), family.hash("b")
    asyncio.run(engine.load(old, folder))
    work_old, work_new = job("old", old, prompt(9)), job("new", new, prompt(9))
    before = run(engine, work_old)
    shutil.rmtree(folder)
    shutil.copytree(family.variants["b"], folder)
    asyncio.run(engine.load(new, folder))
    after = run(engine, work_new, job("again", old, prompt(9)))
    assert_equals_dense(family.dense("b"), work_new, after.events["new"])
    assert after.tokens("again") == before.tokens("old") != after.tokens("new")
    unload(engine, old)
    assert str(folder) in refused_hash(engine, old, folder)


def refused_hash(engine, content_hash, folder):
    with pytest.raises(VariantUnusableError, match="it was replaced") as caught:
        asyncio.run(engine.load(content_hash, folder))
    return str(caught.value)


def test_a_variant_of_fewer_modules_in_a_used_slot_equals_itself_alone(family, start):
    """sglang#7426: what the last variant left in modules that this one lacks must not shine through."""
    engine = start(slots=1)
    for name in ("a", "mlp", "a", "mlp", "coded", "mlp", "coded", "a"):
        load(engine, family, [name])
        work = job(name, family.hash(name), prompt(17, seed=4))
        assert_equals_dense(family.dense(name), work, run(engine, work).events[name])
        unload(engine, family.hash(name))
    assert slots_are_empty(engine)


def test_unloading_frees_the_counted_bytes_and_the_next_job_is_refused(family, start):
    """vllm#54839, sglang#36894"""
    engine = start(slots=3)
    load(engine, family, ["a", "two"])
    slot_bytes = engine.limits.slot_bytes
    sizes = {family.hash("a"): slot_bytes, family.hash("two"): 2 * slot_bytes}
    assert engine.stats().resident == sizes
    assert {engine.device_bytes(family.variants[name]) for name in ("a", "two")} == set(sizes.values())
    gate = Gate(engine)
    running = Running(engine).submit(job("long", family.hash("a"), max_tokens=100))
    gate.allow(3)
    with pytest.raises(ValueError, match="has 1 jobs"):
        unload(engine, family.hash("a"))
    engine.cancel("long")
    gate.open()
    running.wait()
    for name in ("a", "two"):
        unload(engine, family.hash(name))
        with pytest.raises(ValueError, match="is not loaded"):
            engine.submit(job("late", family.hash(name)), print)
    assert slots_are_empty(engine)
    with pytest.raises(ValueError, match="nothing to unload"):
        unload(engine, family.hash("a"))


def test_a_load_without_a_free_slot_is_refused_and_disturbs_nobody(family, start):
    engine = start(slots=2)
    load(engine, family, ["a"])
    with pytest.raises(VariantUnusableError, match="needs 2 of 2 slots and 1 are free"):
        load(engine, family, ["two"])
    work = job("w", family.hash("a"))
    assert_equals_dense(family.dense("a"), work, run(engine, work).events["w"])
    load(engine, family, ["b"])
    assert set(engine.stats().resident) == {family.hash("a"), family.hash("b")}


def test_a_second_load_of_a_resident_variant_returns_at_once(family, start):
    engine = start()
    load(engine, family, ["a", "a"])
    assert engine._slots.free == engine._slots.total - 1


def edit_config(folder, change):
    """Change the description of an artifact, in both of its copies, so that only its meaning is wrong."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    document = json.loads((folder / "delta_config.json").read_text())
    change(document)
    with safe_open(folder / "delta.safetensors", framework="pt") as stored:
        described = {
            f"{name}.{part}" for name, entry in document["tensors"].items() for part in entry.get("parts", {})
        }
        tensors = {name: stored.get_tensor(name) for name in stored.keys() if name in described}  # noqa: SIM118
    text = json.dumps(document)
    (folder / "delta_config.json").write_text(text)
    save_file(tensors, folder / "delta.safetensors", metadata={"delta_config": text})


def recorded_hash(document):
    from zen_train.delta.manifest_reader import parse_config

    document.pop("content_hash", None)
    try:
        return parse_config(document, "test").content_hash
    except ValueError:
        return "0" * 64


def test_a_delta_that_misses_a_module_or_matches_none_is_never_the_base(family, start, tmp_path):
    """text-generation-inference#2505, vllm#34186"""
    engine = start()
    name = "model.layers.1.mlp.up_proj.weight"

    def drop(document):
        document["tensors"].pop(name)
        document["content_hash"] = recorded_hash(dict(document))

    def rename(document):
        document["tensors"]["model.layers.1.mlp.gone_proj.weight"] = {
            "kind": "same",
            "shape": [44, 32],
            "dtype": "BF16",
        }
        document["content_hash"] = recorded_hash(dict(document))

    for change, message in ((drop, name), (rename, "gone_proj")):
        folder = tmp_path / change.__name__
        shutil.copytree(family.variants["mlp"], folder)
        edit_config(folder, change)
        content_hash = json.loads((folder / "delta_config.json").read_text())["content_hash"]
        assert message in refused(engine, content_hash, folder)
        with pytest.raises(VariantUnusableError, match=message):
            engine.device_bytes(folder)


def test_the_plan_itself_compares_names_in_both_directions(family, start):
    """Also where an artifact is sound and the engine knows other modules than its base had."""
    engine = start()
    artifact = DeltaArtifact.open(family.variants["a"])
    layout, root = engine._model.layout, engine._model.fingerprint.root
    name = "model.layers.1.mlp.up_proj.weight"
    fewer = replace(layout, matrices={key: place for key, place in layout.matrices.items() if key != name})
    more = replace(layout, matrices=layout.matrices | {"model.extra.weight": layout.matrices[name]})
    for changed, message in (
        (fewer, f"{name} .* matches no tensor"),
        (more, r"says nothing of model\.extra\.weight"),
    ):
        with pytest.raises(VariantUnusableError, match=message):
            plan_variant(artifact, changed, base_root=root, base_label="tiny", max_planes=2)


def test_a_delta_of_another_base_is_refused(family, start, tmp_path):
    base = make_base(tmp_path / "base", "llama-untied")
    other = make_variant(base, tmp_path / "other", seed=1)
    assert "another base" in refused(start(), DeltaArtifact.open(other).content_hash, other)


def test_forms_that_are_not_served_are_refused_by_name(family, start, tmp_path):
    engine = start(max_planes=1)
    dense = make_variant(family.base, tmp_path / "dense", seed=1, embedding="dense")
    message = refused(engine, DeltaArtifact.open(dense).content_hash, dense)
    assert "model.embed_tokens.weight" in message
    assert "embedding=sign" in message
    part = make_variant(family.base, tmp_path / "part", seed=1, low_rank=2)
    message = refused(engine, DeltaArtifact.open(part).content_hash, part)
    assert "low-rank part of rank 2" in message
    assert "low_rank=0" in message
    assert "max_planes" in refused(engine, family.hash("two"), family.variants["two"])


def test_directions_that_are_not_served_are_refused_by_name(family, start, tmp_path):
    engine = start()

    def message_of(folder, **options):
        made = make_variant(family.base, tmp_path / folder, seed=1, code="directions", **options)
        return refused(engine, DeltaArtifact.open(made).content_hash, made)

    message = message_of("two-bits", direction_bits=2.0)
    assert "a slot has room for" in message
    assert "bits_per_weight=1" in message
    message = message_of("mixed", embedding="auto", embedding_max_relative_error=0.75)
    assert "model.embed_tokens.weight is held as signs" in message
    assert "embedding=sign" in message


def test_directions_of_a_base_that_is_too_small_are_refused_by_name(start, tmp_path):
    from tests.serve.engine.models import CONFIGS, Family

    config = CONFIGS["llama-tied"]()
    config.num_key_value_heads = 1  # 8 rows: less than a direction's worth
    CONFIGS["narrow"] = lambda: config
    try:
        base = make_base(tmp_path / "base", "narrow")
    finally:
        del CONFIGS["narrow"]
    coded = make_variant(base, tmp_path / "coded", seed=1, code="directions", direction_bits=2.0)
    engine = start(Family(base, {"coded": coded}))
    message = refused(engine, DeltaArtifact.open(coded).content_hash, coded)
    assert "a slot has room for 0" in message


def test_a_grown_vocabulary_is_refused_by_name(family, start, tmp_path):
    from transformers import AutoModelForCausalLM

    from zen_train.delta import BaseInfo, FolderSource, write_artifact

    tuned = AutoModelForCausalLM.from_pretrained(family.base, dtype=torch.float32)
    tuned.resize_token_embeddings(90, mean_resizing=False)
    tuned.save_pretrained(tmp_path / "tuned")
    write_artifact(
        tmp_path / "grown",
        base=FolderSource(family.base),
        tuned=FolderSource(tmp_path / "tuned"),
        base_info=BaseInfo.from_folder(family.base, name="tiny"),
        variant="grown",
        step=1,
    )
    message = refused(start(), DeltaArtifact.open(tmp_path / "grown").content_hash, tmp_path / "grown")
    assert "model.embed_tokens.weight has 90 rows where the base has 83" in message


def damage(path, *, from_end):
    raw = bytearray(path.read_bytes())
    raw[-from_end] ^= 0x40
    path.write_bytes(raw)


@pytest.mark.parametrize("from_end", [1, 2000, 6000])
def test_a_damaged_artifact_is_refused(family, start, tmp_path, from_end):
    folder = tmp_path / "variant"
    shutil.copytree(family.variants["a"], folder)
    damage(folder / "delta.safetensors", from_end=from_end)
    assert "damaged" in refused(start(), family.hash("a"), folder)


def test_an_artifact_that_is_damaged_after_a_good_load_is_checked_again(family, start, tmp_path):
    folder = tmp_path / "variant"
    shutil.copytree(family.variants["a"], folder)
    engine = start()
    asyncio.run(engine.load(family.hash("a"), folder))
    unload(engine, family.hash("a"))
    damage(folder / "delta.safetensors", from_end=100)
    assert "damaged" in refused(engine, family.hash("a"), folder)


def test_vanished_files_fail_that_load_and_nothing_else(family, start, tmp_path):
    """vllm#11727: the files go after the variant was evicted."""
    folder = tmp_path / "variant"
    shutil.copytree(family.variants["a"], folder)
    engine = start()
    asyncio.run(engine.load(family.hash("a"), folder))
    unload(engine, family.hash("a"))
    shutil.rmtree(folder)
    assert str(folder) in refused(engine, family.hash("a"), folder)
    load(engine, family, ["b"])
    work = job("w", family.hash("b"))
    assert_equals_dense(family.dense("b"), work, run(engine, work).events["w"])


@pytest.fixture
def hashed(monkeypatch):
    """One entry for each digest that the loader takes."""
    found = []
    digest = checking.tensor_digest
    monkeypatch.setattr(checking, "tensor_digest", lambda tensor: found.append(1) or digest(tensor))
    return found


def test_a_variant_checked_ahead_is_only_copied_by_its_first_load(family, start, hashed):
    engine = start()
    engine.verify(family.variants["a"])
    checked = len(hashed)
    assert checked > 0
    assert slots_are_empty(engine)
    load(engine, family, ["a"])
    engine.verify(family.variants["a"])
    assert len(hashed) == checked
    work = job("w", family.hash("a"))
    assert_equals_dense(family.dense("a"), work, run(engine, work).events["w"])


def test_a_damaged_artifact_is_found_ahead_of_its_first_load(family, start, tmp_path):
    folder = tmp_path / "variant"
    shutil.copytree(family.variants["a"], folder)
    damage(folder / "delta.safetensors", from_end=2000)
    engine = start()
    with pytest.raises(VariantUnusableError, match="damaged"):
        engine.verify(folder)
    assert "damaged" in refused(engine, family.hash("a"), folder)


def test_a_reload_reads_no_digest_again(family, start, hashed):
    engine = start()
    for _ in range(3):
        load(engine, family, ["a"])
        unload(engine, family.hash("a"))
    parts = sum(
        len(entry.parts) for entry in DeltaArtifact.open(family.variants["a"]).config.tensors.values()
    )
    assert len(hashed) == parts


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_abandoned_load_leaves_no_variant_behind(family, start, monkeypatch, when):
    """The caller goes while the files are read, or when they were read already."""
    engine = start()
    begun, may_go_on = threading.Event(), threading.Event()
    read = engine._loader.load

    def slow(content_hash, folder):
        place = read(content_hash, folder) if when == "after" else None
        begun.set()
        assert may_go_on.wait(30)
        return place or read(content_hash, folder)

    monkeypatch.setattr(engine._loader, "load", slow)

    async def abandon():
        task = asyncio.create_task(engine.load(family.hash("a"), family.variants["a"]))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()

    asyncio.run(abandon())
    engine._load_threads.shutdown(wait=True)
    assert slots_are_empty(engine)


def test_a_load_abandoned_when_it_was_over_already_leaves_no_variant_behind(family, start):
    """The thread is done, and the caller is cancelled before the event loop tells it so."""
    engine = start()

    async def abandon():
        task = asyncio.create_task(engine.load(family.hash("a"), family.variants["a"]))
        await asyncio.sleep(0)
        while not engine.stats().resident:  # holds the event loop on purpose
            threading.Event().wait(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(abandon())
    engine._load_threads.shutdown(wait=True)
    assert slots_are_empty(engine)


def test_variants_load_side_by_side(family, start, monkeypatch):
    """ray-project/ray#65346: the second load begins while the first still reads."""
    engine = start()
    together = threading.Barrier(3, timeout=30)
    read = engine._loader.load
    monkeypatch.setattr(
        engine._loader,
        "load",
        lambda content_hash, folder: (together.wait() and None) or read(content_hash, folder),
    )

    async def three():
        await asyncio.gather(*(engine.load(family.hash(n), family.variants[n]) for n in ("a", "b", "mlp")))

    asyncio.run(three())
    assert len(engine.stats().resident) == 3
