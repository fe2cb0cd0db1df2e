"""Named cases of the decoder and the check of one case. No pytest in here.

A case passes when its RMS error against float64 is at most twice the error PyTorch itself makes at the same dtype
(each variant served alone with merged, rounded weights, `torch.nn.functional.linear` and torch's attention), or at
most 1e-5 of the RMS of the result in float32. A fixed bug adds a case.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zen_train.kernels.bitdelta_linear import dense_delta
from zen_train.kernels.common import DeltaBank, DirectionBank
from zen_train.kernels.decoder import Block, DecoderShape, KvPool, Rotary, TokenBatch
from zen_train.kernels.decoder.reference import stack_reference
from zen_train.kernels.decoder.torch_stack import torch_stack
from zen_train.kernels.directions_linear import dense_directions

OWN_ERRORS_ALLOWED = 2.0
FLOAT32_ALLOWED = 1e-5
MATRICES = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens of one sequence in the batch: `count` from position `start` on, of one variant."""

    start: int
    count: int
    slots: tuple[int, ...] = ()
    """Planes of the variant; empty: the base."""
    directions: int = -1
    """Slot whose coded directions the variant has, instead of planes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A small stack and one batch."""

    name: str
    chunks: tuple[Chunk, ...]
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 96
    layers: int = 2
    slots: int = 15
    planes: int = 1
    """Rows of plane_PT."""
    page_tokens: int = 16
    window: int | None = None
    norms: bool = False
    bias: bool = False
    per_matrix: bool = False


def _decode(positions: list[int], slots: list[tuple[int, ...]]) -> tuple[Chunk, ...]:
    return tuple(Chunk(start=p, count=1, slots=s) for p, s in zip(positions, slots, strict=True))


def _directed(positions: list[int], slots: list[int]) -> tuple[Chunk, ...]:
    return tuple(Chunk(start=p, count=1, directions=s) for p, s in zip(positions, slots, strict=True))


DISTINCT = [(slot,) for slot in range(14)]
REAL = {"hidden": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "mlp": 1536, "layers": 1}
CASES = [
    Case(name="T0", chunks=()),
    Case(name="T1-first-token", chunks=_decode([0], [(3,)])),
    Case(name="T1-base", chunks=_decode([37], [()])),
    Case(name="T1-real", chunks=_decode([21], [(3,)]), **REAL),
    Case(name="T2-real-two-variants", chunks=_decode([21, 40], [(3,), (0,)]), **REAL),
    Case(name="T3-real-base-and-two", chunks=_decode([5, 0, 17], [(2,), (), (9,)]), **REAL),
    Case(
        name="T7-real-base-and-four",
        chunks=_decode([5, 0, 17, 3, 9, 30, 1], [(2,), (), (9,), (2,), (), (1,), (4,)]),
        **REAL,
    ),
    Case(name="T8-real-distinct", chunks=_decode(list(range(0, 40, 5)), DISTINCT[:8]), **REAL),
    Case(name="T14-distinct", chunks=_decode(list(range(0, 70, 5)), DISTINCT)),
    Case(name="T14-real-distinct", chunks=_decode(list(range(0, 70, 5)), DISTINCT), **REAL),
    Case(name="T14-real-base", chunks=_decode(list(range(0, 70, 5)), [()] * 14), **REAL),
    Case(name="T16-real-one-variant", chunks=_decode(list(range(16)), [(4,)] * 16), **REAL),
    Case(
        name="odd-sizes",
        chunks=(
            *_decode([9, 2], [(1,), ()]),
            Chunk(start=3, count=6, slots=(1,)),
            Chunk(start=0, count=3, slots=(2,)),
        ),
        hidden=71,
        heads=3,
        kv_heads=1,
        head_dim=10,
        mlp=37,
        page_tokens=5,
    ),
    Case(
        name="mixed-prefill-and-decode",
        chunks=(
            Chunk(start=0, count=23, slots=(0,)),
            *_decode([31, 8, 60], [(1,), (0,), ()]),
            Chunk(start=16, count=40, slots=(2,)),
            Chunk(start=7, count=9),
        ),
    ),
    Case(
        name="head128-gqa8",
        chunks=_decode([50, 3], [(1,), ()]),
        heads=8,
        kv_heads=1,
        head_dim=128,
        hidden=128,
    ),
    Case(
        name="head128-mha", chunks=(Chunk(start=2, count=30, slots=(5,)),), heads=2, kv_heads=2, head_dim=128
    ),
    Case(
        name="window",
        chunks=(*_decode([60, 4], [(1,), (2,)]), Chunk(start=10, count=40, slots=(3,))),
        window=9,
    ),
    Case(name="window-1", chunks=_decode([6, 20], [(1,), ()]), window=1),
    Case(
        name="norms-and-biases",
        chunks=(*_decode([12, 0], [(1,), ()]), Chunk(start=1, count=7, slots=(3,))),
        norms=True,
        bias=True,
    ),
    Case(
        name="two-planes",
        chunks=(*_decode([12, 3, 9, 1], [(1, 7), (2,), (), (7, 1)]), Chunk(start=0, count=9, slots=(4, 5))),
        planes=2,
        per_matrix=True,
    ),
    Case(name="three-planes-T1-real", chunks=_decode([12], [(1, 7, 2)]), planes=3, **REAL),
    Case(name="T37-prefill-real", chunks=(Chunk(start=0, count=37, slots=(2,)),), **REAL),
    Case(name="T70-prefill-real", chunks=(Chunk(start=0, count=70, slots=(2,)),), **REAL),
    Case(
        name="T300-fold",
        chunks=(
            Chunk(start=0, count=140, slots=(1,)),
            Chunk(start=30, count=130),
            *_decode([40, 12], [(2,), (1,)]),
            Chunk(start=0, count=28, slots=(3, 4)),
        ),
        planes=2,
        page_tokens=32,
    ),
    Case(
        name="T300-real-one-variant", chunks=(Chunk(start=11, count=300, slots=(6,)),), page_tokens=32, **REAL
    ),
]


