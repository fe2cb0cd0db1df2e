"""What the API hands to the router: one sequence to generate, by the name a user gave."""

from __future__ import annotations

from dataclasses import dataclass, field

from zen_train.serve.types import Sampling


@dataclass(frozen=True, kw_only=True)
class RoutedRequest:
    """One sequence. A completion with `n=3` is three of them."""

    id: str
    """For logs; need not be unique (the router numbers its jobs itself)."""
    model: str
    """A variant's name, or the base's."""
    prompt_tokens: tuple[int, ...]
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    min_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    content_hash: str | None = None
    """The weights that the prompt was made for (their chat template). When the name means others by the
    time a place is found, the request fails with ConflictError and can be made again. None: any will do."""
    queue_deadline_s: float | None = None
    """From `submit` until a place in the engine. None: the router's."""
    total_deadline_s: float | None = None
    """From `submit` until the last token. None: the router's."""
