"""One choice of an answer: the router's events of one sequence become text, log probabilities and the reason it ended.

It joins the incremental decoding, the stop strings and the counting. It knows neither HTTP nor the form of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zen_train.serve.api.detokenise import Detokeniser, StopStrings
from zen_train.serve.api.text import TextModel
from zen_train.serve.errors import OverloadedError
from zen_train.serve.router.ticket import Ticket
from zen_train.serve.types import TokenEvent

Ended = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """Log probabilities of one token: what was chosen, and the alternatives, best first."""

    text: str
    utf8: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What there is to send after some events. `ended` is set on the last piece."""

    text: str
    entries: tuple[TokenEntry, ...]
    ended: Ended | None


class Choice:
    """One sequence of a request. `pieces` is read by one task."""

    def __init__(
        self,
        *,
        index: int,
        ticket: Ticket,
        model: TextModel,
        prompt: Sequence[int],
        stops: Sequence[str],
        min_tokens: int,
    ) -> None:
        self.index = index
        self.ticket = ticket
        self.prompt_tokens = len(prompt)
        self.output_tokens = 0
        self.ended: Ended | None = None
        self.last_s = 0.0
        """When the reader took the last events, on its own clock."""
        self.delivered = False
        self._model = model
        self._min_tokens = min_tokens
        self._text = Detokeniser(model.decode, prompt)
        self._stops = StopStrings(stops)

    def feed(self, events: Sequence[TokenEvent]) -> Piece:
        """Take what the ticket's `batch` gave; after `ended` is set nothing follows.

        Raises:
            OverloadedError: the sequence was cut off from the server's side.
        """
        pieces: list[str] = []
        entries: list[TokenEntry] = []
        for event in events:
            if event.token is not None:
                self.output_tokens += 1
                if event.logprob is not None:
                    entries.append(self._entry(event))
                if event.finish != "stop":
                    pieces.append(self._pass(self._text.push(event.token)))
            if self._stops.stopped:
                self.ended = "stop"
                self.ticket.cancel()
                break
            if event.finish is not None:
                pieces += [self._pass(self._text.finish()), self._stops.finish()]
                if event.finish not in ("stop", "length"):
                    raise OverloadedError(
                        "the server ended this request before it was finished; send it again"
                    )
                self.ended = (
                    "stop" if self._stops.stopped else "length" if event.finish == "length" else "stop"
                )
                break
        return Piece("".join(pieces), tuple(entries), self.ended)

    def _pass(self, text: str) -> str:
        """Stop strings count from `min_tokens` on, as vLLM has it."""
        return text if self.output_tokens < self._min_tokens else self._stops.push(text)

    def _entry(self, event: TokenEvent) -> TokenEntry:
        assert event.token is not None
        assert event.logprob is not None
        text, utf8 = self._model.token_text(event.token)
        top = tuple((*self._model.token_text(other.token), other.logprob) for other in event.top)
        return TokenEntry(text, utf8, event.logprob, top)
