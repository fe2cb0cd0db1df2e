"""The forward of a Llama-style stack of blocks with one-bit deltas per token, over a paged KV pool. See README.md."""

from .op import decoder_stack, head_logits, rms_norm, top_scores, use_huge_pages
from .prepare import PreparedBlocks, prepare_blocks
from .types import Block, DecoderShape, KvPool, Rotary, TokenBatch

__all__ = [
    "Block",
    "DecoderShape",
    "KvPool",
    "PreparedBlocks",
    "Rotary",
    "TokenBatch",
    "decoder_stack",
    "head_logits",
    "prepare_blocks",
    "rms_norm",
    "top_scores",
    "use_huge_pages",
]
