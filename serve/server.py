"""The composition root: base, engine, catalogue, router and application, put together and run until a signal.

It knows every part by its constructor and none by its insides; HTTP itself is in `serve/api`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from zen_train.base import Base, prepare_base
from zen_train.serve.api.app import create_app
from zen_train.serve.api.connection import ConnectionLimits
from zen_train.serve.api.history import History
from zen_train.serve.api.http_server import DrainingServer, address, listen
from zen_train.serve.api.keys import Keys
from zen_train.serve.api.metrics import Metrics
from zen_train.serve.api.plan import Bounds
from zen_train.serve.api.services import BaseFacts, RequestLimits, Services
from zen_train.serve.api.text import TextModels
from zen_train.serve.config import ServeConfig
from zen_train.serve.engine.torch_engine import TorchEngine
from zen_train.serve.errors import EngineDeadError, ServeError
from zen_train.serve.router.router import Router
from zen_train.serve.start_block import show_drain, show_start
from zen_train.serve.store import Catalogue

log = logging.getLogger("zen_train.serve")

_FORCED = 130


@dataclass(frozen=True, kw_only=True)
class Stack:
    """One server's parts, not started yet."""

    base: Base
    engine: TorchEngine
    catalogue: Catalogue
    router: Router
    services: Services


def build(config: ServeConfig) -> Stack:
    """Load the base, take the engine's memory, look at the variants.

    Raises:
        BaseModelError: the base is missing or of a kind that is not served.
        ConfigError: settings that do not fit it.
    """
    base = prepare_base(config.base)
    base_name = config.base_name or Path(base.name).name
    engine = TorchEngine.from_folder(base.folder, config.engine, fingerprint=base.fingerprint)
    catalogue = Catalogue(
        Path(config.variants).expanduser(),
        base=base.fingerprint,
        base_label=base_name,
        prefix=config.name_prefix,
        reserved=[base_name],
        size_of=engine.device_bytes,
    )
    metrics = Metrics()
    router = Router(engine, catalogue, config.router, base_name=base_name, metrics=metrics)
    limits = config.limits
    context_tokens = min(engine.limits.context_tokens, engine.limits.kv_tokens)
    services = Services(
        base=BaseFacts(
            name=base_name,
            folder=base.folder,
            fingerprint=base.fingerprint.root,
            created_unix_s=int((base.folder / "config.json").stat().st_mtime),
        ),
        engine=engine,
        catalogue=catalogue,
        router=router,
        texts=TextModels(),
        metrics=metrics,
        history=History(router.snapshot, engine.stats),
        keys=Keys(
            [key.get_secret_value() for key in config.api_keys],
            [key.get_secret_value() for key in config.admin_keys],
        ),
        bounds=Bounds(
            context_tokens=context_tokens,
            max_prompt_tokens=limits.max_prompt_tokens or context_tokens,
            max_output_tokens=limits.max_output_tokens or context_tokens,
            max_choices=limits.max_choices,
        ),
        limits=RequestLimits(
            max_body_bytes=limits.max_body_bytes,
            body_timeout_s=limits.body_timeout_s,
            max_requests=limits.max_requests,
        ),
    )
    return Stack(base=base, engine=engine, catalogue=catalogue, router=router, services=services)


def run(config: ServeConfig, console: Console) -> int:
    """Serve until a signal; returns the exit code. The port is taken before anything is loaded.

    Raises:
        ZenTrainError: what a user can put right.
    """
    listener = listen(config.host, config.port)
    try:
        with console.status(f"loading {config.base.name} ..."):
            stack = build(config)
    except BaseException:
        listener.close()
        raise
    limits = config.limits

    async def drain() -> None:
        show_drain(console, stack.router.snapshot(), drain_s=config.drain_s)
        cut_off = await stack.router.drain(config.drain_s)
        if cut_off:
            log.warning("%d requests were not finished within %g s and were cut off", cut_off, config.drain_s)

    server = DrainingServer(
        create_app(
            stack.services,
            background=[
                partial(_pin, stack, config),
                partial(_verify, stack, config),
                partial(_follow, stack, config),
            ],
        ),
        limits=ConnectionLimits(
            max_header_bytes=limits.max_header_bytes,
            max_connections=limits.max_connections,
            header_timeout_s=limits.header_timeout_s,
            write_timeout_s=limits.write_timeout_s,
        ),
        keep_alive_s=limits.keep_alive_s,
        on_started=lambda: show_start(console, config, stack.services, stack.base, url=address(listener)),
        drain=drain,
        end_at_once=lambda: _exit_now(_FORCED),
    )
    server.run(sockets=[listener])
    return 0


def _exit_now(code: int) -> None:
    """Without waiting for any thread or task; the system closes what is open."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


async def _pin(stack: Stack, config: ServeConfig) -> None:
    """Bring what `pin` names to the device. A name that is not there, or does not fit, is said and passed over."""
    for name in config.pin:
        try:
            await stack.router.pin(name)
        except ServeError as error:
            log.warning("pin=%s: %s", name, error)


async def _verify(stack: Stack, config: ServeConfig) -> None:
    """Check each artifact once, ahead of its first load, so that a cold load is a copy. One that fails says so
    again when it is asked for.
    """
    checked: set[str] = set()
    while True:
        for variant in list(stack.catalogue.variants.values()):
            if variant.content_hash in checked:
                continue
            checked.add(variant.content_hash)
            try:
                await asyncio.to_thread(stack.engine.verify, variant.folder)
            except ServeError as error:
                log.warning("%s: %s", variant.name, error)
        if config.rescan_s is None:
            return
        await asyncio.sleep(config.rescan_s)


async def _follow(stack: Stack, config: ServeConfig) -> None:
    """Serve what is exported while the server runs, until the engine is dead."""
    if config.rescan_s is None:
        return
    known = {(broken.folder, broken.reason) for broken in stack.catalogue.broken}
    while True:
        await asyncio.sleep(config.rescan_s)
        try:
            changes = await stack.router.refresh()
        except EngineDeadError:
            return
        for what in ("added", "replaced", "removed"):
            if names := getattr(changes, what):
                print(f"{what}: {', '.join(names)}", file=sys.stderr)
        now = {(broken.folder, broken.reason) for broken in stack.catalogue.broken}
        for _, reason in sorted(now - known):
            log.warning("not served: %s", reason)
        known = now
