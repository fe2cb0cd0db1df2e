"""What the operators share: the banks of deltas, argument checks, the choice of a backend."""

from .backend import BACKENDS, choose_backend
from .bank import DeltaBank
from .direction_bank import DirectionBank, has_room, homes, stacked_rows

__all__ = ["BACKENDS", "DeltaBank", "DirectionBank", "choose_backend", "has_room", "homes", "stacked_rows"]
