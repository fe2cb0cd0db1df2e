"""A disk that fills up is one clear error wherever in a file that happens, and the file before is kept."""

import os
import subprocess
import sys

import pytest
import torch

from zen_train.callbacks.disk import whole_file

WRITE_UNTIL_FULL = """
import resource, signal, sys
from pathlib import Path
import torch
from zen_train.callbacks.disk import whole_file
from zen_train.errors import TrainingError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path, weights = Path(sys.argv[1]), {f"w{number}": torch.ones(4000) for number in range(6)}
size, before = int(sys.argv[2]), path.read_bytes()
for limit in [*range(1, size, 1999), *range(size - 1500, size, 97), size - 1]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        with whole_file(path) as temporary:
            torch.save(weights, temporary)
    except TrainingError as error:
        assert "Free space" in str(error) and "is kept" in str(error), error
    else:
        raise AssertionError(f"{limit} of {size} bytes were enough")
    assert path.read_bytes() == before and not list(path.parent.glob(".*")), limit
"""


def test_a_checkpoint_that_does_not_fit_is_named_wherever_the_disk_ends(tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({f"w{number}": torch.ones(4000) for number in range(6)}, path)
    done = subprocess.run(
        [sys.executable, "-c", WRITE_UNTIL_FULL, str(path), str(path.stat().st_size)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_another_error_while_writing_stays_itself(tmp_path):
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), whole_file(tmp_path / "last.ckpt"):
        raise RuntimeError("shapes differ")
