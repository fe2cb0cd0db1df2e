"""What Prometheus reads at `/metrics`. Names are near vLLM's, with `zen_` in front.

States (tiers, queues, memory) are read from the router and the engine when somebody asks; events are
counted as they come. Labels have bounded values: names of the catalogue, routes of this API, statuses.
Every series of a served name is there before its first request, and goes with the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from zen_train.serve.router.metrics import Outcome
from zen_train.serve.router.snapshot import RouterSnapshot
from zen_train.serve.types import EngineStats

_FIRST_TOKEN_S = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2, 5, 10, 30, 60)
_INTER_TOKEN_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_LOAD_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60)
_REQUEST_S = (0.005, 0.02, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "cancelled", "error", "deadline", "refused")


class Metrics:
    """Implements `RouterMetrics`. All calls come from the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        r, v = self.registry, ["variant"]
        self._requests = Counter("zen_requests", "HTTP requests", ["route", "status"], registry=r)
        self._request_s = Histogram(
            "zen_request_seconds", "HTTP request to end of answer", ["route"], buckets=_REQUEST_S, registry=r
        )
        self._first = Histogram(
            "zen_time_to_first_token_seconds", "Submit to first token", v, buckets=_FIRST_TOKEN_S, registry=r
        )
        self._queue = Histogram(
            "zen_queue_seconds", "Submit to a place in the engine", v, buckets=_FIRST_TOKEN_S, registry=r
        )
        self._gap = Histogram(
            "zen_inter_token_seconds",
            "Between two deliveries of one sequence",
            buckets=_INTER_TOKEN_S,
            registry=r,
        )
        self._load_s = Histogram(
            "zen_variant_load_seconds", "Loads of a variant onto the device", v, buckets=_LOAD_S, registry=r
        )
        self._load_failures = Counter("zen_variant_load_failures", "Loads that failed", v, registry=r)
        self._load_bytes = Counter("zen_variant_load_bytes", "Bytes loaded", v, registry=r)
        self._evictions = Counter(
            "zen_variant_evictions", "Variants that left the device for others", v, registry=r
        )
        self._hits = Counter(
            "zen_variant_cache_hits", "Requests whose variant was on the device", v, registry=r
        )
        self._lookups = Counter("zen_variant_cache_lookups", "Requests for a variant", v, registry=r)
        self._ends = Counter("zen_sequences", "Sequences that ended", ["variant", "outcome"], registry=r)
        self._prompt_tokens = Counter(
            "zen_prompt_tokens", "Prompt tokens of accepted requests", v, registry=r
        )
        self._output_tokens = Counter("zen_generation_tokens", "Generated tokens", v, registry=r)
        self._per_variant = (
            self._first, self._queue, self._load_s, self._load_failures, self._load_bytes, self._evictions, self._hits,
            self._lookups, self._prompt_tokens, self._output_tokens,
        )  # fmt: skip
        self._named: set[str] = set()
        self.observe_gap: Callable[[float], None] = self._gap.observe

    def watch(self, snapshot: Callable[[], RouterSnapshot], stats: Callable[[], EngineStats]) -> None:
        """Read states from here at every scrape."""
        self._snapshot = snapshot
        self.registry.register(_States(snapshot, stats))

    def names(self, served: Iterable[str]) -> None:
        """Make all series of the served names, drop those of others."""
        wanted = set(served)
        for name in wanted - self._named:
            self._make(name)
        for name in self._named - wanted:
            for metric in self._per_variant:
                metric.remove(name)
            for outcome in _OUTCOMES:
                self._ends.remove(name, outcome)
        self._named = wanted

    def _make(self, name: str) -> None:
        for metric in self._per_variant:
            metric.labels(name)
        for outcome in _OUTCOMES:
            self._ends.labels(name, outcome)
        self._named.add(name)

    def _name(self, variant: str) -> str:
        """A name of the catalogue; a late event of one that has gone makes series that the next scrape drops."""
        if variant not in self._named:
            self._make(variant)
        return variant

    def text(self) -> bytes:
        """The scrape in Prometheus' text format. Call `watch` before."""
        self.names(view.name for view in self._snapshot().variants)
        return generate_latest(self.registry)

    def request(self, route: str, status: int, seconds: float) -> None:
        """One HTTP request was answered."""
        self._requests.labels(route, str(status)).inc()
        self._request_s.labels(route).observe(seconds)

    def prompt(self, variant: str, tokens: int) -> None:
        """A request with this prompt was accepted."""
        self._prompt_tokens.labels(self._name(variant)).inc(tokens)

    def lookup(self, variant: str, *, hit: bool) -> None:
        """See `RouterMetrics`."""
        self._lookups.labels(self._name(variant)).inc()
        self._hits.labels(variant).inc(int(hit))

    def load(self, variant: str, *, seconds: float, size_bytes: int, ok: bool) -> None:
        """See `RouterMetrics`."""
        name = self._name(variant)
        if ok:
            self._load_s.labels(name).observe(seconds)
            self._load_bytes.labels(name).inc(size_bytes)
        else:
            self._load_failures.labels(name).inc()

    def eviction(self, variant: str) -> None:
        """See `RouterMetrics`."""
        self._evictions.labels(self._name(variant)).inc()

    def first_token(self, variant: str, *, queued_s: float, load_s: float, total_s: float) -> None:
        """See `RouterMetrics`."""
        self._queue.labels(self._name(variant)).observe(queued_s)
        self._first.labels(variant).observe(total_s)

    def end(self, variant: str, *, outcome: Outcome, output_tokens: int, total_s: float) -> None:
        """See `RouterMetrics`."""
        self._ends.labels(self._name(variant), outcome).inc()
        self._output_tokens.labels(variant).inc(output_tokens)


