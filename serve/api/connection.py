"""The connection below the application: uvicorn's httptools protocol with bounds for slow, silent and greedy clients.

uvicorn waits for ever for a request that never comes or never ends, keeps headers of any size, and keeps
what a client does not read. Here each has a bound: headers in time and size, open connections, and how long
a client may take nothing of its answer. The body's own bounds are in `body.py`.
"""

from __future__ import annotations

import asyncio
import http
from dataclasses import dataclass
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one connection, and how many there may be."""

    max_header_bytes: int
    max_connections: int
    header_timeout_s: float
    write_timeout_s: float


class BoundedProtocol(HttpToolsProtocol):
    """One client connection. Subclassed by `bounded_protocol`, which sets the limits."""

    limits: ConnectionLimits

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(
                503,
                "overloaded",
                f"{self.limits.max_connections} connections are open; try again",
                retry=True,
            )
            return
        self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._head_is_late)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._head_is_late)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.limits.max_header_bytes:
            self._refuse(431, "headers_too_large", f"headers exceed {self.limits.max_header_bytes} bytes")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to bytes that are no HTTP request."""
        if not self.transport.is_closing():
            self._refuse(400, "bad_request", msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(
                408, "request_timeout", f"no complete request after {self.limits.header_timeout_s:g} s"
            )

    def _refuse(self, status: int, code: str, message: str, *, retry: bool = False) -> None:
        """Answer in OpenAI's form and close, unless an answer is on its way already."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        kind = "server_error" if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        body = orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
        head = [
            STATUS_LINE[status],
            b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body),
            b"retry-after: 1\r\n" if retry else b"",
            b"\r\n",
        ]
        self.transport.write(b"".join([*head, body]))
        self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def bounded_protocol(limits: ConnectionLimits) -> type[BoundedProtocol]:
    """The protocol class that uvicorn is given."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})
