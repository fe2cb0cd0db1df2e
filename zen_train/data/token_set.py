"""Tokenised examples as four flat arrays, and their cache on disk.

A `TokenisedSet` holds N examples of ragged length without one Python object each; it is written as
safetensors under a key of everything it depends on, and mapped back into memory. It knows no text and no
order.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import PreTrainedTokenizerBase

from zen_train.cache import cache_dir, file_lock
from zen_train.data.records import Record
from zen_train.data.tokenise import FALLBACK_TEMPLATE, IGNORE, Counts, Example, TooLong, tokenise_all
from zen_train.errors import DataError

_LAYOUT = 1  # raise when tokenise.py or this layout changes what comes out


@dataclass(frozen=True)
class TokenisedSet:
    """N examples: `ids` int32 and `loss` bool, both `[tokens]`; `starts` int64 `[N + 1]`; names likewise.

    `set[i]` is `(input_ids, labels)` of example i, both `[T]`, label -100 where there is no loss.
    """

    ids: np.ndarray
    loss: np.ndarray
    starts: np.ndarray
    names: np.ndarray
    name_starts: np.ndarray
    counts: Counts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        a, b = self.starts[index], self.starts[index + 1]
        ids = self.ids[a:b]
        return ids, np.where(self.loss[a:b], ids, IGNORE)

    def name(self, index: int) -> str:
        """The name of the record that example `index` comes from."""
        return bytes(self.names[self.name_starts[index] : self.name_starts[index + 1]]).decode()

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, `[N]`."""
        return np.diff(self.starts)

    @classmethod
    def from_examples(cls, examples: Iterable[Example], counts: Counts) -> TokenisedSet:
        """Copy examples into flat arrays."""
        rows = list(examples)
        names = [row.name.encode() for row in rows]
        labels = np.concatenate([row.labels for row in rows]) if rows else np.zeros(0, np.int32)
        return cls(
            ids=np.concatenate([row.input_ids for row in rows]) if rows else np.zeros(0, np.int32),
            loss=labels != IGNORE,
            starts=np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64),
            names=np.frombuffer(b"".join(names), dtype=np.uint8),
            name_starts=np.cumsum([0, *(len(name) for name in names)], dtype=np.int64),
            counts=counts,
        )


def tokenised(
    records: Sequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    what: str,
    max_tokens: int,
    too_long: TooLong,
    cache: bool,
) -> TokenisedSet:
    """Tokenise `records`, or map the result of an earlier call with the same content from the cache.

    Warns about records that were too long, on every call. `what` names the records in errors.

    Raises:
        DataError: see `tokenise`; or no example is left.
    """

    def make() -> TokenisedSet:
        counts = Counts()
        rows = tokenise_all(records, tokenizer, max_tokens=max_tokens, too_long=too_long, counts=counts)
        return TokenisedSet.from_examples(rows, counts)

    if cache:
        key = content_key(records, tokenizer, max_tokens=max_tokens, too_long=too_long)
        result = _cached(cache_dir("tokens") / f"{key}.safetensors", make)
    else:
        result = make()
    if not len(result):
        raise DataError(
            f"{what}: all {result.counts.records} records are longer than data.context_tokens={max_tokens}, "
            "and data.too_long=skip leaves none; raise data.context_tokens or choose truncate or split"
        )
    result.counts.warn(max_tokens=max_tokens)
    return result


def content_key(
    records: Sequence[Record], tokenizer: PreTrainedTokenizerBase, *, max_tokens: int, too_long: TooLong
) -> str:
    """A digest of all that decides the tokens: records, tokenizer, template, length and rule."""
    backend: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    settings = [
        _LAYOUT,
        max_tokens,
        too_long,
        tokenizer.chat_template or FALLBACK_TEMPLATE,
        tokenizer.special_tokens_map,
    ]
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(backend.to_str().encode() if backend is not None else repr(tokenizer).encode())
    for record in records:
        turns = [[m.role, m.content] for m in record.messages] if record.messages is not None else record.text
        digest.update(json.dumps([record.name, turns]).encode())
    return digest.hexdigest()[:40]


def _cached(path: Path, make: Callable[[], TokenisedSet]) -> TokenisedSet:
    with file_lock(path.with_suffix(".lock")):
        if path.is_file():
            try:
                return _read(path)
            except (SafetensorError, KeyError, json.JSONDecodeError, TypeError):
                path.unlink()  # a damaged cache file is made again
        result = make()
        _write(path, result)
    return result


def _write(path: Path, tokens: TokenisedSet) -> None:
    arrays = {
        "ids": tokens.ids,
        "loss": tokens.loss.astype(np.uint8),
        "starts": tokens.starts,
        "names": tokens.names,
        "name_starts": tokens.name_starts,
    }
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(save(arrays, metadata={"counts": json.dumps(asdict(tokens.counts))}))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read(path: Path) -> TokenisedSet:
    with safe_open(path, framework="numpy") as file:
        counts = Counts(**json.loads(file.metadata()["counts"]))
        arrays = {name: file.get_tensor(name) for name in ("ids", "loss", "starts", "names", "name_starts")}
    return TokenisedSet(**{**arrays, "loss": arrays["loss"].astype(bool)}, counts=counts)
