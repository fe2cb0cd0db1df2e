"""Start one test function on two processes with gloo, and bring back what rank 0 and rank 1 return or raise."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def on_two_ranks(script: str, *arguments: str, timeout_s: float = 240.0) -> list[Any]:
    """Run a script under the variables that torch.distributed reads; each rank prints one line of JSON last.

    Raises:
        AssertionError: a rank failed; its standard error is the message.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "NODE_RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(printed.strip().splitlines()[-1]) for printed, _ in outputs]
