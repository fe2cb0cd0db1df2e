"""The one-bit code of trained weights, `W0 + alpha * sign(L - W0)`, in one pass over both. See README.md."""

from .op import one_bit_code_

__all__ = ["one_bit_code_"]
