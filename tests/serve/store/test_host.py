"""The host tier: an artifact's bytes in memory, read once, counted, and given back."""

import os
import shutil
import threading
from contextlib import ExitStack

import pytest

from zen_train.delta.fingerprint import raw_bytes
from zen_train.serve.errors import VariantUnusableError
from zen_train.serve.store import HostTier, open_delta


@pytest.fixture
def placed(made, root):
    """label -> (content hash, folder) of artifacts of one size."""
    return {
        label: (made.hash(label), made.put(label, root / label)) for label in ("coder", "coder-again", "math")
    }


@pytest.fixture
def tier():
    """Makes tiers, checked after the test."""
    made_tiers = []

    def make(budget_bytes, **options):
        made_tiers.append(HostTier(budget_bytes=budget_bytes, **options))
        return made_tiers[-1]

    yield make
    for tier in made_tiers:
        tier.check()


def size(folder):
    return (folder / "delta.safetensors").stat().st_size


def test_the_bytes_are_those_of_the_artifact(tier, placed):
    content_hash, folder = placed["coder"]
    artifact = open_delta(folder)
    with tier(10 * size(folder)).lease(content_hash, folder) as held:
        assert held.config == artifact.config
        expected = {
            f"{name}.{suffix}": bytes(raw_bytes(artifact.part(name, suffix)))
            for name, entry in artifact.config.tensors.items()
            for suffix in entry.parts
        }
        assert {name: bytes(part) for name, part in held.parts.items()} == expected


def test_a_second_lease_reads_nothing(tier, placed):
    content_hash, folder = placed["coder"]
    host = tier(10 * size(folder))
    with host.lease(content_hash, folder):
        pass
    shutil.rmtree(folder)
    with host.lease(content_hash, folder) as held:
        assert held.size_bytes == host.stats().read_bytes
    assert (host.stats().hits, host.stats().lookups) == (1, 2)
    assert dict(host.stats().resident) == {content_hash: held.size_bytes}


def test_memory_comes_from_the_allocator_and_is_dropped_with_the_entry(tier, placed):
    taken = []

    def allocate(size_bytes):
        taken.append(size_bytes)
        return memoryview(bytearray(size_bytes))

    (first, folder), (second, other) = placed["coder"], placed["math"]
    host = tier(max(size(folder), size(other)), allocate=allocate)
    for content_hash, place in ((first, folder), (second, other), (first, folder)):
        with host.lease(content_hash, place) as held:
            assert dict(host.stats().resident) == {content_hash: held.size_bytes}
    assert taken == [size(folder), size(other), size(folder)]


def test_what_is_leased_is_not_evicted(tier, placed):
    (first, folder), (second, other) = placed["coder"], placed["math"]
    host = tier(max(size(folder), size(other)))
    with host.lease(first, folder) as held:
        with host.lease(second, other) as direct:
            assert direct is None
        assert len(bytes(next(iter(held.parts.values())))) > 0
    with host.lease(second, other) as held:
        assert held is not None


@pytest.mark.parametrize("budget_bytes", [0, 100])
def test_without_room_the_files_are_read_by_the_caller(tier, placed, budget_bytes):
    content_hash, folder = placed["coder"]
    host = tier(budget_bytes)
    with host.lease(content_hash, folder) as held:
        assert held is None
    assert host.stats().read_bytes == 0


def test_several_threads_read_one_artifact_once(tier, placed):
    """vllm#15733, ai-dynamo/dynamo#5184"""
    content_hash, folder = placed["coder"]
    host = tier(10 * size(folder))
    barrier, seen = threading.Barrier(8), []

    def use():
        barrier.wait()
        with host.lease(content_hash, folder) as held:
            seen.append(held.size_bytes)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [size(folder)] * 8
    assert host.stats().read_bytes == size(folder)


def test_a_failure_leaves_nothing_and_the_next_tries_again(tier, placed, made):
    """vllm#11727"""
    content_hash, folder = placed["coder"]
    host = tier(10 * size(folder))
    shutil.rmtree(folder)
    with pytest.raises(VariantUnusableError, match="No such file"), host.lease(content_hash, folder):
        pass
    made.put("math", folder)
    with pytest.raises(VariantUnusableError, match="was replaced"), host.lease(content_hash, folder):
        pass
    assert dict(host.stats().resident) == {}
    made.put("coder", folder)
    with host.lease(content_hash, folder) as held:
        assert held is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder, made: os.truncate(folder / "delta.safetensors", 100), "was cut to 100 bytes"),
        (lambda folder, made: made.put("coder", folder), "changed while it was read"),
        (lambda folder, made: shutil.rmtree(folder), "No such file"),
    ],
    ids=["cut", "replaced", "gone"],
)
def test_files_that_change_while_they_are_read_are_refused(tier, placed, made, change, message):
    """vllm#11727: an error of that request, where a mapped file would kill the process."""
    content_hash, folder = placed["coder"]

    def allocate(size_bytes):
        change(folder, made)
        return memoryview(bytearray(size_bytes))

    host = tier(10 * size(folder), allocate=allocate)
    with pytest.raises(VariantUnusableError, match=message), host.lease(content_hash, folder):
        pass
    assert dict(host.stats().resident) == {}


def damage(folder):
    """Flip a bit of the last tensor; the time of the file's last change says so."""
    path = folder / "delta.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(1, 10**18 + len(raw)))


def test_a_digest_that_does_not_match_is_refused_by_name(tier, placed):
    content_hash, folder = placed["coder"]
    damage(folder)
    host = tier(10 * size(folder))
    with (
        pytest.raises(VariantUnusableError, match=r"has digest .*, expected"),
        host.lease(content_hash, folder),
    ):
        pass
    assert dict(host.stats().resident) == {}


def test_digests_are_compared_again_when_a_file_was_touched_and_only_then(tier, placed):
    content_hash, folder = placed["coder"]
    host = tier(size(folder))
    path = folder / "delta.safetensors"
    with host.lease(content_hash, folder):
        pass
    before = path.stat()
    damage(folder)
    touched = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    evict(host, placed)
    with host.lease(content_hash, folder) as held:
        assert held is not None, "the same inode, size and time: taken for the verified file"
    evict(host, placed)
    os.utime(path, ns=(touched.st_atime_ns, touched.st_mtime_ns))
    with pytest.raises(VariantUnusableError, match="digest"), host.lease(content_hash, folder):
        pass


def evict(host, placed):
    other, place = placed["coder-again"]
    with host.lease(other, place) as held:
        assert held is not None


def test_a_removed_artifact_gives_its_memory_back_after_its_last_lease(tier, placed):
    content_hash, folder = placed["coder"]
    host = tier(10 * size(folder))
    with ExitStack() as leases:
        leases.enter_context(host.lease(content_hash, folder))
        host.remove(content_hash)
        assert content_hash in host.stats().resident
    assert dict(host.stats().resident) == {}
    host.remove(content_hash)
