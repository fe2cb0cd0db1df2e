"""Engines: what turns jobs into tokens. `interface.Engine` is what the router knows of them."""

from zen_train.serve.engine.config import EngineConfig
from zen_train.serve.engine.interface import Engine, Sink
from zen_train.serve.engine.torch_engine import TorchEngine

__all__ = ["Engine", "EngineConfig", "Sink", "TorchEngine"]
