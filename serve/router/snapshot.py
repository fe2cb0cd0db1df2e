"""What the router shows of itself: frozen values for `/metrics`, the status page and `/v1/models`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tier = Literal["device", "loading", "host", "disk"]
"""host: off the device, and in the engine's host memory."""


@dataclass(frozen=True, kw_only=True)
class VariantView:
    """One name that is served; the base is one too (`content_hash` None, always on the device)."""

    name: str
    content_hash: str | None
    tier: Tier
    pinned: bool
    auto_pinned: bool = False
    """Pinned by its traffic: stays unless somebody has waited too long."""
    device_bytes: int | None
    """What it takes on the device, resident or not; None while unknown, 0 for the base."""
    queued: int
    running: int
    requests: int
    """Accepted since the name is served; the counters below too."""
    completed: int
    failed: int
    cancelled: int
    output_tokens: int
    lookups: int
    hits: int
    loads: int
    load_failures: int
    evictions: int
    last_load_s: float | None
    requests_per_s: float
    """Exponentially decayed; so is the next."""
    tokens_per_s: float
    first_token_p50_s: float | None
    """Submit to first token, over the configured window; None without traffic in it."""
    first_token_p99_s: float | None
    first_token_recent_s: tuple[float, ...]
    """The newest samples of the window, oldest first, for small plots."""


@dataclass(frozen=True, kw_only=True)
class RouterSnapshot:
    """The whole router at one instant."""

    ready: bool
    why_not_ready: str | None
    draining: bool
    variants: tuple[VariantView, ...]
    """The base first, then by name."""
    queued: int
    running: int
    max_jobs: int
    kv_tokens_claimed: int
    kv_tokens: int
    device_bytes_used: int
    """By resident and loading variants and by those whose eviction has not ended."""
    device_bytes_budget: int
    loads_in_flight: int
    load_bytes_in_flight: int
    retiring: int
    """Replaced or removed variants that are still on the device for their last requests."""
