"""`y = x W0^T + bias + alpha * (x S^T)` for tokens of many variants at once. See README.md for the derivation."""

from zen_train.kernels.common import DeltaBank

from .op import FOLD_TOKENS, bitdelta_add_, bitdelta_linear
from .reference import dense_delta, round_folded, unpack_signs

__all__ = [
    "FOLD_TOKENS",
    "DeltaBank",
    "bitdelta_add_",
    "bitdelta_linear",
    "dense_delta",
    "round_folded",
    "unpack_signs",
]
