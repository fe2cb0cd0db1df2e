"""The base on the device: fused matrices, vector tables with room for each variant, and empty banks beside
them.

Tensors are read one at a time, straight into the fused tensor that holds them; where dtype or device differ,
through a buffer of the one tensor. So peak memory is the model and its largest tensor. The same pass yields
the fingerprint that variants are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zen_train.delta import Fingerprint, FolderSource, tensor_digest
from zen_train.delta.fingerprint import root_of
from zen_train.errors import BaseModelError, DeltaError
from zen_train.kernels.common import DeltaBank, DirectionBank
from zen_train.kernels.decoder import Block, PreparedBlocks, Rotary, prepare_blocks
from zen_train.serve.engine.architecture import Architecture, read_architecture
from zen_train.serve.engine.config import EngineConfig
from zen_train.serve.engine.parameters import EMBEDDING, HEAD, UNUSED_BUFFERS, Layout, block_target, layout_of
from zen_train.serve.engine.tensor_files import FilePlace, FileReader, find_places, memory_of, reading

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True, eq=False)
class ServedModel:
    """Everything of the base and its empty variant slots that a forward needs."""

    folder: Path
    architecture: Architecture
    layout: Layout
    fingerprint: Fingerprint
    dtype: torch.dtype
    matrices: dict[str, Tensor]
    """target -> `[N, K]` in `dtype`."""
    tables: dict[str, Tensor]
    """target -> float32 `[1 + slots, N]`; row 0 is the base."""
    banks: dict[str, DeltaBank]
    """target -> one-plane bank of all slots."""
    directions: dict[str, DirectionBank]
    """target -> the same slots read as coded directions; empty where the matrices are too small for any."""
    homes: tuple[Tensor, Tensor]
    """`home` and `plane` of the directions of all targets side by side, `[slots, R]`."""
    blocks: PreparedBlocks
    rotary: Rotary

    @property
    def head_target(self) -> str:
        """The matrix that yields the scores of words."""
        return EMBEDDING if self.architecture.tied else HEAD


def load_model(
    folder: Path, config: EngineConfig, *, slots: int | None = None, fingerprint: Fingerprint | None = None
) -> ServedModel:
    """Read a model folder.

    Args:
        folder: config.json and safetensors.
        config: device, dtype, context.
        slots: sign planes to make room for; None takes the number from `config`.
        fingerprint: of this folder, when it is known already; saves hashing every tensor.

    Raises:
        BaseModelError: not served, a missing, left-over or misshapen tensor, or values that are not finite.
    """
    architecture, rotary = read_architecture(folder, context_tokens=config.context_tokens)
    layout = layout_of(architecture)
    try:
        source = FolderSource(folder)
    except DeltaError as error:
        raise BaseModelError(f"{folder} cannot be served: {error}") from error
    _check_names(source, layout)
    dtype = _DTYPES.get(config.dtype) or _stored_dtype(source)
    device = torch.device(config.device)
    slots = slots if slots is not None else slots_of(config, layout)
    matrices = {
        target: torch.empty(size, dtype=dtype, device=device) for target, size in layout.matrix_sizes.items()
    }
    tables = {
        target: torch.zeros(1 + slots, size, device=device) for target, size in layout.vector_sizes.items()
    }
    found = _fill(folder, source, layout, matrices, tables, known=fingerprint)
    banks = {
        target: DeltaBank.zeros(variants=slots, out_features=rows, in_features=columns, device=device)
        for target, (rows, columns) in layout.matrix_sizes.items()
    }
    directions, homes = _directions(layout, banks, slots, device)
    stack = [
        _block(layer, architecture, matrices, tables, banks, directions)
        for layer in range(architecture.layers)
    ]
    return ServedModel(
        folder=folder,
        architecture=architecture,
        layout=layout,
        fingerprint=found,
        dtype=dtype,
        matrices=matrices,
        tables=tables,
        banks=banks,
        directions=directions,
        homes=homes,
        blocks=prepare_blocks(stack, shape=architecture.decoder),
        rotary=Rotary(cos=rotary.cos.to(device), sin=rotary.sin.to(device)),
    )


def _directions(
    layout: Layout, banks: dict[str, DeltaBank], slots: int, device: torch.device
) -> tuple[dict[str, DirectionBank], tuple[Tensor, Tensor]]:
    """Views of the banks' slots. What directions need beside them lies in two tensors for all targets, so that a load
    writes it at once.
    """
    sizes = [sum(rooms) for rooms in layout.stacked.values()]
    home = torch.zeros(slots, sum(sizes), dtype=torch.int16, device=device)
    plane = torch.zeros(home.shape, dtype=torch.uint8, device=device)
    views = {
        target: DirectionBank.over(banks[target], layout.parts[target], home_VR=home_VR, plane_VR=plane_VR)
        for target, home_VR, plane_VR in zip(
            layout.stacked, home.split(sizes, 1), plane.split(sizes, 1), strict=True
        )
    }
    return views, (home, plane)


def slots_of(config: EngineConfig, layout: Layout) -> int:
    """Sign planes within the budget.

    Raises:
        BaseModelError: a budget below one plane.
    """
    if config.variant_bytes is None:
        return config.slots
    slots = config.variant_bytes // layout.slot_bytes
    if slots < 1:
        raise BaseModelError(
            f"variant_bytes={config.variant_bytes} holds no variant; one sign plane of this base takes "
            f"{layout.slot_bytes} bytes. Raise the budget to that or more."
        )
    return slots


def _check_names(source: FolderSource, layout: Layout) -> None:
    stored = {name for name in source.names() if not name.endswith(UNUSED_BUFFERS)}
    if missing := sorted(layout.names() - stored):
        raise BaseModelError(f"{source.label}: tensor {missing[0]} ({len(missing)} in all) is missing.")
    if extra := sorted(stored - layout.names()):
        raise BaseModelError(
            f"{source.label}: tensor {extra[0]} ({len(extra)} in all) belongs to no served architecture; "
            "serving the model without it would give other answers."
        )
    for name, place in layout.matrices.items():
        _check_shape(source, name, (place.rows, place.columns))
    for name, vector in layout.vectors.items():
        _check_shape(source, name, (vector.size,))


def _check_shape(source: FolderSource, name: str, shape: tuple[int, ...]) -> None:
    spec = source.spec(name)
    if spec.shape != shape or not spec.dtype.is_floating_point:
        raise BaseModelError(
            f"{source.label}: {name} is {spec.dtype} {list(spec.shape)}, config.json says {list(shape)}."
        )


def _stored_dtype(source: FolderSource) -> torch.dtype:
    stored = {source.spec(name).dtype for name in source.names()}
    return torch.bfloat16 if stored == {torch.bfloat16} else torch.float32


def _fill(
    folder: Path,
    source: FolderSource,
    layout: Layout,
    matrices: dict[str, Tensor],
    tables: dict[str, Tensor],
    *,
    known: Fingerprint | None,
) -> Fingerprint:
    """Read every tensor to its place. Returns the fingerprint: `known`, or what the bytes gave."""
    digests: dict[str, str] = {}
    with reading() as reader:
        places = find_places(folder, "model")
        for name in source.names():
            if name in layout.matrices:
                rows = layout.matrices[name]
                target = matrices[rows.target][rows.first_row : rows.first_row + rows.rows]
            elif name in layout.vectors:
                entry = layout.vectors[name]
                target = tables[entry.target][0, entry.first : entry.first + entry.size]
            else:
                target = torch.empty(source.spec(name).shape, dtype=source.spec(name).dtype)
            stored = _read(reader, places, name, target)
            if not all_finite(stored):
                raise BaseModelError(f"{folder}: {name} holds NaN or infinite values; fetch the model again.")
            if known is None:
                digests[name] = tensor_digest(stored)
    specs = {name: source.spec(name) for name in source.names()}
    return known or Fingerprint(root_of(digests, specs), digests, specs)


def all_finite(tensor: Tensor) -> bool:
    """No NaN, no infinity. One pass without a temporary where the sum is finite, as it nearly always is."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def _read(reader: FileReader, places: dict[str, FilePlace], name: str, target: Tensor) -> Tensor:
    """Fill `target`; the tensor as stored is returned (`target` itself where nothing had to be converted)."""
    place = places[name]
    if target.device.type == "cpu" and target.dtype == place.spec.dtype:
        reader.read([(place, memory_of(target))])
        return target
    stored = torch.empty(place.spec.shape, dtype=place.spec.dtype)
    reader.read([(place, memory_of(stored))])
    target.copy_(stored)
    return stored


def _block(
    layer: int,
    architecture: Architecture,
    matrices: dict[str, Tensor],
    tables: dict[str, Tensor],
    banks: dict[str, DeltaBank],
    directions: dict[str, DirectionBank],
) -> Block:
    def at(part: str) -> str:
        return block_target(layer, part)

    return Block(
        attention_norm_MD=tables[at("attention_norm")],
        qkv_NK=matrices[at("qkv")],
        qkv_bias_MN=tables[at("qkv_bias")] if architecture.qkv_bias else None,
        q_norm_ME=tables[at("q_norm")] if architecture.head_norms else None,
        k_norm_ME=tables[at("k_norm")] if architecture.head_norms else None,
        o_NK=matrices[at("o")],
        mlp_norm_MD=tables[at("mlp_norm")],
        gate_up_NK=matrices[at("gate_up")],
        down_NK=matrices[at("down")],
        qkv_bank=banks[at("qkv")],
        o_bank=banks[at("o")],
        gate_up_bank=banks[at("gate_up")],
        down_bank=banks[at("down")],
        qkv_directions=directions.get(at("qkv")),
        o_directions=directions.get(at("o")),
        gate_up_directions=directions.get(at("gate_up")),
        down_directions=directions.get(at("down")),
    )
