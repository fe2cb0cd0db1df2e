"""The files that travel with a delta: tokenizer, chat template, generation settings. Checked before they
are copied.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from zen_train.delta.card import CARD_NAME
from zen_train.delta.shard_reader import PICKLE_SUFFIXES
from zen_train.errors import DeltaError

SIDECARS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "vocab.json",
            "merges.txt", "tokenizer.model", "generation_config.json", "added_tokens.json")  # fmt: skip


def sidecars_in(folder: str | Path) -> list[Path]:
    """The files of a model folder that travel with a delta."""
    return [path for name in SIDECARS if (path := Path(folder) / name).is_file()]


def check_sidecars(sidecars: Iterable[str | Path]) -> list[Path]:
    """The files as paths; refused when one is missing, may be a pickle, or has a name that is taken."""
    copies = [Path(path) for path in sidecars]
    for path in copies:
        if not path.is_file():
            raise DeltaError(
                f"sidecar {path} is not a file; give tokenizer and chat-template files that exist"
            )
        if path.suffix in PICKLE_SUFFIXES:
            raise DeltaError(f"sidecar {path} may be a pickle; an artifact holds none")
        if path.name == CARD_NAME or path.name.startswith(("delta", ".")):
            raise DeltaError(
                f"sidecar {path}: the name {path.name} is taken by the artifact itself or hidden; rename it"
            )
    names = [path.name for path in copies]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DeltaError(f"sidecar {twice[0]} is given twice; an artifact is one flat folder")
    return copies


def file_digest(path: Path) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
