"""Tokens to text while they arrive, and stop strings across token borders.

`Detokeniser` gives text only when later tokens cannot change it, so half of a UTF-8 character is never
sent; what it gave in all equals the tokenizer's decoding of the whole sequence. `StopStrings` holds back
the shortest tail that could still become a stop string. Neither knows HTTP, nor the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"
_PENDING_BYTES = 3  # of an unfinished UTF-8 character, which has four at most
_PROMPT_TOKENS = 5  # of context for the first token: tokenizers that write spaces as a prefix need some
_WINDOW_TOKENS = 64  # bounds the work on a model that writes nothing but broken bytes


class Detokeniser:
    """The text of one growing sequence.

    `decode` turns ids into text and leaves special tokens out. `context` are the ids before the sequence
    (the prompt); its last few decide whether the first token's leading space is written.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = list(context[-_PROMPT_TOKENS:])
        self._context_text = decode(self._context) if self._context else ""
        self._window: list[int] = []
        self._sent_chars = 0

    def push(self, token: int) -> str:
        """The text that is certain after `token`; often one token's, sometimes empty or several tokens'."""
        self._window.append(token)
        whole = self._decode(self._context + self._window)
        if not whole.startswith(self._context_text) and len(self._window) < _WINDOW_TOKENS:
            return ""  # some tokenizers break the characters before an unfinished one as well, until it is finished
        text = whole[len(self._context_text) :]
        unsure = len(text) - len(text.rstrip(_REPLACEMENT)) if text.endswith(_REPLACEMENT) else 0
        if unsure and len(self._window) < _WINDOW_TOKENS:
            certain = text[self._sent_chars : len(text) - min(unsure, _PENDING_BYTES)]
            self._sent_chars += len(certain)
            return certain
        certain = text[self._sent_chars :]
        if text:  # an empty window (special tokens only) is kept: it says nothing of the spaces that follow
            self._context, self._context_text = self._window, self._decode(self._window)
            self._window, self._sent_chars = [], 0
        return certain

    def finish(self) -> str:
        """What was held back, broken characters as U+FFFD."""
        text = self._decode(self._context + self._window)[len(self._context_text) :]
        certain, self._sent_chars = text[self._sent_chars :], len(text)
        return certain


class StopStrings:
    """Passes text on up to the first of some stop strings, which is never passed on, not even in part."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would end everything"
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be passed on now. Sets `stopped` when a stop string is complete; the rest is dropped."""
        if not self._stops or not text:
            return text
        assert not self.stopped
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            passed, self._held = self._held[: min(found)], ""
            return passed
        keep = self._open_chars()
        passed, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return passed

    def finish(self) -> str:
        """What was held back, once it is certain that no stop string follows."""
        passed, self._held = self._held, ""
        return passed

    def _open_chars(self) -> int:
        """Length of the longest tail that begins a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
