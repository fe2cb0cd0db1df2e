"""Servers as processes for the serving benchmarks: started, waited for, measured, ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class ServerProcess:
    """A server that answers `/v1/models` under `url`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def memory_bytes(self) -> int:
        """Proportional set size of the process and its children: shared pages are counted once."""
        return sum(_pss_bytes(pid) for pid in _family(self.process.pid))

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.root + path, timeout=10) as answer:
            return answer.read().decode()

    def metric(self, name: str) -> float:
        """Sum over all series of a Prometheus metric."""
        lines = (
            line for line in self.get("/metrics").splitlines() if line.split("{")[0].split(" ")[0] == name
        )
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def post(self, path: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(
            self.root + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=120).read()


@contextmanager
def server(
    command: list[str], log: Path, *, timeout_s: float = 300, **environment: str
) -> Iterator[ServerProcess]:
    """Run `command PORT_OPTION` until the block ends; `{port}` in the command becomes a free port.

    Raises:
        RuntimeError: it ended, or did not answer in time; the end of its log is the message.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.replace("{port}", str(port)) for word in command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        found = ServerProcess(process, f"http://127.0.0.1:{port}/v1", log)
        _wait(found, timeout_s)
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ours(variants: Path, log: Path, *settings: str) -> Any:
    """Our server over a folder of variants."""
    command = [sys.executable, "-m", "zen_train.serve", f"variants={variants}", "port={port}", *settings]
    return server(command, log)


def _wait(found: ServerProcess, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found.process.poll() is not None:
            break
        try:
            found.get("/v1/models")
            return
        except OSError:
            time.sleep(0.25)
    tail = found.log.read_text(errors="replace")[-3000:]
    raise RuntimeError(f"the server did not answer under {found.url}:\n{tail}")


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    own = [int(child) for child in children.read_text().split()] if children.exists() else []
    return [pid, *(member for child in own for member in _family(child))]


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no line Pss")
