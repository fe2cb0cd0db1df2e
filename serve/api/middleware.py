"""Around every request: keys, the number of requests in flight, counting, headers, and the last net for faults.

Plain ASGI: a streamed answer passes through without a task or a queue in between.
"""

from __future__ import annotations

import time

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zen_train.serve.api.errors import error_response, log
from zen_train.serve.api.keys import Keys
from zen_train.serve.api.metrics import Metrics
from zen_train.serve.errors import OverloadedError, ServeError

_ALWAYS = ("/health", "/ready", "/metrics")  # answered however many requests are in flight
_CLIENT_GONE = 499  # nginx's code; it is counted, never sent
_HEADERS = [(b"x-content-type-options", b"nosniff")]


class Gate:
    """The outermost application."""

    def __init__(self, app: ASGIApp, *, keys: Keys, metrics: Metrics, max_requests: int) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._max_requests = max_requests
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, complete = 0, False

        async def counted(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        started = time.perf_counter()
        self._in_flight += 1
        try:
            self._admit(scope)
            await self._app(scope, receive, counted)
        except ClientDisconnect:
            status = status or _CLIENT_GONE
        except Exception as error:
            if status and not complete:
                raise  # part of an answer is out; uvicorn logs it and closes the connection
            if not isinstance(error, ServeError) and not complete:
                log.error("a request failed", exc_info=error)
            if not complete:  # else Starlette raises again what it has answered
                await error_response(error)(scope, receive, counted)
        finally:
            self._in_flight -= 1
            route = getattr(scope.get("route"), "path", None) or "other"
            self._metrics.request(route, status or _CLIENT_GONE, time.perf_counter() - started)

    def _admit(self, scope: Scope) -> None:
        path = scope["path"]
        if self._in_flight > self._max_requests and path not in _ALWAYS:
            raise OverloadedError(
                f"{self._max_requests} requests are being answered; try again", retry_after_s=1.0
            )
        self._keys.check(path, dict(scope["headers"]))
