"""Freed memory stays with the process: tensors of many sizes, as a step of training allocates and frees them."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from zen_train.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def use():
    return [torch.ones(n << 18) for n in range(1, 33)] and None
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_a_large_tensor_is_not_faulted_in_again():
    def faults(mode):
        done = subprocess.run(
            [sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert faults("keep") * 10 < faults("as it is")
