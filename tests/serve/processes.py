"""The server as a user starts it: a process of its own, on the tiny base, with variants exported on the spot."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import torch

from zen_train.base import Base
from zen_train.delta import BaseInfo, StateDictSource, write_artifact


def export(base: Base, folder: Path, variant: str, *, seed: int, step: float = 0.05) -> Path:
    """A variant that moved every parameter by noise, with the base's tokenizer files."""
    generator = torch.Generator().manual_seed(seed)
    source = base.source()
    tuned = {
        name: source.get(name).float() + step * torch.randn(source.get(name).shape, generator=generator)
        for name in source.names()
    }
    files = [
        base.folder / name for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    ]
    write_artifact(
        folder,
        base=source,
        tuned=StateDictSource(tuned),
        base_info=BaseInfo.from_folder(base.folder, name=base.name),
        variant=variant,
        step=seed,
        embedding="sign",
        sidecars=[file for file in files if file.exists()],
        overwrite=True,
    )
    return folder


class ServerProcess:
    """A running `python -m zen_train.serve`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self.url = ""
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"serving (http://[^/]+)/v1", line):
                self.url = found[1]
                self._started.set()
        self._started.set()

    def wait_until_it_serves(self, timeout_s: float = 120) -> None:
        assert self._started.wait(timeout_s), self.output()
        assert self.url, self.output()

    def output(self) -> str:
        return "".join(self.said)

    def wait(self, timeout_s: float = 60) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def until(self, condition, what: str, timeout_s: float = 60) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"never: {what}\n{self.output()}"
            time.sleep(0.05)


@contextlib.contextmanager
def server_process(*words: str, cwd: Path, **environment: str) -> Iterator[ServerProcess]:
    """The process is killed at the end of the block, if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "zen_train.serve", *words],
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "COLUMNS": "120",
            **environment,
        },
    )
    running = ServerProcess(process)
    try:
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
