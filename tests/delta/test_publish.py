"""Folders appear whole or not at all: overwriting, readers with old maps, full disks, failures half-way."""

import errno
import os
import subprocess
import sys
import threading

import pytest
import torch

from tests.delta.models import export, make_pair
from zen_train.delta import (
    DeltaArtifact,
    FolderSource,
    apply_delta,
    iter_applied,
    new_folder,
    replace_file,
    verify_artifact,
)
from zen_train.delta import publish as publish_module
from zen_train.errors import DeltaError, OutputError


def test_existing_folder_is_kept_unless_overwriting_is_asked_for(tmp_path):
    pair = make_pair(tmp_path)
    first = export(pair, tmp_path / "delta").content_hash
    with pytest.raises(
        OutputError, match="delta exists; choose another folder or ask for it to be overwritten"
    ):
        export(pair, tmp_path / "delta", scale="matrix")
    assert DeltaArtifact.open(tmp_path / "delta").content_hash == first
    second = export(pair, tmp_path / "delta", scale="matrix", overwrite=True).content_hash
    assert DeltaArtifact.open(tmp_path / "delta").content_hash == second != first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "delta", "tuned"]


def test_reader_of_a_replaced_artifact_is_unharmed(tmp_path):
    """A server has the old folder mapped while a new export is published over it."""
    pair = make_pair(tmp_path)
    export(pair, tmp_path / "delta", max_shard_bytes=2000)
    reader = DeltaArtifact.open(tmp_path / "delta")
    before = {name: tensor.clone() for name, tensor in iter_applied(reader, FolderSource(pair.base))}
    export(make_pair(tmp_path / "new", seed=4), tmp_path / "delta", overwrite=True)
    after = dict(iter_applied(reader, FolderSource(pair.base)))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert DeltaArtifact.open(tmp_path / "delta").content_hash != reader.content_hash


def test_readers_see_one_export_or_the_other_while_it_is_replaced(tmp_path):
    pair = make_pair(tmp_path)
    hashes = {
        export(pair, tmp_path / "delta", scale=scale, overwrite=True).content_hash
        for scale in ("row", "matrix")
    }
    stop, failures, seen = threading.Event(), [], set()

    def read():
        while not stop.is_set():
            try:
                seen.add(DeltaArtifact.open(tmp_path / "delta").content_hash)
            except DeltaError as error:
                failures.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(20):
        export(pair, tmp_path / "delta", scale=("row", "matrix")[number % 2], overwrite=True)
    stop.set()
    thread.join()
    assert failures == []
    assert seen <= hashes


def test_failure_half_way_leaves_the_old_artifact(tmp_path):
    pair = make_pair(tmp_path)
    before = export(pair, tmp_path / "delta").content_hash

    def stop(row):
        if row.name.endswith("norm.weight"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(pair, tmp_path / "delta", overwrite=True, on_tensor=stop, scale="matrix")
    assert verify_artifact(tmp_path / "delta").content_hash == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "delta", "tuned"]


def test_file_systems_without_exchange_still_publish(tmp_path, monkeypatch):
    monkeypatch.setattr(publish_module, "_exchange", lambda a, b: False)
    for content in ("one", "two"):
        with new_folder(tmp_path / "out", overwrite=True, needed_bytes=0) as folder:
            (folder / "file").write_text(content)
    assert (tmp_path / "out" / "file").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_target_that_is_a_file_or_a_link_is_refused(tmp_path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "dangling"):
        with (
            pytest.raises(OutputError, match="not a plain folder"),
            new_folder(tmp_path / name, overwrite=True, needed_bytes=0),
        ):
            pass
        with (
            pytest.raises(OutputError, match="exists"),
            new_folder(tmp_path / name, overwrite=False, needed_bytes=0),
        ):
            pass
    assert (tmp_path / "file").read_text() == "precious"


def test_permissions_follow_the_umask(tmp_path):
    previous = os.umask(0o027)
    try:
        with new_folder(tmp_path / "out", overwrite=False, needed_bytes=0) as folder:
            (folder / "file").write_text("x")
        replace_file(tmp_path / "single", b"x")
    finally:
        os.umask(previous)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "single").stat().st_mode & 0o777 == 0o640


def test_parent_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(OutputError, match="was not written: File exists"),
        new_folder(tmp_path / "file" / "out", overwrite=False, needed_bytes=0),
    ):
        pass


FULL_DISK = """
import resource, sys
from pathlib import Path
from zen_train.delta import BaseInfo, DeltaArtifact, FolderSource, apply_delta, write_artifact
from zen_train.errors import OutputError

folder = Path(sys.argv[1])
base, tuned = FolderSource(folder / "base"), FolderSource(folder / "tuned")
info = BaseInfo.from_folder(folder / "base")
resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))  # a write past this fails as on a full disk
for work in (
    lambda: write_artifact(
        folder / "delta", base=base, tuned=tuned, base_info=info, variant="v", step=2, overwrite=True
    ),
    lambda: apply_delta(DeltaArtifact.open(folder / "delta"), folder / "base", folder / "out"),
):
    try:
        work()
    except OutputError as error:
        print(error)
"""


def test_full_disk_leaves_nothing_behind_and_says_how_much_is_needed(tmp_path):
    """Export over an older artifact, then apply: both fail for want of space, and the older artifact
    stays.
    """
    pair = make_pair(tmp_path)
    before = export(pair, tmp_path / "delta").content_hash
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    for target, line in zip(("delta", "out"), done.stdout.splitlines(), strict=True):
        assert f"{tmp_path / target} was not written: no space" in line
        assert "bytes are needed and" in line
    assert verify_artifact(tmp_path / "delta").content_hash == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "delta", "tuned"]


def test_failed_replacement_of_a_file_keeps_the_old_one(tmp_path, monkeypatch):
    replace_file(tmp_path / "card.md", b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="no space"):
        replace_file(tmp_path / "card.md", b"new")
    assert (tmp_path / "card.md").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["card.md"]


def test_applied_folder_is_replaced_as_a_whole(tmp_path):
    pair = make_pair(tmp_path)
    export(pair, tmp_path / "delta")
    artifact = DeltaArtifact.open(tmp_path / "delta")
    apply_delta(artifact, pair.base, tmp_path / "out")
    (tmp_path / "out" / "stale.txt").write_text("x")
    with pytest.raises(OutputError, match="exists"):
        apply_delta(artifact, pair.base, tmp_path / "out")
    apply_delta(artifact, pair.base, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "stale.txt").exists()
