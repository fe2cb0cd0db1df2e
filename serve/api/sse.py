"""A streamed answer as server-sent events, and the watch for a client that goes away.

Several choices write to one connection as their tokens come. A client that leaves cancels them all. Slow
readers are dealt with below, in the connection (`connection.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from zen_train.serve.api.choice import Choice, Piece
from zen_train.serve.api.errors import error_body, log
from zen_train.serve.api.forms import DONE
from zen_train.serve.errors import ServeError

_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

Produce = Callable[[Callable[[bytes], Awaitable[None]]], Awaitable[None]]


class EventStream(Response):
    """Runs `produce(write)`; `write` sends bytes of whole events. `cancel` is called when the client leaves.

    An error after the first byte can change no status: it is sent as an event of OpenAI's error form.
    """

    def __init__(self, produce: Produce, *, cancel: Callable[[], None]) -> None:
        super().__init__(headers=_HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._produce = produce
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(events: bytes) -> None:
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})

        async with cancelled_when_gone(receive, self._cancel):
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            try:
                await self._produce(write)
            except Exception as error:
                if not isinstance(error, ServeError):
                    log.error("a stream failed", exc_info=error)
                await write(b"data: " + orjson.dumps({"error": error_body(error)}) + b"\n\n")
            finally:
                self._cancel()
            await send({"type": "http.response.body", "body": DONE, "more_body": False})


@asynccontextmanager
async def cancelled_when_gone(receive: Receive, cancel: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `cancel` as soon as the client has left. The request's body has been read before."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])


async def for_each(choices: Sequence[Choice], work: Callable[[Choice], Awaitable[Any]]) -> list[Any]:
    """`work` on all choices side by side; the first error ends the others and is raised."""
    if len(choices) == 1:
        return [await work(choices[0])]
    tasks = [asyncio.ensure_future(work(choice)) for choice in choices]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for choice in choices:
            choice.ticket.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


__all__ = ["EventStream", "Piece", "cancelled_when_gone", "for_each"]
