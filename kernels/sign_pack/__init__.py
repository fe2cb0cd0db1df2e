"""Signs, scales, zero count and error norms of `W1 - W0` in one pass over both. See README.md."""

from zen_train.kernels.bitdelta_linear.reference import unpack_signs

from .op import PackedSigns, sign_pack

__all__ = ["PackedSigns", "sign_pack", "unpack_signs"]
