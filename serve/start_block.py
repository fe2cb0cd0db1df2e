"""What a user sees when the server starts: base, variants, what is broken and why, budgets, and the address."""

from __future__ import annotations

from ipaddress import ip_address

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zen_train.base import Base
from zen_train.serve.api.services import Services
from zen_train.serve.config import ServeConfig
from zen_train.serve.router.snapshot import RouterSnapshot

_SHOWN = 40


def show_start(console: Console, config: ServeConfig, services: Services, base: Base, *, url: str) -> None:
    """Print the block. Called once the port answers."""
    now, limits = services.router.snapshot(), services.engine.limits
    variants = [view for view in now.variants if view.content_hash is not None]
    console.print(
        f"[bold]{escape(services.base.name)}[/]  {escape(base.revision)}  {base.fingerprint.root[:12]}"
    )
    if variants:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("variant", "on the device", "content"):
            table.add_column(heading, justify="right" if heading == "on the device" else "left")
        for view in variants[:_SHOWN]:
            table.add_row(escape(view.name), _bytes(view.device_bytes), (view.content_hash or "")[:12])
        console.print(table)
        if len(variants) > _SHOWN:
            console.print(f"and {len(variants) - _SHOWN} more")
    elif not services.catalogue.broken:
        console.print(
            f"no variants in {escape(config.variants)} yet: the base is served; train one with "
            "python -m zen_train +variant=coder",
            soft_wrap=True,
        )
    for broken in services.catalogue.broken:
        console.print(f"[yellow]not served:[/] {escape(broken.reason)}", soft_wrap=True)
    budget = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("budget", "", ""):
        budget.add_column(heading)
    wanted = sum(view.device_bytes or 0 for view in variants)
    budget.add_row("variants", _bytes(limits.variant_bytes), f"all that were found take {_bytes(wanted)}")
    if host := services.engine.stats().host:
        budget.add_row("host memory", _bytes(host.budget_bytes), "keeps variants that leave the device")
    budget.add_row(
        "keys and values",
        f"{limits.kv_tokens} tokens",
        f"context {services.bounds.context_tokens} tokens a request",
    )
    budget.add_row("sequences", str(limits.max_jobs), f"{config.router.max_queue_total} more may wait")
    console.print(budget)
    if not services.keys.required and not _is_loopback(config.host):
        console.print(
            f"[yellow]open to everybody who reaches {escape(config.host)}: set ZEN_SERVE_API_KEYS to ask for a key[/]"
        )
    console.print(
        f"[bold green]serving[/] {url}/v1   status page {url}/   Ctrl+C drains and ends", soft_wrap=True
    )


def show_drain(console: Console, now: RouterSnapshot, *, drain_s: float) -> None:
    """One line when the first signal comes."""
    left = now.running + now.queued
    console.print(f"draining: {left} requests, at most {drain_s:g} s; a second signal ends at once")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bytes(size: int | None) -> str:
    if size is None:
        return "unknown"
    value = float(size)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
