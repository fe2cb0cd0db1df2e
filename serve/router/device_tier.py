"""The device's cache, spoken to in lanes: budget, leases and pins of `serve/cache`.

A lane on the device holds one lease per job in the engine, and one more while requests wait for it, unless it
was chosen to make room (`hold`). `TierCache` never evicts what is leased.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from zen_train.serve.cache import CacheSnapshot, PolicyConfig, Start, TierCache, TooLarge, Wait
from zen_train.serve.errors import OverloadedError, ServeError, TooLargeError
from zen_train.serve.router.claims import Holding
from zen_train.serve.router.lane import Lane

_NO_ROOM_RETRY_S = 5.0


class DeviceTier:
    """Keeps no state of its own but which lanes are held for their queues."""

    def __init__(
        self,
        lanes: Mapping[str | None, Lane],
        *,
        budget_bytes: int,
        clock: Callable[[], float],
        config: PolicyConfig,
    ) -> None:
        self._lanes = lanes
        self._cache = TierCache(budget_bytes=budget_bytes, clock=clock, config=config)
        self._held: set[Lane] = set()

    # --- traffic and room

    def record_request(self, lane: Lane) -> None:
        """A request was accepted; before its size is known it cannot be counted."""
        if lane.size_bytes is not None:
            self._cache.record_request(_key(lane), lane.size_bytes)

    def make_room(self, lane: Lane, *, urgent: bool) -> list[Lane] | Wait | ServeError:
        """Reserve room for a cold lane: whom to unload first; or why there is none now, or never."""
        assert lane.size_bytes is not None
        plan = self._cache.plan_load(_key(lane), lane.size_bytes, urgent=urgent)
        if isinstance(plan, TooLarge):
            message = f"{lane.title} cannot be loaded: {plan}"
            if plan.size_bytes > plan.budget_bytes:
                return TooLargeError(message, param="model")
            return OverloadedError(message, retry_after_s=_NO_ROOM_RETRY_S)
        if isinstance(plan, Start):
            return [self._lanes[key] for key in plan.evict]
        assert isinstance(plan, Wait), f"{lane.title} is {lane.where}, but the cache says {plan}"
        return plan

    def loaded(self, lane: Lane) -> None:
        """The load that `make_room` began is done."""
        assert not self._cache.finish_load(_key(lane))

    def load_failed(self, lane: Lane) -> None:
        """It failed."""
        self._cache.fail_load(_key(lane))

    def drop(self, lane: Lane) -> bool:
        """Forget a lane without a name, and its pin; whether it is on the device and must be unloaded now."""
        self.hold(lane, False)
        return bool(self._cache.remove(_key(lane)))

    def left(self, lane: Lane) -> None:
        """Its bytes on the device are free."""
        self._cache.evicted(_key(lane))

    # --- use

    def acquire(self, lane: Lane) -> None:
        """For one job; does nothing for the base."""
        if not lane.is_base:
            self._cache.acquire(_key(lane))

    def release(self, lane: Lane) -> None:
        """The job has ended."""
        if not lane.is_base:
            self._cache.release(_key(lane))

    def hold(self, lane: Lane, wanted: bool) -> None:
        """Keep a lane on the device for the requests that wait for it, or do so no longer."""
        if wanted and lane not in self._held:
            self._held.add(lane)
            self._cache.acquire(_key(lane))
        elif not wanted and lane in self._held:
            self._held.discard(lane)
            self._cache.release(_key(lane))

    def pin(self, lane: Lane, pinned: bool) -> None:
        """Whether it may be evicted at all once it is here."""
        if pinned:
            self._cache.pin(_key(lane))
        else:
            self._cache.unpin(_key(lane))

    # --- looking

    def snapshot(self) -> CacheSnapshot:
        """Where the bytes are."""
        return self._cache.snapshot()

    def is_pinned(self, lane: Lane) -> bool:
        """Explicitly."""
        return self._cache.is_pinned(_key(lane))

    def holdings(self, busy: Collection[Lane]) -> tuple[dict[Lane, Holding], int]:
        """What the busy lanes hold, and how many bytes are free or can be freed without them."""
        view = self._cache.snapshot()
        holdings: dict[Lane, Holding] = {}
        room_bytes = view.free_bytes + view.leaving_bytes + view.loading_bytes - view.owed_bytes
        for entry in view.entries:
            lane = self._lanes[entry.key]
            if lane in busy:
                holdings[lane] = Holding(
                    size_bytes=entry.size_bytes,
                    pinned=entry.pinned,
                    settled_at_s=entry.settled_at_s,
                    requests_per_s=entry.requests_per_s,
                )
            elif entry.where == "resident" and not entry.pinned:
                room_bytes += entry.size_bytes
            elif entry.where == "loading":
                room_bytes -= entry.size_bytes
        return holdings, room_bytes

    def check(self) -> None:
        """Asserts that lanes and cache say the same, and that leases are jobs and holds."""
        self._cache.check()
        entries = {entry.key: entry for entry in self._cache.snapshot().entries}
        states = {"loading": "loading", "device": "resident", "leaving": "leaving"}
        expected = {
            k: states[lane.where] for k, lane in self._lanes.items() if k is not None and lane.where != "disk"
        }
        assert {key: entry.where for key, entry in entries.items()} == expected
        for key, entry in entries.items():
            lane = self._lanes[key]
            assert entry.leases == len(lane.running) + (lane in self._held), (lane.title, entry.leases)
            assert entry.size_bytes == lane.size_bytes or lane.where == "leaving"
        assert all(lane.where == "device" for lane in self._held)


def _key(lane: Lane) -> str:
    assert lane.key is not None, "the base is not in the cache"
    return lane.key
