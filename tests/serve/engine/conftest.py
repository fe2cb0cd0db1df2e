"""Families of tiny models, made once a session."""

from __future__ import annotations

import pytest

from tests.serve.engine.models import Family, engine_of, make_family


@pytest.fixture(scope="session")
def family(tmp_path_factory) -> Family:
    return make_family(tmp_path_factory.mktemp("llama-tied"))


@pytest.fixture
def start(family):
    """`start(**options)` gives a started engine of the family, stopped after the test and its state checked."""
    engines = []

    def make(of: Family = family, **options):
        engines.append(engine_of(of, **options))
        return engines[-1]

    yield make
    for engine in engines:
        dead = engine.stats().death
        engine.stop()
        if not dead:
            engine._scheduler.check()
