"""`y += D x` for coded singular directions of many variants at once. See README.md."""

from zen_train.kernels.common import DirectionBank

from .op import direction_rows, directions_add_
from .reference import dense_directions, fold

__all__ = ["DirectionBank", "dense_directions", "direction_rows", "directions_add_", "fold"]
