"""A run takes SIGINT and SIGTERM while it trains, and gives both back however it ends."""

import gc
import os
import signal
import weakref

import lightning as L
import pytest

from tests.small_run import small_run
from zen_train.callbacks.graceful_stop import SIGNALS, GracefulStop, RunInterrupted

HANDLERS = [signal.SIG_DFL, signal.SIG_IGN, lambda number, frame: None]


@pytest.fixture(params=HANDLERS, ids=["default", "ignored", "own"])
def handler(request):
    found = {number: signal.signal(number, request.param) for number in SIGNALS}
    yield request.param
    for number, former in found.items():
        signal.signal(number, former)


class AtStep(L.Callback):
    """Do something after the second step."""

    def __init__(self, act):
        self.act = act

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            self.act()


def nothing():
    pass


def fail():
    raise RuntimeError("a fault in the loop")


def send(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("act", "ends_with"),
    [
        (nothing, None),
        (fail, RuntimeError),
        (send(signal.SIGINT), RunInterrupted),
        (send(signal.SIGTERM), RunInterrupted),
    ],
    ids=["done", "failed", "interrupted", "terminated"],
)
def test_the_handlers_found_are_back_and_nothing_holds_the_run(tiny_base, tmp_path, handler, act, ends_with):
    """Lightning's own handler stayed in place once: the process no longer ended on SIGTERM, and kept the model."""
    stop = GracefulStop(tmp_path / "checkpoints" / "last.ckpt")
    run = small_run(tiny_base, tmp_path, max_steps=4, extra_callbacks=(AtStep(act), stop))
    if ends_with is None:
        run.fit()
    else:
        with pytest.raises(ends_with):
            run.fit()
    assert [signal.getsignal(number) for number in SIGNALS] == [handler, handler]
    assert run.trainer.global_step == (4 if ends_with is None else 2)
    module = weakref.ref(run.module)
    del run, stop
    gc.collect()
    assert module() is None
