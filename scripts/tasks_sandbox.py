"""Runs programs that a language model wrote, each in a process of its own (tasks_jail.py), and says which ended well.

A program passes when it runs to its end without an error, in time, in its memory, and prints little. Whatever else it
does (loop, exit early, fork, write, kill, print without end) is a fail, and touches nothing outside. It is made against
programs that go wrong, not against one that looks for the token of its verdict in the memory of its own interpreter.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tasks_jail import UNSUPPORTED

_JAIL = Path(__file__).with_name("tasks_jail.py")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`wall_s` is above `cpu_s`, so that a busy machine is not taken for an endless loop."""

    cpu_s: int = 5
    wall_s: float = 20.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 64 << 10


@dataclass(frozen=True)
class Verdict:
    """`reason`: empty for a pass, else the last line of the error or what ended the program."""

    passed: bool
    reason: str = ""


def run_program(program: str, limits: Limits | None = None) -> Verdict:
    """Run `program` as a script.

    Raises:
        RuntimeError: no sandbox on this platform. Nothing was run.
    """
    limits = limits or Limits()
    token = secrets.token_hex(16)
    settings = json.dumps({"cpu_s": limits.cpu_s, "memory_bytes": limits.memory_bytes})
    # Isolated: no site-packages, no folder of scripts on the path. Sets iterate in the same order every time.
    command = [sys.executable, "-s", "-S", "-P", "-B", str(_JAIL), settings]
    with tempfile.TemporaryDirectory(prefix="candidate-") as folder:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        try:
            output, stopped = _talk(process, f"{token}\n{program}".encode(), limits)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
    if process.returncode == UNSUPPORTED and token not in output:
        raise RuntimeError(f"programs cannot be run safely: {output.strip()}")
    if stopped:
        return Verdict(False, stopped)
    if process.returncode != 0:
        return Verdict(False, _ending(process.returncode, output))
    return Verdict(True) if token in output else Verdict(False, "ended before its last line")


def _talk(process: subprocess.Popen[bytes], text: bytes, limits: Limits) -> tuple[str, str]:
    """What the program printed, and why it was stopped (empty: it ended)."""
    deadline = time.monotonic() + limits.wall_s
    assert process.stdin is not None
    assert process.stdout is not None
    _send(process.stdin.fileno(), text, deadline)
    process.stdin.close()
    output = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left)[0]:
            break
        part = os.read(process.stdout.fileno(), 1 << 16)
        output += part
        if len(output) > limits.output_bytes:
            return "", f"printed more than {limits.output_bytes} bytes"
        if not part:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
            return output.decode(errors="replace"), ""
    return "", f"still running after {limits.wall_s:g} s"


def _send(pipe: int, text: bytes, deadline: float) -> None:
    """Write to a pipe whose reader may be slow or gone; what is not taken by the deadline is left."""
    os.set_blocking(pipe, False)
    while text and select.select([], [pipe], [], max(0.0, deadline - time.monotonic()))[1]:
        try:
            text = text[os.write(pipe, text[: 1 << 16]) :]
        except BrokenPipeError:
            return
        except BlockingIOError:
            continue


def _ending(code: int, output: str) -> str:
    if code >= 0:
        return (output.strip().splitlines() or [f"exit code {code}"])[-1]
    name = signal.Signals(-code).name
    return {"SIGSYS": "a forbidden system call", "SIGXCPU": "processor time is up"}.get(name, name)
