"""Programs that go wrong in every way are survived, counted as a fail, and leave nothing behind."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import pytest
import tasks_sandbox
from tasks_sandbox import Limits, run_program

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="no sandbox here"
)
PLENTY = {"cpu_s": 60, "wall_s": 100.0}
"""A case tightens the one limit that it is about: on a busy machine no other ends the program first."""
TIGHT: dict[str, dict[str, float]] = {
    "processor time is up": {"cpu_s": 1},
    "SIGKILL": {"cpu_s": 1},
    "still running": {"wall_s": 2.0},
    "": {"memory_bytes": 1 << 27},  # ends somehow where its stack does
}


def verdict(program: str, **limits):
    return run_program(program, Limits(**PLENTY | limits))


@pytest.fixture
def outside(tmp_path):
    (tmp_path / "kept").write_text("kept")
    return tmp_path


WRONG = {
    "wrong answer": ("assert sum([1, 2]) == 4", "AssertionError"),
    "no Python": ("def f(:\n    pass", "SyntaxError"),
    "endless loop": ("while True: pass", "processor time is up"),
    "endless loop that ignores signals": (
        "import signal\nfor s in (1, 2, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "SIGKILL",
    ),
    "endless sleep": ("import time\ntime.sleep(1000)", "still running"),
    "closed output and sleep": (
        "import os, time\nos.close(1); os.close(2)\ntime.sleep(1000)",
        "still running",
    ),
    "memory hog": ("x = [0] * 10**11", "MemoryError"),
    "memory hog, bit by bit": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "MemoryError"),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f() + 1\nf()", ""),
    "fork bomb": (
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        "forbidden system call",
    ),
    "thread": ("import threading\nthreading.Thread(target=print).start()", "forbidden system call"),
    "other program": ("import subprocess\nsubprocess.run(['/bin/true'])", "forbidden system call"),
    "prints gigabytes": ("while True: print('x' * 10**6)", "printed more than"),
    "prints gigabytes of errors": ("import os\nwhile True: os.write(2, b'x' * 10**6)", "printed more than"),
    "sys.exit": ("import sys\nsys.exit(0)", "ended before its last line"),
    "os._exit": ("import os\nos._exit(0)", "ended before its last line"),
    "kills its parent": ("import os\nos.kill(os.getppid(), 9)", "forbidden system call"),
    "kills its group": ("import os\nos.killpg(0, 9)", "forbidden system call"),
    "writes outside": ("open('{outside}/new', 'w')", "forbidden system call"),
    "appends outside": ("open('{outside}/kept', 'a')", "forbidden system call"),
    "removes a file": ("import os\nos.remove('{outside}/kept')", "forbidden system call"),
    "renames a file": ("import os\nos.rename('{outside}/kept', '{outside}/gone')", "forbidden system call"),
    "makes a folder": ("import os\nos.mkdir('{outside}/new')", "forbidden system call"),
    "fills its own folder": ("open('big', 'wb').write(bytes(1 << 30))", "forbidden system call"),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "forbidden system call"),
    "raises its limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        "forbidden system call",
    ),
}


@pytest.mark.parametrize(("program", "reason"), WRONG.values(), ids=WRONG)
def test_a_program_that_goes_wrong_fails_and_changes_nothing(program, reason, outside):
    parent, before = os.getpid(), set(Path(tempfile.gettempdir()).glob("candidate-*"))
    started = time.monotonic()
    found = verdict(program.replace("{outside}", str(outside)), **TIGHT.get(reason, {}))
    assert not found.passed
    assert reason in found.reason
    assert time.monotonic() - started < 15
    assert os.getpid() == parent
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert (outside / "kept").read_text() == "kept"
    assert set(Path(tempfile.gettempdir()).glob("candidate-*")) <= before


def test_an_honest_program_passes():
    assert verdict("print('fine')\nassert sorted([2, 1]) == [1, 2]").passed
    assert verdict("import collections, datetime, hashlib, heapq, itertools, math, random, re, string").passed


def test_a_program_sees_no_environment_and_no_installed_packages(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_USER", "1")
    assert verdict("import os\nassert not os.environ, os.environ").passed
    assert "ModuleNotFoundError" in verdict("import torch").reason
    assert "ModuleNotFoundError" in verdict("import tasks_sandbox").reason


def test_sets_iterate_alike_every_time():
    program = "raise ValueError([*{'one', 'two', 'three', 'four', 'five', 'six'}])"
    assert len({verdict(program).reason for _ in range(4)}) == 1


def test_nothing_runs_where_there_is_no_sandbox(monkeypatch, tmp_path):
    other = tmp_path / "tasks_jail.py"
    text = tasks_sandbox._JAIL.read_text()
    other.write_text(text.replace("platform.machine()", "'riscv64'"))
    monkeypatch.setattr(tasks_sandbox, "_JAIL", other)
    with pytest.raises(RuntimeError, match="needs Linux on x86_64 or aarch64, this is linux on riscv64"):
        verdict("print('ran')")