CASES += [
    Case(name="directions-T1-real", chunks=_directed([21], [3]), **REAL),
    Case(name="directions-T2-real-and-base", chunks=(*_directed([21], [3]), *_decode([4], [()])), **REAL),
    Case(name="directions-T2-real-and-signs", chunks=(*_directed([21], [3]), *_decode([40], [(0,)])), **REAL),
    Case(
        name="directions-T14-real",
        chunks=(
            *_directed(list(range(0, 35, 5)), [0, 1, 2, 3, 1, 14, 2]),
            *_decode([35, 40, 45, 50, 55, 60, 65], [(7,), (), (9,), (10,), (7,), (12,), (13,)]),
        ),
        **REAL,
    ),
    Case(
        name="directions-T5-real-and-base",
        chunks=(*_directed([21, 3, 8], [3, 0, 3]), *_decode([4, 0], [(), ()])),
        **REAL,
    ),
    Case(name="directions-T70-real", chunks=(Chunk(start=5, count=70, directions=6),), **REAL),
    Case(name="directions-T16-real-one-variant", chunks=_directed(list(range(16)), [4] * 16), **REAL),
    Case(
        name="directions-odd-sizes",
        chunks=(
            *_decode([9, 2], [(1,), ()]),
            Chunk(start=3, count=6, directions=3),
            Chunk(start=0, count=3, directions=2),
        ),
        hidden=71,
        heads=3,
        kv_heads=1,
        head_dim=10,
        mlp=37,
        page_tokens=5,
    ),
    Case(
        name="directions-mixed",
        chunks=(
            Chunk(start=0, count=23, directions=0),
            *_decode([31, 8], [(1,), ()]),
            *_directed([9, 60], [0, 3]),
            Chunk(start=16, count=40, slots=(2,)),
            Chunk(start=7, count=9),
        ),
        norms=True,
        bias=True,
    ),
    Case(
        name="directions-T300-fold",
        chunks=(
            Chunk(start=0, count=140, directions=1),
            Chunk(start=30, count=130, slots=(5,)),
            *_directed([40, 12], [2, 1]),
            Chunk(start=0, count=28, slots=(3, 4)),
        ),
        planes=2,
        page_tokens=32,
    ),
    Case(
        name="directions-T300-real",
        chunks=(Chunk(start=11, count=300, directions=6),),
        page_tokens=32,
        **REAL,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All tensors of one case."""

    hidden: Tensor
    blocks: list[Block]
    shape: DecoderShape
    batch: TokenBatch
    kv: KvPool
    rotary: Rotary

    def pool(self, dtype: torch.dtype | None = None) -> KvPool:
        """A copy of the pool, so that a run starts from the same past."""
        return KvPool(kv=self.kv.kv.to(dtype or self.kv.kv.dtype, copy=True))


def build(case: Case, dtype: torch.dtype, *, seed: int = 0) -> Inputs:
    """Make the inputs. Pages are scattered; places that no token may see hold NaN."""
    g = torch.Generator().manual_seed(seed)
    variants: dict[tuple[tuple[int, ...], int], int] = {((), -1): 0}
    for chunk in case.chunks:
        variants.setdefault((chunk.slots, chunk.directions), len(variants))
    directed = sorted({chunk.directions for chunk in case.chunks} - {-1})
    vectors = len(variants)
    d, e, f = case.hidden, case.head_dim, case.mlp
    n_qkv, wide = (case.heads + 2 * case.kv_heads) * e, case.heads * e

    def weight(n: int, k: int) -> Tensor:
        return (torch.randn(n, k, generator=g) * k**-0.5).to(dtype)

    def bank(n: int, k: int) -> DeltaBank:
        bank = DeltaBank.zeros(variants=case.slots, out_features=n, in_features=k, per_matrix=case.per_matrix)
        bank.sign_VPNB.random_(0, 256, generator=g)
        bank.row_scale_VPN.uniform_(0.2 * k**-0.5, 0.5 * k**-0.5, generator=g)
        return bank

    def vector(width: int) -> Tensor:
        return torch.rand(vectors, width, generator=g) + 0.5

    def directions(bank: DeltaBank, rows: tuple[int, ...]) -> DirectionBank | None:
        """The random bytes of those slots read as directions: most have one bit, some up to four."""
        if not directed:
            return None
        held = DirectionBank.over(bank, rows)
        for slot in directed:
            for part, span in enumerate(held.spans()):
                room = (span.stop - span.start) // 8
                counts = [8 * count for count in (room // 2, room // 4, room // 8, room // 8) if count]
                held.describe(slot, part, counts or [8])
                held.scale_VR[slot, span] *= (8 * room) ** -0.5
        return held

    def with_directions(block: Block) -> Block:
        rows = {
            "qkv": (wide, case.kv_heads * e, case.kv_heads * e), "o": (d,), "gate_up": (f, f), "down": (d,)
        }  # fmt: skip
        made = {f"{name}_directions": directions(getattr(block, f"{name}_bank"), rows[name]) for name in rows}
        return replace(block, **made)

    blocks = [
        Block(
            attention_norm_MD=vector(d),
            qkv_NK=weight(n_qkv, d),
            qkv_bias_MN=vector(n_qkv) - 1.0 if case.bias else None,
            q_norm_ME=vector(e) if case.norms else None,
            k_norm_ME=vector(e) if case.norms else None,
            o_NK=weight(d, wide),
            mlp_norm_MD=vector(d),
            gate_up_NK=weight(2 * f, d),
            down_NK=weight(d, f),
            qkv_bank=bank(n_qkv, d),
            o_bank=bank(d, wide),
            gate_up_bank=bank(2 * f, d),
            down_bank=bank(d, f),
        )
        for _ in range(case.layers)
    ]
    blocks = [with_directions(block) for block in blocks]
    lengths = [chunk.start + chunk.count for chunk in case.chunks]
    needed = [-(-length // case.page_tokens) for length in lengths]
    pages = sum(needed) + 2
    free = torch.randperm(pages, generator=g).tolist()
    table = torch.full((len(lengths) + 1, max(needed, default=1)), -1, dtype=torch.int32)
    kv = torch.full((case.layers, 2, pages, case.kv_heads, case.page_tokens, e), float("nan"), dtype=dtype)
    for s, chunk in enumerate(case.chunks):
        for j in range(needed[s]):
            page = free.pop()
            table[s, j] = page
            past = max(0, min(case.page_tokens, chunk.start - j * case.page_tokens))
            kv[:, :, page, :, :past] = torch.randn(case.layers, 2, case.kv_heads, past, e, generator=g).to(
                dtype
            )

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    per_token = [(s, chunk, i) for s, chunk in enumerate(case.chunks) for i in range(chunk.count)]
    tokens = len(per_token)
    plane = torch.full((case.planes, tokens), -1, dtype=torch.int32)
    for t, (_, chunk, _) in enumerate(per_token):
        for p, slot in enumerate(chunk.slots):
            plane[p, t] = slot
    angle = torch.outer(torch.arange(400.0), 10000.0 ** (-torch.arange(e // 2) / (e / 2)))
    return Inputs(
        hidden=torch.randn(tokens, d, generator=g).to(dtype),
        blocks=blocks,
        shape=DecoderShape(
            heads=case.heads, kv_heads=case.kv_heads, head_dim=e, norm_eps=1e-5, window_tokens=case.window
        ),
        batch=TokenBatch(
            position_T=ints([chunk.start + i for _, chunk, i in per_token]),
            sequence_T=ints([s for s, _, _ in per_token]),
            plane_PT=plane,
            vector_T=ints([variants[chunk.slots, chunk.directions] for _, chunk, _ in per_token]),
            page_table_SJ=table,
            direction_T=ints([chunk.directions for _, chunk, _ in per_token]) if directed else None,
        ),
        kv=KvPool(kv=kv),
        rotary=Rotary(cos=angle.cos(), sin=angle.sin()),
    )


def exact_result(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The result in float64, and the pool after it."""
    pool = inputs.pool(torch.float64)
    out = stack_reference(
        inputs.hidden.double(),
        tuple(inputs.blocks),
        inputs.shape,
        inputs.batch,
        pool,
        inputs.rotary,
        torch.float64,
    )
    return out, pool.kv


def merged(block: Block, slots: list[int], direction: int) -> Block:
    """The block with one variant's deltas added to its weights, rounded to their dtype."""
    weights = {}
    for name in MATRICES:
        weight, bank = getattr(block, f"{name}_NK"), getattr(block, f"{name}_bank")
        total = weight.double()
        for slot in slots:
            total = (
                total
                + dense_delta(bank.sign_VPNB[slot], bank.row_scale_VPN[slot], None, bank.in_features).double()
            )
        if direction >= 0:
            held: DirectionBank = getattr(block, f"{name}_directions")
            total = total + dense_directions(held, direction, torch.float64)
        weights[f"{name}_NK"] = total.to(weight.dtype)
    return replace(block, **weights)


def own_result(inputs: Inputs) -> Tensor:
    """What PyTorch gets at this dtype when each variant is served alone as a dense model."""
    planes, out = inputs.batch.plane_PT, inputs.hidden.clone()
    directions = inputs.batch.direction_T
    if directions is None:
        directions = torch.full_like(planes[0], -1)
    codes = torch.cat((planes, directions.unsqueeze(0)))
    for column in {tuple(c) for c in codes.T.tolist()}:
        mine = (codes == torch.tensor(column).unsqueeze(1)).all(dim=0)
        slots = [slot for slot in column[:-1] if slot >= 0]
        blocks = tuple(merged(block, slots, column[-1]) for block in inputs.blocks)
        batch = replace(inputs.batch, plane_PT=planes[:0], direction_T=None)
        alone = torch_stack(inputs.hidden, blocks, inputs.shape, batch, inputs.pool(), inputs.rotary)
        out = torch.where(mine.unsqueeze(1), alone, out)
    return out


def rms_error(value: Tensor, truth: Tensor) -> float:
    """RMS of the difference relative to the RMS of the truth."""
    if truth.numel() == 0:
        return 0.0 if value.shape == truth.shape else float("nan")
    return float((value.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt())


def allowed_error(inputs: Inputs, truth: Tensor) -> float:
    """The bound of this case."""
    if inputs.hidden.dtype == torch.float32:
        return FLOAT32_ALLOWED
    return OWN_ERRORS_ALLOWED * rms_error(own_result(inputs), truth)
