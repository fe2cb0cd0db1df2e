"""Health, readiness, metrics, version, and the status page with the one document it polls.

`/health` says that the process answers, nothing else: it stays 200 while the engine is dead, so that
whoever restarts on liveness decides by `/ready`, which is 503 while requests would not be answered (engine
dead or hung, draining).
"""

from __future__ import annotations

import math
import sys
import time
from importlib import metadata, resources
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from zen_train.serve.api.errors import json_response
from zen_train.serve.api.services import Services
from zen_train.serve.router.snapshot import VariantView
from zen_train.serve.types import HostStats

_PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
}


def observe_routes(services: Services) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    started_s = time.time()

    @routes.get("/health", operation_id="health")
    async def health() -> Response:
        """Liveness: this process answers."""
        return json_response({"status": "ok"})

    @routes.get("/ready", operation_id="ready")
    async def ready() -> Response:
        """Readiness: requests are answered now. 503 with the reason otherwise."""
        now = services.router.snapshot()
        if now.ready:
            return json_response({"status": "ready"})
        return json_response(
            {"status": "not ready", "reason": now.why_not_ready}, status=503, headers={"Retry-After": "5"}
        )

    @routes.get("/metrics", operation_id="metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(services.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @routes.get("/version", operation_id="version")
    async def version() -> Response:
        """Versions of what serves."""
        packages = ("zen-train", "torch", "transformers")
        return json_response(
            {"version": _installed("zen-train"), "python": sys.version.split()[0]}
            | {name: _installed(name) for name in packages[1:]}
        )

    @routes.get("/status.json", operation_id="status")
    async def status() -> Response:
        """Everything the status page shows."""
        return json_response(status_document(services, uptime_s=time.time() - started_s))

    for path, (name, kind) in _PAGE.items():
        content = resources.files("zen_train.serve.api").joinpath("page", name).read_bytes()
        routes.add_api_route(path, _file(content, kind), methods=["GET"], include_in_schema=False)
    return routes


def status_document(services: Services, *, uptime_s: float) -> dict[str, Any]:
    """One consistent picture of router, engine and history."""
    now, engine = services.router.snapshot(), services.engine.stats()
    return {
        "base": services.base.name,
        "uptime_s": round(uptime_s),
        "ready": now.ready,
        "why_not_ready": now.why_not_ready,
        "draining": now.draining,
        "queued": now.queued,
        "running": now.running,
        "max_jobs": now.max_jobs,
        "loads_in_flight": now.loads_in_flight,
        "host": _host(engine.host),
        "device_bytes": {"used": now.device_bytes_used, "budget": now.device_bytes_budget},
        "kv_tokens": {"used": engine.kv_tokens_used, "budget": now.kv_tokens},
        "engine": {
            "alive": engine.alive,
            "death": engine.death,
            "heartbeat_age_s": round(engine.heartbeat_age_s, 3),
            "steps": engine.steps,
            "tokens_generated": engine.tokens_generated,
            "preemptions": engine.preemptions,
        },
        "variants": [_view(view) for view in now.variants],
        "broken": [{"name": broken.name, "reason": broken.reason} for broken in services.catalogue.broken],
        "history": services.history.columns(),
    }


def _host(host: HostStats | None) -> dict[str, int] | None:
    """None: there is no host tier."""
    if host is None:
        return None
    return {
        "used": sum(host.resident.values()),
        "budget": host.budget_bytes,
        "hits": host.hits,
        "lookups": host.lookups,
        "read_bytes": host.read_bytes,
    }


def _view(view: VariantView) -> dict[str, Any]:
    return {
        "name": view.name,
        "content_hash": view.content_hash,
        "tier": view.tier,
        "pinned": view.pinned,
        "device_bytes": view.device_bytes,
        "queued": view.queued,
        "running": view.running,
        "requests": view.requests,
        "failed": view.failed,
        "output_tokens": view.output_tokens,
        "hit_rate": view.hits / view.lookups if view.lookups else None,
        "loads": view.loads,
        "last_load_s": view.last_load_s,
        "requests_per_s": round(view.requests_per_s, 3),
        "tokens_per_s": round(view.tokens_per_s, 1),
        "first_token_p50_s": _rounded(view.first_token_p50_s),
        "first_token_p99_s": _rounded(view.first_token_p99_s),
        "first_token_recent_s": [round(seconds, 4) for seconds in view.first_token_recent_s],
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else round(seconds, 4)


def _file(content: bytes, kind: str) -> Any:
    async def send() -> Response:
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    return send


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
