"""One server for the tests that change nothing of it."""

from __future__ import annotations

import pytest

from tests.serve.api.stage import Stage, serving


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Stage:
    with serving(tmp_path_factory.mktemp("stage")) as running:
        yield running


@pytest.fixture(scope="module")
def client(stage):
    return stage.client()
