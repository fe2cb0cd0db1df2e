"""Row look-up of an embedding with a one-bit delta per variant; the head is `bitdelta_linear`. See README.md."""

from .op import bitdelta_embedding

__all__ = ["bitdelta_embedding"]
