"""Makes the snapshot: reads every part, changes none."""

from __future__ import annotations

from collections.abc import Set

from zen_train.serve.router.core import Core
from zen_train.serve.router.gauges import quantile
from zen_train.serve.router.lane import Lane
from zen_train.serve.router.snapshot import RouterSnapshot, Tier, VariantView


def snapshot(core: Core, *, draining: bool, why_not_ready: str | None) -> RouterSnapshot:
    """The whole router at this instant."""
    cache = core.tier.snapshot()
    auto_pinned = {entry.key for entry in cache.entries if entry.auto_pinned}
    host = core.engine.stats().host
    on_host = host.resident.keys() if host else frozenset[str]()
    return RouterSnapshot(
        ready=why_not_ready is None,
        why_not_ready=why_not_ready,
        draining=draining,
        variants=tuple(_variant(core, name, auto_pinned, on_host) for name in core.names.all()),
        queued=core.scheduler.queued,
        running=len(core.scheduler.jobs),
        max_jobs=core.engine.limits.max_jobs,
        kv_tokens_claimed=core.scheduler.kv_claimed_tokens,
        kv_tokens=core.engine.limits.kv_tokens,
        device_bytes_used=sum(entry.size_bytes for entry in cache.entries),
        device_bytes_budget=cache.budget_bytes,
        loads_in_flight=len(core.residency.loading),
        load_bytes_in_flight=sum(core.residency.loading.values()),
        retiring=sum(lane.retired for lane in core.lanes.values()),
    )


def _variant(core: Core, name: str, auto_pinned: set[str], on_host: Set[str]) -> VariantView:
    now_s = core.clock()
    lane, stats = core.names.lane(name), core.stats.of(name)
    latencies = stats.first_token.values(now_s)
    return VariantView(
        name=name,
        content_hash=lane.key,
        tier=_tier(lane, on_host),
        pinned=name in core.names.pinned,
        auto_pinned=lane.key in auto_pinned,
        device_bytes=lane.size_bytes,
        queued=len(lane.queue),
        running=len(lane.running),
        requests=stats.requests,
        completed=stats.completed,
        failed=stats.failed,
        cancelled=stats.cancelled,
        output_tokens=stats.output_tokens,
        lookups=stats.lookups,
        hits=stats.hits,
        loads=stats.loads,
        load_failures=stats.load_failures,
        evictions=stats.evictions,
        last_load_s=stats.last_load_s,
        requests_per_s=stats.request_rate.per_s(now_s),
        tokens_per_s=stats.token_rate.per_s(now_s),
        first_token_p50_s=quantile(latencies, 0.5),
        first_token_p99_s=quantile(latencies, 0.99),
        first_token_recent_s=stats.first_token.recent(now_s),
    )


def _tier(lane: Lane, on_host: Set[str]) -> Tier:
    if lane.where in ("loading", "device"):
        return lane.where
    return "host" if lane.key in on_host else "disk"
