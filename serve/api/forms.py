"""The two forms of an answer, whole and streamed: chat completions and completions, as OpenAI writes them.

A stream's chunk is built from bytes that stay the same, so that a token costs one small JSON string.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from zen_train.serve.api.choice import Ended, Piece, TokenEntry

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's and vLLM's floor

DONE = b"data: [DONE]\n\n"


def usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    """The usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


class Form(ABC):
    """One answer. `fingerprint` names the weights, `model` is the name that was asked for."""

    kind: str
    chunk_kind: str

    def __init__(
        self, *, id: str, created: int, model: str, fingerprint: str, include_usage: bool, logprobs: bool
    ) -> None:
        self._head = {
            "id": id,
            "object": self.kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._logprobs = logprobs
        chunk_head = orjson.dumps({**self._head, "object": self.chunk_kind})[:-1]
        self._before = b"data: " + chunk_head + b',"choices":[{"index":'
        self._after = (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._chunk_head = chunk_head

    def answer(
        self, choices: Sequence[tuple[str, tuple[TokenEntry, ...], Ended]], counts: dict[str, int]
    ) -> dict[str, Any]:
        """The whole answer."""
        listed = [self._whole(index, *choice) for index, choice in enumerate(choices)]
        return {**self._head, "choices": listed, "usage": counts}

    def chunk(self, index: int, piece: Piece, text_offset: int) -> bytes:
        """One streamed event. `text_offset`: characters of the choice before this piece."""
        logprobs = b"null"
        if self._logprobs:
            logprobs = orjson.dumps(self._entries(piece.entries, text_offset))
        ended = b'"%b"' % piece.ended.encode() if piece.ended else b"null"
        body = self._delta(orjson.dumps(piece.text), piece)
        parts = (
            self._before,
            b"%d" % index,
            body,
            b',"logprobs":',
            logprobs,
            b',"finish_reason":',
            ended,
            b"}]",
            self._after,
        )
        return b"".join(parts)

    def opening(self, index: int) -> bytes:
        """What a choice begins with, before any text."""
        return b""

    def usage_chunk(self, counts: dict[str, int]) -> bytes:
        """The event that `stream_options.include_usage` asks for."""
        return b"data: " + self._chunk_head + b',"choices":[],"usage":' + orjson.dumps(counts) + b"}\n\n"

    @abstractmethod
    def _whole(
        self, index: int, text: str, entries: tuple[TokenEntry, ...], ended: Ended
    ) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, text_json: bytes, piece: Piece) -> bytes: ...

    @abstractmethod
    def _entries(self, entries: Sequence[TokenEntry], text_offset: int) -> dict[str, Any]: ...


class ChatForm(Form):
    """`chat.completion` and its chunks."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return b"".join((self._before, b"%d" % index, delta, self._after))

    def _whole(self, index: int, text: str, entries: tuple[TokenEntry, ...], ended: Ended) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._entries(entries, 0) if self._logprobs else None,
            "finish_reason": ended,
        }

    def _delta(self, text_json: bytes, piece: Piece) -> bytes:
        if piece.ended and not piece.text:
            return b',"delta":{}'
        return b',"delta":{"content":' + text_json + b"}"

    def _entries(self, entries: Sequence[TokenEntry], text_offset: int) -> dict[str, Any]:
        return {
            "content": [
                {
                    **_token(entry.text, entry.utf8, entry.logprob),
                    "top_logprobs": [_token(*other) for other in entry.top],
                }
                for entry in entries
            ],
            "refusal": None,
        }


class CompletionForm(Form):
    """`text_completion`, whole and streamed."""

    kind = chunk_kind = "text_completion"

    def _whole(self, index: int, text: str, entries: tuple[TokenEntry, ...], ended: Ended) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._entries(entries, 0) if self._logprobs else None,
            "finish_reason": ended,
        }

    def _delta(self, text_json: bytes, piece: Piece) -> bytes:
        return b',"text":' + text_json

    def _entries(self, entries: Sequence[TokenEntry], text_offset: int) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(text_offset)
            text_offset += len(entry.text)
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                {text: _finite(logprob) for text, _, logprob in entry.top}
                | {entry.text: _finite(entry.logprob)}
                for entry in entries
            ],
            "text_offset": offsets,
        }


def _token(text: str, utf8: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(utf8)}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB
