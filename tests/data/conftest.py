"""A cache folder of its own for each data test that is not marked real."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _own_cache(request, monkeypatch, tmp_path_factory):
    if request.node.get_closest_marker("real") is None:
        monkeypatch.setenv("ZEN_TRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
