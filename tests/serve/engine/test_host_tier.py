"""Variants that wait in host memory: loaded again without their files, checked once, given back."""

from __future__ import annotations

import asyncio
import os
import shutil
import time

import pytest
import torch

from tests.serve.engine.models import assert_equals_dense, job, load, prompt, run, unload
from tests.serve.engine.test_variants import damage, hashed, refused, slots_are_empty
from zen_train.delta import DeltaArtifact
from zen_train.errors import BaseModelError
from zen_train.serve.engine import host_memory
from zen_train.serve.engine.host_memory import make_host_tier, memory_bytes, pinned_memory
from zen_train.serve.engine.tensor_files import FileReader
from zen_train.serve.errors import VariantUnusableError

__all__ = ["hashed"]  # a fixture

PLENTY = 1 << 20
NAMES = ("a", "b", "two", "mlp", "coded")


@pytest.fixture
def reads(monkeypatch):
    """One entry for each read of a file."""
    found, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *call: found.append(call) or preadv(*call))
    return found


@pytest.fixture
def copied(family, tmp_path):
    """The folder of a copy of variant `a`."""
    return shutil.copytree(family.variants["a"], tmp_path / "variant")


def held(engine):
    return set(engine.stats().host.resident)


def forget(engine, content_hash):
    """And wait until it is done."""
    engine.forget(content_hash)
    deadline_s = time.monotonic() + 30
    while content_hash in held(engine):
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def parts_of(folder):
    return sum(len(entry.parts) for entry in DeltaArtifact.open(folder).config.tensors.values())


def serves(engine, family, name):
    work = job(f"{name}-{engine.stats().steps}", family.hash(name), prompt(9, seed=3))
    assert_equals_dense(family.dense(name), work, run(engine, work).events[work.id])


def test_an_evicted_variant_comes_back_without_its_files(family, start, reads):
    engine = start(slots=2, host_bytes=PLENTY)
    for name in NAMES:
        load(engine, family, [name])
        serves(engine, family, name)
        unload(engine, family.hash(name))
    assert held(engine) == {family.hash(name) for name in NAMES}
    assert slots_are_empty(engine)
    reads.clear()
    for name in NAMES:
        load(engine, family, [name])
        serves(engine, family, name)
        unload(engine, family.hash(name))
    assert reads == []
    host = engine.stats().host
    assert (host.hits, host.lookups) == (len(NAMES), 2 * len(NAMES))
    assert sum(host.resident.values()) <= host.budget_bytes == PLENTY


def test_host_memory_is_bounded_and_what_does_not_fit_is_read_from_its_files(family, start, reads):
    measured = start(host_bytes=PLENTY)
    load(measured, family, ["a"])
    budget_bytes = measured.stats().host.resident[family.hash("a")]
    engine = start(slots=2, host_bytes=budget_bytes)
    for name in ("a", "two", "a"):  # two planes take more than the budget
        load(engine, family, [name])
        serves(engine, family, name)
        unload(engine, family.hash(name))
        assert held(engine) == {family.hash("a")}
    assert engine.stats().host.hits == 1


def test_what_is_checked_ahead_or_by_a_load_is_checked_once(family, start, hashed):
    """Ahead, to host memory, from it, and past it when there is no room."""
    engine = start(slots=2, host_bytes=PLENTY)
    engine.verify(family.variants["a"])
    for _ in range(2):
        load(engine, family, ["a"])
        unload(engine, family.hash("a"))
    assert len(hashed) == parts_of(family.variants["a"])
    load(engine, family, ["b"])
    unload(engine, family.hash("b"))
    engine._loader._host.remove(family.hash("b"))
    load(engine, family, ["b"])
    engine.verify(family.variants["b"])
    assert len(hashed) == parts_of(family.variants["a"]) + parts_of(family.variants["b"])


@pytest.mark.parametrize("host_bytes", [0, PLENTY])
def test_more_variants_than_plans_are_kept_are_still_checked_once(
    family, start, hashed, monkeypatch, host_bytes
):
    monkeypatch.setattr("zen_train.serve.engine.known_variants._MOST_KNOWN", 1)
    engine = start(host_bytes=host_bytes)
    for name in ("a", "b", "a", "b"):
        engine.verify(family.variants[name])
        load(engine, family, [name])
        unload(engine, family.hash(name))
    assert len(hashed) == parts_of(family.variants["a"]) + parts_of(family.variants["b"])


