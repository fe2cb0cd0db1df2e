"""Why a load has to wait, and for how long: the reasons in the order in which they end by themselves."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from zen_train.serve.cache.ledger import Entry
from zen_train.serve.cache.plans import Wait
from zen_train.serve.cache.victims import Candidate, Ranking


def explain_wait(
    entries: list[Entry],
    *,
    need_bytes: int,
    protected: Collection[str],
    minimum_residency_s: float,
    ranking: Ranking,
) -> Wait:
    """The first of these that makes `need_bytes`.

    What leaves already (no entries given), minimum residency running out, leases ending, loads ending; else
    pins stand in the way.
    """
    if not entries:
        return Wait("being freed")
    residents = [e for e in entries if e.where == "resident" and e.key not in protected]
    idle = [
        (entry.resident_since_s + minimum_residency_s, entry.size_bytes)
        for entry in residents
        if not entry.leases
    ]
    heapq.heapify(idle)
    while idle:
        settled_at_s, size_bytes = heapq.heappop(idle)
        need_bytes -= size_bytes
        if need_bytes <= 0:
            return Wait("minimum residency", retry_at_s=settled_at_s)
    used = [Candidate(entry.key, entry.size_bytes, entry.order) for entry in residents if entry.leases]
    drain = ranking.victims(used, need_bytes)
    if drain is not None:
        return Wait("in use", drain=drain)
    need_bytes -= sum(candidate.size_bytes for candidate in used)
    loading = sum(e.size_bytes for e in entries if e.where == "loading" and e.key not in protected)
    return Wait("loading" if loading >= need_bytes else "pinned")
