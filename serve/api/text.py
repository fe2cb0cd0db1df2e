"""Prompts to tokens and back, with the tokenizer and the chat template of a variant's own folder.

Fourteen variants usually carry the same tokenizer files, which take tens of megabytes each once loaded:
they are shared by the digest of their bytes. Long prompts are encoded in a thread of their own, one at a
time, so that they delay no stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zen_train.serve.errors import BadRequestError, VariantUnusableError

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # how SentencePiece models write a byte
_INLINE_CHARS = 4_096  # below a millisecond: cheaper than a thread
_KEPT_MODELS = 8


def _byte_symbols() -> dict[str, int]:
    """The characters that byte-level tokenizers (GPT-2's and its heirs) write for the 256 bytes."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_SYMBOL = _byte_symbols()


class TextModel:
    """One tokenizer with its chat template. Safe to use from several threads: nothing in it changes."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        backend = getattr(loaded, "backend_tokenizer", None)
        if backend is None:
            raise VariantUnusableError(
                f"{folder} has no fast tokenizer (tokenizer.json); save it with save_pretrained of transformers 5"
            )
        backend.no_truncation()
        backend.no_padding()
        self._template = loaded
        self._backend = backend
        self.vocabulary: int = backend.get_vocab_size(with_added_tokens=True)
        self.end_tokens = _end_tokens(folder, loaded.eos_token_id)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`; special tokens are left out."""
        return self._backend.decode(list(tokens), skip_special_tokens=True)

    def token_text(self, token: int) -> tuple[str, bytes]:
        """One token as text (special tokens by their name) and as UTF-8 bytes, perhaps of half a character."""
        text = self._backend.decode([token], skip_special_tokens=False)
        stored = self._backend.id_to_token(token) or ""
        if "\ufffd" in text and all(symbol in _BYTE_OF_SYMBOL for symbol in stored):
            return text, bytes(_BYTE_OF_SYMBOL[symbol] for symbol in stored)
        if "\ufffd" in text and _BYTE_TOKEN.fullmatch(stored):
            return text, bytes([int(stored[3:5], 16)])
        return text, text.encode()

    def encode(self, text: str) -> list[int]:
        """A plain prompt, with the tokens that the model expects in front."""
        return self._backend.encode(text).ids

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as the chat template writes it, open for the assistant's answer.

        Raises:
            BadRequestError: no template, or one that refuses these messages.
        """
        import jinja2

        try:
            return self._template.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise BadRequestError(
                f"the chat template of this model does not take these messages: {error}", param="messages"
            ) from error

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation; the template writes its own special tokens."""
        return self._backend.encode(self.render_chat(messages), add_special_tokens=False).ids


class TextModels:
    """The text models of all folders in use, loaded at first need, shared by digest, the least used dropped."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, TextModel] = OrderedDict()
        self._digests: dict[tuple[Path, str | None], str] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zen-tokenizer")

    async def get(self, folder: Path, content_hash: str | None) -> TextModel:
        """The text model of a base (`content_hash` None) or of an artifact folder.

        Raises:
            VariantUnusableError: its tokenizer files are missing or cannot be read.
        """
        digest = self._digests.get((folder, content_hash))
        if digest is not None and digest in self._models:
            self._models.move_to_end(digest)
            return self._models[digest]
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._load, folder, content_hash
        )

    def _load(self, folder: Path, content_hash: str | None) -> TextModel:
        """Only ever in the tokenizer thread, so two requests for one folder load it once."""
        digest = _digest(folder)
        if digest not in self._models:
            try:
                self._models[digest] = TextModel(folder)
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise VariantUnusableError(
                    f"the tokenizer in {folder.name} cannot be read ({type(error).__name__}: {error})"
                ) from error
        if len(self._digests) > 64 * _KEPT_MODELS:
            self._digests.clear()
        self._digests[folder, content_hash] = digest
        model = self._models[digest]
        while len(self._models) > _KEPT_MODELS:
            self._models.popitem(last=False)
        return model

    async def encode(self, model: TextModel, text: str) -> list[int]:
        """`model.encode`, off the event loop when the text is long."""
        if len(text) <= _INLINE_CHARS:
            return model.encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._thread, model.encode, text)

    async def encode_chat(self, model: TextModel, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """`model.encode_chat`, off the event loop when the conversation is long."""
        if sum(len(message["content"]) for message in messages) + 64 * len(messages) <= _INLINE_CHARS:
            return model.encode_chat(messages)
        return await asyncio.get_running_loop().run_in_executor(self._thread, model.encode_chat, messages)

    def close(self) -> None:
        """End the thread; running work is finished first."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for name in _FILES:
        path = folder / name
        content = path.read_bytes() if path.is_file() else b""
        whole.update(f"{name} {len(content)}\n".encode())
        whole.update(content)
    return whole.hexdigest()


def _end_tokens(folder: Path, tokenizer_end: int | None) -> frozenset[int]:
    """The tokens that end an answer: the tokenizer's, and those of generation_config.json (one or a list)."""
    found = set() if tokenizer_end is None else {tokenizer_end}
    path = folder / "generation_config.json"
    if path.is_file():
        named = json.loads(path.read_text()).get("eos_token_id")
        found |= set(named if isinstance(named, list) else [] if named is None else [named])
    return frozenset(found)
