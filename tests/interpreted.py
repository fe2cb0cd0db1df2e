"""A module run in a process of its own with Triton's interpreter, which must be chosen before Triton is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path


def interpreted(module: str, *arguments: str, timeout_s: float):
    """What `python -m MODULE ARGUMENTS` prints as JSON on its last line; it must end well."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
