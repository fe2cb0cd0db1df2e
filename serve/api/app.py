"""The application: routes, error form and the gate in front of them.

Its lifespan starts the engine, the router, and what runs beside them (the page's samples, the look at the
variants' folder), and ends them in the opposite order.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from zen_train.serve.api.errors import install_error_handlers, log
from zen_train.serve.api.generate import generate_routes
from zen_train.serve.api.manage import manage_routes
from zen_train.serve.api.middleware import Gate
from zen_train.serve.api.observe import observe_routes
from zen_train.serve.api.openapi import document
from zen_train.serve.api.services import Services
from zen_train.serve.engine.interface import Engine
from zen_train.serve.types import Job, TokenEvent

_STOP_S = 10.0


async def _first_step(engine: Engine) -> None:
    """One token of the base, before the router looks: a first step may compile kernels for a minute."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def ended(event: TokenEvent) -> None:
        if event.finish is not None:
            loop.call_soon_threadsafe(done.set_result, None)

    job = Job(id="first-step", variant_hash=None, prompt_tokens=(0,), max_tokens=1, stop_tokens=frozenset())
    engine.submit(job, ended)
    await done


async def _stop(engine: Engine) -> None:
    """An engine that hangs in a step ends never; then the process ends without it."""
    stopping = threading.Thread(target=engine.stop, daemon=True)
    stopping.start()
    deadline_s = time.monotonic() + _STOP_S
    while stopping.is_alive() and time.monotonic() < deadline_s:
        await asyncio.sleep(0.01)
    if stopping.is_alive():
        log.error("the engine did not end within %g s; it is left behind", _STOP_S)


def create_app(
    services: Services, *, background: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
) -> ASGIApp:
    """The ASGI application of one server. `background` runs from start to end, beside the requests."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        services.engine.start()
        try:
            await _first_step(services.engine)
            await services.router.start()
            services.metrics.watch(services.router.snapshot, services.engine.stats)
            beside = [asyncio.create_task(work()) for work in (services.history.run, *background)]
            try:
                yield
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.wait(beside)
                await services.router.stop()
        finally:
            await _stop(services.engine)
            services.texts.close()

    app = FastAPI(
        title="zen_train.serve", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    install_error_handlers(app)
    for routes in (generate_routes(services), manage_routes(services), observe_routes(services)):
        app.include_router(routes)
    app.openapi = lambda: document(app, keys_required=services.keys.required)  # type: ignore[method-assign]
    return Gate(app, keys=services.keys, metrics=services.metrics, max_requests=services.limits.max_requests)
