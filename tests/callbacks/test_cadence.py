"""Every N optimizer steps, whatever path the counter takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zen_train.callbacks.cadence import Cadence


def test_fires_on_every_multiple():
    cadence = Cadence(3)
    assert [step for step in range(1, 11) if cadence.due(step)] == [3, 6, 9]


def test_a_skipped_multiple_is_made_up_for_at_the_next_step():
    """Lightning #17958: `step % n == 0` never fires when the counter jumps over the multiple."""
    cadence = Cadence(10)
    assert [step for step in (7, 9, 11, 12, 19, 23) if cadence.due(step)] == [11, 23]


def test_a_step_seen_again_does_not_fire_twice():
    """Accumulation: the counter stays where it is for several micro-batches."""
    cadence = Cadence(5)
    assert [cadence.due(step) for step in (5, 5, 5, 6)] == [True, False, False, False]


@pytest.mark.parametrize("resumed_at", [4, 5, 6])
def test_a_resumed_cadence_goes_on_where_it_was(resumed_at):
    whole, first = Cadence(5), Cadence(5)
    fired = [step for step in range(1, 21) if whole.due(step)]
    again = [step for step in range(1, resumed_at + 1) if first.due(step)]
    second = Cadence(5)
    second.last_step = first.last_step
    again += [step for step in range(resumed_at + 1, 21) if second.due(step)]
    assert again == fired


@given(st.integers(1, 50), st.lists(st.integers(0, 20), max_size=60))
def test_fires_once_per_turn_entered(every, increments):
    cadence, step, fired = Cadence(every), 0, 0
    turns = set()
    for increment in increments:
        step += increment
        if step // every > 0:
            turns.add(step // every)
        fired += cadence.due(step)
    assert fired == len(turns)
