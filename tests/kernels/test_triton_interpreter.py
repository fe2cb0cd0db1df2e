"""The Triton kernels under the interpreter, in a process of their own."""

import pytest

from tests.interpreted import interpreted

pytest.importorskip("triton")


def test_every_case_passes_under_the_interpreter():
    verdicts = interpreted("tests.kernels.interpreter", timeout_s=200)
    assert len(verdicts) > 40
    assert [name for name, passed in verdicts.items() if not passed] == []
