"""What router, engine and API hand each other: plain frozen values, no torch, no HTTP.

A *job* is one sequence to generate. A *variant* is named by users and identified by the content hash of its
artifact; the base has no hash (`None`). Whatever is cached is keyed by the hash, never by the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One delta artifact on disk."""

    name: str
    content_hash: str
    folder: Path
    size_bytes: int
    """Bytes that its tensors take where they are served, row and vector scales included."""
    created_unix_s: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Bounds are checked by the API; the meaning is OpenAI's, and vLLM's where OpenAI has
    none.
    """

    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None: from the system's randomness. The same seed, prompt and weights give the same tokens in any batch."""
    logprobs: int | None = None
    """None: none; else the number of alternatives reported beside the chosen token (0 is allowed)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sequence to generate."""

    id: str
    variant_hash: str | None
    prompt_tokens: tuple[int, ...]
    max_tokens: int
    stop_tokens: frozenset[int]
    """Ends the sequence; the token itself is reported as the last event with an empty text. Empty: ignore_eos."""
    min_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability (natural) of a token before temperature and penalties."""

    token: int
    logprob: float


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """What the engine says of a job: one new token, the end, or both."""

    job_id: str
    token: int | None
    finish: FinishReason | None = None
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    error: Exception | None = None
    """With finish="error"."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What an engine was built for; constant over its life."""

    context_tokens: int
    """Prompt and output of one job together."""
    max_jobs: int
    """Jobs decoding side by side."""
    kv_tokens: int
    """Tokens whose keys and values fit, over all jobs."""
    variant_bytes: int
    """Budget of the device tier."""
    slot_bytes: int
    """What one sign plane of the whole model takes; a variant's device size is a multiple of it."""


@dataclass(frozen=True, kw_only=True)
class HostStats:
    """The host tier: artifacts in the host's memory, whence a load takes no disk. Since the start, and now."""

    budget_bytes: int
    resident: Mapping[str, int]
    """content hash -> bytes."""
    hits: int
    lookups: int
    read_bytes: int
    """From disk."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot for metrics, the status page and readiness. Cheap; any thread may ask."""

    alive: bool
    heartbeat_age_s: float
    """Time since the engine thread last began a step or an idle wait."""
    running_jobs: int
    waiting_jobs: int
    kv_tokens_used: int
    resident: Mapping[str, int]
    """content hash -> bytes on the device."""
    steps: int
    tokens_generated: int
    preemptions: int
    death: str | None = None
    """Why it is not alive."""
    host: HostStats | None = None
    """None: the engine has no host tier."""