def test_a_damaged_artifact_is_refused_and_not_held(family, start, copied):
    damage(copied / "delta.safetensors", from_end=2000)
    engine = start(host_bytes=PLENTY)
    assert "damaged" in refused(engine, family.hash("a"), copied)
    assert held(engine) == set()
    load(engine, family, ["a"])
    serves(engine, family, "a")


def test_what_is_held_is_right_whatever_became_of_the_file_until_it_is_forgotten(family, start, copied):
    engine, content_hash = start(host_bytes=PLENTY), family.hash("a")
    asyncio.run(engine.load(content_hash, copied))
    unload(engine, content_hash)
    damage(copied / "delta.safetensors", from_end=100)
    with pytest.raises(VariantUnusableError, match="damaged"):
        engine.verify(copied)
    asyncio.run(engine.load(content_hash, copied))
    serves(engine, family, "a")
    unload(engine, content_hash)
    forget(engine, content_hash)
    assert held(engine) == set()
    assert "damaged" in refused(engine, content_hash, copied)


def test_a_variant_whose_files_are_gone_is_not_loaded_from_memory(family, start, copied):
    """The folder is the catalogue's word; without it there is no such variant."""
    engine = start(host_bytes=PLENTY)
    asyncio.run(engine.load(family.hash("a"), copied))
    unload(engine, family.hash("a"))
    shutil.rmtree(copied)
    assert str(copied) in refused(engine, family.hash("a"), copied)


@pytest.mark.parametrize("host_bytes", [0, PLENTY])
def test_a_file_that_is_written_to_while_it_is_read_is_refused(
    family, start, copied, monkeypatch, host_bytes
):
    engine, read = start(host_bytes=host_bytes), FileReader.read
    engine.verify(copied)  # or the digest would find it

    def overtaken(reader, wanted):
        read(reader, wanted)
        damage(copied / "delta.safetensors", from_end=100)

    with monkeypatch.context() as patch:
        patch.setattr(FileReader, "read", overtaken)
        assert "changed while it was read" in refused(engine, family.hash("a"), copied)
    assert engine.stats().host is None or held(engine) == set()


def test_a_forgotten_variant_gives_its_memory_back_and_is_checked_again(family, start, hashed):
    engine = start(host_bytes=PLENTY)
    for _ in range(2):
        load(engine, family, ["a", "b"])
        for name in ("a", "b"):
            unload(engine, family.hash(name))
        forget(engine, family.hash("a"))
        assert held(engine) == {family.hash("b")}
    assert len(hashed) == 2 * parts_of(family.variants["a"]) + parts_of(family.variants["b"])
    engine.forget("unknown")
    engine.stop()
    engine.forget(family.hash("b"))
    start(host_bytes=0).forget(family.hash("a"))


def test_the_budget_is_none_on_a_cpu_and_a_quarter_of_the_memory_for_a_gpu(family, start, monkeypatch):
    assert start().stats().host is None
    assert start(host_bytes=0).stats().host is None
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert make_host_tier(None, cpu) is None
    assert make_host_tier(None, gpu).stats().budget_bytes == memory_bytes() // 4
    assert make_host_tier(12345, gpu).stats().budget_bytes == 12345
    with pytest.raises(BaseModelError, match=rf"host_bytes={1 << 60} .* allowed: 0 to {memory_bytes()}"):
        start(host_bytes=1 << 60)


@pytest.mark.parametrize(("written", "limit"), [("4096\n", 4096), ("max\n", None), (None, None)])
def test_a_container_has_the_memory_that_it_is_allowed(tmp_path, monkeypatch, written, limit):
    path = tmp_path / "memory.max"
    if written is not None:
        path.write_text(written)
    monkeypatch.setattr(host_memory, "_CGROUP_LIMIT", path)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_bytes() == (limit or machine)


class Runtime:
    """CUDA's two calls."""

    def __init__(self, error=0):
        self.error, self.registered = error, {}

    def cudaHostRegister(self, address, size_bytes, flags):
        self.registered[address] = (size_bytes, flags)
        return self.error

    def cudaHostUnregister(self, address):
        del self.registered[address]


def test_pinned_memory_is_registered_as_long_as_somebody_has_it(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = pinned_memory(1000)
    assert list(runtime.registered.values()) == [(1000, 1)]
    part = memory[10:20]
    del memory
    part[:] = b"0123456789"
    assert runtime.registered
    tensor = torch.frombuffer(part, dtype=torch.uint8)
    del part
    assert runtime.registered
    del tensor
    assert runtime.registered == {}


def test_memory_that_cannot_be_pinned_is_a_memory_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(error=2))
    with pytest.raises(MemoryError, match=r"1000 bytes could not be pinned \(CUDA error 2\)"):
        pinned_memory(1000)
