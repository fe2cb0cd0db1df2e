"""Names and the lanes they mean, as the catalogue changes under running requests.

A name that means new weights (another content hash) means a new lane from then on. The former lane is
*retired* when no other name means it: what runs there, or waits there while the old weights are on the
device, finishes on the old weights; what waits while they are not moves to the new lane, unless it was made
for the old weights alone. A name that is removed takes its waiting requests along (404); its running ones may
finish within a grace. A retired lane is unloaded when its last job ends, and then forgotten.

A pin belongs to a name and follows it to new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zen_train.serve.errors import ConflictError, UnknownModelError
from zen_train.serve.router.lane import Lane
from zen_train.serve.router.ticket import Ticket
from zen_train.serve.types import Variant


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What an update of the catalogue did, by name."""

    added: tuple[str, ...]
    replaced: tuple[str, ...]
    removed: tuple[str, ...]


class Names:
    """`lanes`, by content hash (None: the base), is shared with those who read it, and changed here only."""

    def __init__(
        self,
        *,
        base_name: str,
        lanes: dict[str | None, Lane],
        grace_s: float,
        clock: Callable[[], float],
        move: Callable[[Ticket, Lane], None],
        fail: Callable[[Ticket, Exception], None],
        set_pin: Callable[[Lane, bool], None],
        forget: Callable[[str], None],
    ) -> None:
        """`forget` is told each content hash that has left: no name means it and nothing of it runs."""
        self.base_name = base_name
        self.base = Lane(key=None, variant=None, where="device", size_bytes=0)
        self.pinned: set[str] = set()
        self._lanes = lanes
        self._lanes[None] = self.base
        self._grace_s = grace_s
        self._clock = clock
        self._move = move
        self._fail = fail
        self._set_pin = set_pin
        self._tell_forgotten = forget
        self._by_name: dict[str, Lane] = {}
        self._cuts: list[tuple[float, list[Ticket]]] = []
        """When the grace of these running requests ends, earliest first."""
        self._farewells: dict[Lane, list[asyncio.Future[None]]] = {}

    def lane(self, name: str) -> Lane:
        """What a name means; raises UnknownModelError."""
        lane = self.base if name == self.base_name else self._by_name.get(name)
        if lane is None:
            raise UnknownModelError(
                f"model {name[:200]!r} is not served; /v1/models lists those that are", param="model"
            )
        return lane

    def all(self) -> list[str]:
        """The base's name, then the variants', sorted."""
        return [self.base_name, *sorted(self._by_name)]

    def apply(self, variants: Mapping[str, Variant]) -> Changes:
        """Serve these and no others. The base keeps its name, whatever is called like it."""
        known = self._by_name.keys()
        added = [name for name in variants if name not in known and name != self.base_name]
        changed = [name for name in known if name in variants and variants[name] != self._variant(name)]
        replaced = [
            name for name in changed if variants[name].content_hash != self._variant(name).content_hash
        ]
        removed = [name for name in known if name not in variants]
        for name in removed:
            self._remove(name)
        for name in [*added, *changed]:
            self._mean(name, variants[name])
        return Changes(added=tuple(added), replaced=tuple(replaced), removed=tuple(removed))

    def set_pinned(self, name: str, pinned: bool) -> Lane:
        """Pin a name or take its pin away. Raises UnknownModelError, ConflictError for the base."""
        lane = self.lane(name)
        if lane.is_base:
            raise ConflictError(
                f"{name!r} is the base, which is always on the device; name a variant", param="model"
            )
        (self.pinned.add if pinned else self.pinned.discard)(name)
        self._settle_pin(lane)
        return lane

    def settle(self) -> float:
        """Do what retired lanes are due for; returns when time alone makes more due."""
        now_s = self._clock()
        while self._cuts and self._cuts[0][0] <= now_s:
            for ticket in self._cuts.pop(0)[1]:
                self._fail(ticket, _gone(ticket, "was unloaded, and the grace for running requests is over"))
        for lane in [lane for lane in self._lanes.values() if lane.retired]:
            lane.answer(False)
            if lane.where == "disk":
                for ticket in list(lane.queue):
                    self._rehome(ticket)
                if not lane.running:
                    self._forget(lane)
        return self._cuts[0][0] if self._cuts else float("inf")

    def gone(self, lane: Lane) -> asyncio.Future[None]:
        """Done when a lane is off the device and forgotten, or has a name again."""
        farewell = asyncio.get_running_loop().create_future()
        if self._lanes.get(lane.key) is not lane or not lane.retired:
            farewell.set_result(None)
        else:
            self._farewells.setdefault(lane, []).append(farewell)
        return farewell

    def release_waiters(self) -> None:
        """The engine is gone: nobody need wait for a lane to leave it."""
        for lane in list(self._farewells):
            self._say_farewell(lane)

    # --- inside

    def _variant(self, name: str) -> Variant:
        return self._by_name[name].names[name]

    def _mean(self, name: str, variant: Variant) -> None:
        lane = self._lanes.get(variant.content_hash)
        if lane is None:
            lane = Lane(key=variant.content_hash, variant=variant)
            self._lanes[variant.content_hash] = lane
        former = self._by_name.get(name)
        if former is not None and former is not lane:
            del former.names[name]
            self._settle_pin(former)
        lane.variant = variant  # the newest folder with these weights
        lane.names[name] = variant
        self._by_name[name] = lane
        self._settle_pin(lane)
        self._say_farewell(lane)

    def _remove(self, name: str) -> None:
        lane = self._by_name.pop(name)
        del lane.names[name]
        self.pinned.discard(name)
        self._settle_pin(lane)
        running: list[Ticket] = []
        for other in self._lanes.values():
            for ticket in [ticket for ticket in other.queue if ticket.request.model == name]:
                self._fail(ticket, _gone(ticket, "was unloaded while the request waited"))
            running += [ticket for ticket in other.running.values() if ticket.request.model == name]
        if running:
            self._cuts.append((self._clock() + self._grace_s, running))

    def _rehome(self, ticket: Ticket) -> None:
        lane = self._by_name.get(ticket.request.model)
        if lane is None:
            self._fail(ticket, _gone(ticket, "was unloaded while the request waited"))
        elif ticket.request.content_hash not in (None, lane.key):
            self._fail(ticket, replaced_error(ticket.request.model))
        else:
            self._move(ticket, lane)

    def _settle_pin(self, lane: Lane) -> None:
        self._set_pin(lane, not self.pinned.isdisjoint(lane.names))

    def _forget(self, lane: Lane) -> None:
        assert lane.key is not None
        del self._lanes[lane.key]
        self._tell_forgotten(lane.key)
        self._say_farewell(lane)

    def _say_farewell(self, lane: Lane) -> None:
        for farewell in self._farewells.pop(lane, ()):
            if not farewell.done():
                farewell.set_result(None)

    def check(self) -> None:
        """Asserts that names and lanes agree in both directions."""
        assert self._lanes[None] is self.base
        for name, lane in self._by_name.items():
            assert self._lanes[lane.key] is lane
            assert lane.names[name].content_hash == lane.key
        assert {(n, lane.key) for lane in self._lanes.values() for n in lane.names} == {
            (name, lane.key) for name, lane in self._by_name.items()
        }
        assert self.pinned <= self._by_name.keys()


def replaced_error(name: str) -> ConflictError:
    """For a request that was made for weights which its name does not mean any more."""
    return ConflictError(
        f"{name!r} was replaced while the request was made ready; send it again", param="model"
    )


def _gone(ticket: Ticket, how: str) -> UnknownModelError:
    return UnknownModelError(
        f"model {ticket.request.model!r} {how}; /v1/models lists what is served", param="model"
    )