class _States(Collector):
    """Gauges as of the moment of the scrape."""

    def __init__(self, snapshot: Callable[[], RouterSnapshot], stats: Callable[[], EngineStats]) -> None:
        self._snapshot = snapshot
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not collect at registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        now, engine = self._snapshot(), self._stats()
        loaded = GaugeMetricFamily(
            "zen_variant_loaded",
            "1: on the device; tier says where it is: device, loading, host, disk",
            labels=["variant", "tier", "pinned"],
        )
        queued = GaugeMetricFamily("zen_requests_waiting", "Sequences without a place", labels=["variant"])
        running = GaugeMetricFamily("zen_requests_running", "Sequences in the engine", labels=["variant"])
        size = GaugeMetricFamily("zen_variant_device_bytes", "Bytes on the device", labels=["variant"])
        for view in now.variants:
            resident = view.tier == "device"
            loaded.add_metric([view.name, view.tier, str(view.pinned).lower()], float(resident))
            queued.add_metric([view.name], view.queued)
            running.add_metric([view.name], view.running)
            size.add_metric([view.name], (view.device_bytes or 0) if resident else 0)
        yield from (loaded, queued, running, size)
        gauges = {
            "zen_ready": ("1: requests are taken", float(now.ready)),
            "zen_engine_alive": ("1: the engine's thread runs", float(engine.alive)),
            "zen_engine_heartbeat_age_seconds": (
                "Since the engine began a step or an idle wait",
                engine.heartbeat_age_s,
            ),
            "zen_kv_tokens_used": ("Tokens whose keys and values are held", engine.kv_tokens_used),
            "zen_kv_tokens": ("Tokens that fit", now.kv_tokens),
            "zen_device_variant_bytes_used": ("Bytes of all variants on the device", now.device_bytes_used),
            "zen_device_variant_bytes_budget": ("Bytes that variants may take", now.device_bytes_budget),
            "zen_loads_in_flight": ("Variants being loaded", now.loads_in_flight),
        }
        if host := engine.host:
            used = sum(host.resident.values())
            gauges["zen_host_variant_bytes_used"] = ("Bytes of all variants in host memory", used)
            gauges["zen_host_variant_bytes_budget"] = ("Host bytes that variants may take", host.budget_bytes)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        counters = {
            "zen_engine_steps": ("Forward passes", engine.steps),
            "zen_engine_preemptions": (
                "Sequences that lost their keys and values for want of room",
                engine.preemptions,
            ),
        }
        if host:
            counters["zen_host_hits"] = ("Loads whose variant was in host memory", host.hits)
            counters["zen_host_lookups"] = ("Loads that looked there", host.lookups)
            counters["zen_host_read_bytes"] = ("Bytes read from disk to host memory", host.read_bytes)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
