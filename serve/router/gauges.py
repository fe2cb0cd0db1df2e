"""Small running figures: a decayed rate and the quantiles of recent latencies. Time is passed in."""

from __future__ import annotations

import math
from collections import deque

_SAMPLES = 1024
_RECENT = 64


class DecayedRate:
    """Events per second, older ones counting half as much per `half_life_s`."""

    def __init__(self, *, half_life_s: float) -> None:
        self._decay_per_s = math.log(2.0) / half_life_s
        self._mass = 0.0
        self._at_s = 0.0
        self._since_s: float | None = None

    def add(self, now_s: float, count: int = 1) -> None:
        """`count` events happened now."""
        self._settle(now_s)
        if self._since_s is None:
            self._since_s = now_s
        self._mass += count

    def per_s(self, now_s: float) -> float:
        """The rate. Young figures are divided by the weight of the time they cover (at least one second)."""
        if self._since_s is None:
            return 0.0
        self._settle(now_s)
        covered_s = max(now_s - self._since_s, 1.0)
        return self._mass * self._decay_per_s / -math.expm1(-self._decay_per_s * covered_s)

    def _settle(self, now_s: float) -> None:
        self._mass *= math.exp(-self._decay_per_s * max(now_s - self._at_s, 0.0))
        self._at_s = now_s


class LatencyWindow:
    """The newest latencies of the last `window_s`, at most 1024 of them."""

    def __init__(self, *, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)

    def add(self, now_s: float, latency_s: float) -> None:
        self._samples.append((now_s, latency_s))

    def values(self, now_s: float) -> list[float]:
        """Oldest first."""
        while self._samples and self._samples[0][0] < now_s - self._window_s:
            self._samples.popleft()
        return [latency for _, latency in self._samples]

    def recent(self, now_s: float) -> tuple[float, ...]:
        """At most 64, oldest first."""
        return tuple(self.values(now_s)[-_RECENT:])


def quantile(values: list[float], share: float) -> float | None:
    """The least value that at least `share` of them do not exceed (nearest rank); None without any."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]
