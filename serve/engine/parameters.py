"""Where each parameter of a checkpoint lies in the engine: rows of a fused matrix, or a stretch of a vector
table.

This is the one list that loading the base, loading a variant and counting bytes share. A name that it does
not hold belongs to no served model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

from zen_train.kernels.common import has_room, stacked_rows
from zen_train.serve.engine.architecture import Architecture

EMBEDDING, HEAD, FINAL_NORM = "embedding", "head", "final_norm"
UNUSED_BUFFERS = ("rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints store and that follow from config.json."""
_HOME_BYTES = 3  # of a stacked vector: which direction, which plane


@dataclass(frozen=True, kw_only=True)
class MatrixPlace:
    """Rows `first_row` to `first_row + rows` of the fused matrix `target`, its part number `part`."""

    target: str
    part: int
    first_row: int
    rows: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class VectorPlace:
    """Entries `first` to `first + size` of a row of the vector table `target`."""

    target: str
    first: int
    size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """Every parameter's place, and the sizes of what holds them."""

    matrices: dict[str, MatrixPlace]
    vectors: dict[str, VectorPlace]
    matrix_sizes: dict[str, tuple[int, int]]
    """target -> (rows, columns)."""
    vector_sizes: dict[str, int]
    parts: dict[str, tuple[int, ...]]
    """target -> rows of each parameter in it, in order."""
    tied: dict[str, str]
    """A second name of a parameter -> the name that holds the values."""

    @property
    def slot_bytes(self) -> int:
        """One sign plane of the whole model with its row scales, or coded directions in their place; and one row of
        the vector tables.
        """
        planes = sum(rows * ((columns + 7) // 8 + 4) for rows, columns in self.matrix_sizes.values())
        return (
            planes + _HOME_BYTES * sum(map(sum, self.stacked.values())) + 4 * sum(self.vector_sizes.values())
        )

    @cached_property
    def stacked(self) -> dict[str, tuple[int, ...]]:
        """target -> vectors of coded directions that a slot has room for in each of its parts; empty where the matrices
        are too small for any.
        """
        columns = {target: size[1] for target, size in self.matrix_sizes.items()}
        if not all(has_room(self.parts[target], k) for target, k in columns.items()):
            return {}
        return {
            target: tuple(stacked_rows(rows, k) for rows in self.parts[target])
            for target, k in columns.items()
        }

    def names(self) -> set[str]:
        """All parameters, second names left out."""
        return {*self.matrices, *self.vectors}


def block_target(layer: int, part: str) -> str:
    """How a fused matrix or a vector table of a block is called."""
    return f"{layer}.{part}"


def layout_of(architecture: Architecture) -> Layout:
    """The layout of a model, by the parameter names of transformers."""
    shape, hidden, mlp = architecture.decoder, architecture.hidden, architecture.mlp
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layout = Layout(matrices={}, vectors={}, matrix_sizes={}, vector_sizes={}, parts={}, tied={})

    def matrix(target: str, columns: int, parts: dict[str, int]) -> None:
        first = 0
        for part, (name, rows) in enumerate(parts.items()):
            layout.matrices[name] = MatrixPlace(
                target=target, part=part, first_row=first, rows=rows, columns=columns
            )
            first += rows
        layout.matrix_sizes[target] = (first, columns)
        layout.parts[target] = tuple(parts.values())

    def vector(target: str, parts: dict[str, int]) -> None:
        first = 0
        for name, size in parts.items():
            layout.vectors[name] = VectorPlace(target=target, first=first, size=size)
            first += size
        layout.vector_sizes[target] = first

    matrix(EMBEDDING, hidden, {"model.embed_tokens.weight": architecture.vocabulary})
    for layer in range(architecture.layers):
        attention, feed = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        at = partial(block_target, layer)
        vector(at("attention_norm"), {f"model.layers.{layer}.input_layernorm.weight": hidden})
        matrix(at("qkv"), hidden, {f"{attention}{part}.weight": rows for part, rows in sizes.items()})
        if architecture.qkv_bias:
            vector(at("qkv_bias"), {f"{attention}{part}.bias": rows for part, rows in sizes.items()})
        if architecture.head_norms:
            vector(at("q_norm"), {f"{attention}q_norm.weight": shape.head_dim})
            vector(at("k_norm"), {f"{attention}k_norm.weight": shape.head_dim})
        matrix(at("o"), queries, {f"{attention}o_proj.weight": hidden})
        vector(at("mlp_norm"), {f"model.layers.{layer}.post_attention_layernorm.weight": hidden})
        matrix(at("gate_up"), hidden, {f"{feed}{part}_proj.weight": mlp for part in ("gate", "up")})
        matrix(at("down"), mlp, {f"{feed}down_proj.weight": hidden})
    vector(FINAL_NORM, {"model.norm.weight": hidden})
    if architecture.tied:
        layout.tied["lm_head.weight"] = "model.embed_tokens.weight"
    else:
        matrix(HEAD, hidden, {"lm_head.weight": architecture.vocabulary})
    return layout
