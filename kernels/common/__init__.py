"""What the operators share: the bank of deltas, argument checks, the choice of a backend."""

from .backend import BACKENDS, choose_backend
from .bank import DeltaBank

__all__ = ["BACKENDS", "DeltaBank", "choose_backend"]
