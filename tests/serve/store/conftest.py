"""Real artifacts of a tiny base, made once, and roots to copy them to."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.delta.models import make_pair
from zen_train.delta import (
    BaseInfo,
    DeltaArtifact,
    Fingerprint,
    FolderSource,
    StateDictSource,
    write_artifact,
)


@dataclass(frozen=True)
class Made:
    """Artifacts by label. "coder-again" is variant coder with other weights; "foreign" has another base."""

    folder: Path
    base: Fingerprint

    def put(self, label: str, target: Path) -> Path:
        """Copy an artifact to a new folder, replacing what is there in one step, as an export does."""
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.parent / f".{target.name}.partial"
        shutil.copytree(self.folder / label, temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        return target

    def hash(self, label: str) -> str:
        return DeltaArtifact.open(self.folder / label).content_hash


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    pair = make_pair(folder / "pair")
    source = FolderSource(pair.base)
    info = BaseInfo.from_folder(pair.base, name="tiny-base", licence="CC0-1.0")

    def export(label, variant, seed, *, step=0.01, base=source, info=info):
        generator = torch.Generator().manual_seed(seed)
        tuned = {
            name: base.get(name).float() + step * torch.randn(base.get(name).shape, generator=generator)
            for name in base.names()
        }
        write_artifact(
            folder / label,
            base=base,
            tuned=StateDictSource(tuned),
            base_info=info,
            variant=variant,
            step=seed,
        )

    export("coder", "coder", 1)
    export("coder-again", "coder", 2)
    export("math", "math", 3)
    export("prefixed", "zen4-writer", 4)
    export("odd", "my model", 5)
    export("unchanged", "lazy", 6, step=0.0)
    other = make_pair(folder / "other", seed=9)
    export(
        "foreign",
        "foreign",
        7,
        base=FolderSource(other.base),
        info=BaseInfo.from_folder(other.base, name="other-base"),
    )
    return Made(folder, info.fingerprint)


@pytest.fixture
def root(tmp_path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder
