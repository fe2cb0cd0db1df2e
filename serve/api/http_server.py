"""uvicorn with a graceful end: SIGTERM or Ctrl+C drains, a second signal ends at once.

While it drains the port stays open, so that `/ready` can answer 503 and a load balancer sees it before
connections fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from zen_train.errors import ConfigError
from zen_train.serve.api.connection import ConnectionLimits, bounded_protocol

_CLOSE_S = 5  # after the drain: for connections to take the last bytes of their answers
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


def listen(host: str, port: int, *, backlog: int = 1024) -> socket.socket:
    """A listening socket, taken before a model is loaded so that a port in use is told at once.

    Raises:
        ConfigError: the address cannot be taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit these: a client that vanished without a word is noticed within a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        listener.bind((host, port))
        listener.listen(backlog)
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}. Choose another with port=NUMBER (port=0 takes a free one) "
            "or host=ADDRESS."
        ) from error
    listener.setblocking(False)
    return listener


def address(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class DrainingServer(uvicorn.Server):
    """`serve(sockets=[...])` returns after the drain.

    `drain` is awaited once, on the first signal; `end_at_once` is called on the second, and need not return.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: ConnectionLimits,
        keep_alive_s: int,
        on_started: Callable[[], None],
        drain: Callable[[], Awaitable[None]],
        end_at_once: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_protocol(limits),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=keep_alive_s,
                timeout_graceful_shutdown=_CLOSE_S,
            )
        )
        self._on_started = on_started
        self._drain = drain
        self._end_at_once = end_at_once
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close connections and end the application."""
        await super().shutdown(sockets=sockets)
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.wait([self._draining])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal, in the main thread between two bytecodes: hand it to the loop."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has just ended
            self._loop.call_soon_threadsafe(self.end, signal.Signals(sig).name)

    def end(self, _why: str) -> None:
        """First call: drain, then stop. Second call: `end_at_once`."""
        if self._draining is not None:
            self._end_at_once()
            return

        async def drain_then_stop() -> None:
            try:
                await self._drain()
            finally:
                self.should_exit = True

        self._draining = asyncio.create_task(drain_then_stop())
