"""Block arithmetic under the codec: pack, unpack and measure a few rows at a time.

On the CPU a block is half a megabyte of float32, stays in the L2 cache and is worked on by numpy in a few
threads of our own (numpy releases the interpreter lock). torch's own threads would meet at a barrier after
every small operation, which costs more than the operation as soon as another thread, such as the hashing,
wants a core. On another device torch does the work.

Shapes: R rows (output rows, over all matrices of a stack), K input columns, B = ceil(K/8) bytes a row.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

_BLOCK_ELEMENTS = 1 << 17
_SERIAL_ELEMENTS = 1 << 14  # of this size torch converts in the calling thread
_MAX_WORKERS = 8
_SIGNS_OF_BYTE = (
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32) * 2
    - 1
)  # float32 [256, 8]: -1 or +1 for each bit, lowest first

Result = TypeVar("Result")
Float32 = npt.NDArray[np.float32]
Block = tuple[int, int, torch.Tensor, torch.Tensor]
"""(start row, stop row, rows of the first tensor, rows of the second), rows counted over all matrices."""


class PackedRows(NamedTuple):
    """What one pass over a block of rows yields."""

    sign_RB: torch.Tensor  # uint8
    abs_sum_R: torch.Tensor  # float64, sum of |D|
    square_sum_R: torch.Tensor  # float64, sum of D*D
    zeros_R: torch.Tensor | None  # int64, elements that are exactly zero; None: there are none


SignPack = Callable[[torch.Tensor, torch.Tensor], PackedRows]
"""(base_RK, tuned_RK), any floating dtypes -> PackedRows of their difference. The seam for a fused kernel."""


def packed_width(columns: int) -> int:
    """Bytes that a row of `columns` bits takes."""
    return (columns + 7) // 8


def pack_bits(positive_RK: torch.Tensor) -> torch.Tensor:
    """Pack booleans `[R, K]` to uint8 `[R, ceil(K/8)]`, lowest bit first, padding bits 0."""
    if positive_RK.device.type == "cpu":
        return torch.from_numpy(np.packbits(positive_RK.numpy(), axis=-1, bitorder="little"))
    rows, columns = positive_RK.shape
    padded = torch.nn.functional.pad(positive_RK.to(torch.uint8), (0, -columns % 8))
    weights = 1 << torch.arange(8, device=padded.device, dtype=torch.uint8)
    return (padded.view(rows, packed_width(columns), 8) * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(sign_RB: torch.Tensor, columns: int) -> torch.Tensor:
    """Undo `pack_bits`: uint8 `[R, B]` to booleans `[R, columns]`. Padding bits are not looked at."""
    if sign_RB.device.type == "cpu":
        bits = np.unpackbits(sign_RB.numpy(), axis=-1, bitorder="little", count=columns)
        return torch.from_numpy(bits).view(torch.bool)
    shifts = torch.arange(8, device=sign_RB.device, dtype=torch.uint8)
    return ((sign_RB.unsqueeze(-1) >> shifts) & 1).flatten(-2)[:, :columns].to(torch.bool)


def padding_is_zero(sign: torch.Tensor, columns: int) -> bool:
    """True when the unused high bits of every row's last byte are 0."""
    if columns % 8 == 0 or sign.numel() == 0:
        return True
    return not bool((sign[..., -1] >> (columns % 8)).any())


def sign_pack_rows(base_RK: torch.Tensor, tuned_RK: torch.Tensor) -> PackedRows:
    """Signs and row sums of `tuned - base`, taken in float32, summed in float64."""
    if tuned_RK.device.type != "cpu":
        return sign_pack_rows_torch(base_RK, tuned_RK)
    delta_RK = as_float32(tuned_RK) - as_float32(base_RK)
    positive_RK, zero_RK = delta_RK >= 0, delta_RK == 0
    zeros_R = zero_RK.sum(-1, dtype=np.int64) if np.count_nonzero(zero_RK) else None
    wide_RK = delta_RK.astype(np.float64)
    square_sum_R = np.einsum("ij,ij->i", wide_RK, wide_RK)
    return PackedRows(
        torch.from_numpy(np.packbits(positive_RK, axis=-1, bitorder="little")),
        torch.from_numpy(np.abs(wide_RK, out=wide_RK).sum(-1)),
        torch.from_numpy(square_sum_R),
        None if zeros_R is None else torch.from_numpy(zeros_R),
    )


def sign_pack_rows_torch(base_RK: torch.Tensor, tuned_RK: torch.Tensor) -> PackedRows:
    """`sign_pack_rows` in torch operators, for tensors on any device."""
    delta_RK = tuned_RK.to(torch.float32) - base_RK.to(device=tuned_RK.device, dtype=torch.float32)
    return PackedRows(
        pack_bits(delta_RK >= 0),
        delta_RK.abs().sum(-1, dtype=torch.float64),
        delta_RK.double().square().sum(-1),
        (delta_RK == 0).sum(-1),
    )


def signed_rows(sign_RB: torch.Tensor, alpha_R1: torch.Tensor, columns: int) -> Float32:
    """`alpha * S` of a block of rows on the CPU, float32 `[R, K]`."""
    bits_RB = sign_RB.numpy()
    signs = np.take(_SIGNS_OF_BYTE, bits_RB, axis=0, mode="clip")
    rows: Float32 = signs.reshape(len(bits_RB), -1)[:, :columns]
    return np.multiply(rows, alpha_R1.numpy(), out=rows)


def square_sum(values: Float32) -> float:
    """Sum of squares, accumulated in float64."""
    wide = values.astype(np.float64).reshape(-1)
    return float(np.einsum("i,i->", wide, wide))


def square_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b||^2 of two tensors of equal shape: float32 differences, summed in float64."""

    def work(block: Block) -> float:
        _, _, a_RK, b_RK = block
        return square_sum(as_float32(a_RK) - as_float32(b_RK))

    return sum(run_blocks(work, row_blocks(_two_dim(a), _two_dim(b), transposed=False), a.numel()))


def all_finite(tensor: torch.Tensor) -> bool:
    """True when no value is NaN or infinite."""
    rows = _two_dim(tensor)

    def work(block: Block) -> bool:
        return bool(np.isfinite(as_float32(block[2])).all())

    return all(run_blocks(work, row_blocks(rows, rows, transposed=False), tensor.numel()))


def convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in another floating dtype, rounded to nearest, on the CPU."""
    out = torch.empty(tensor.shape, dtype=dtype)

    def work(block: Block) -> None:
        _, _, from_RK, to_RK = block
        to_RK.copy_(from_RK)

    blocks = row_blocks(_two_dim(tensor), _two_dim(out), transposed=False, block_elements=_SERIAL_ELEMENTS)
    run_blocks(work, blocks, tensor.numel())
    return out


def as_float32(block: torch.Tensor) -> Float32:
    """A CPU block as a float32 array: a view where it is float32 already, else an exact wider copy."""
    if block.dtype == torch.float32:
        values: Float32 = block.numpy()
        return values
    if block.dtype == torch.bfloat16:  # the upper half of a float32
        return (block.view(torch.uint16).numpy().astype(np.uint32) << np.uint32(16)).view(np.float32)
    out = torch.empty(block.shape, dtype=torch.float32)
    step = max(1, _SERIAL_ELEMENTS // max(block.shape[-1], 1))
    for start in range(0, block.shape[0], step):
        out[start : start + step] = block[start : start + step]
    widened: Float32 = out.numpy()
    return widened


def row_blocks(
    first: torch.Tensor,
    second: torch.Tensor,
    *,
    transposed: bool,
    block_elements: int = _BLOCK_ELEMENTS,
) -> Iterator[Block]:
    """Cut two tensors `[..., out, in]` (`[..., in, out]` when transposed) into blocks of rows: views, no
    copies.
    """
    one_piece = not transposed and first.is_contiguous() and second.is_contiguous()
    pairs = zip(
        _matrices(first, transposed, one_piece), _matrices(second, transposed, one_piece), strict=True
    )
    offset = 0
    for a_RK, b_RK in pairs:
        rows, columns = a_RK.shape
        step = max(1, block_elements // max(columns, 1))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield offset + start, offset + stop, a_RK[start:stop], b_RK[start:stop]
        offset += rows


def run_blocks(work: Callable[[Block], Result], blocks: Iterable[Block], elements: int) -> list[Result]:
    """`work` on every block, in as many threads as torch may use; results in order."""
    workers = min(torch.get_num_threads(), _MAX_WORKERS, elements // _BLOCK_ELEMENTS)
    if workers < 2:
        return [work(block) for block in blocks]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, blocks))


def _matrices(tensor: torch.Tensor, transposed: bool, one_piece: bool) -> Iterator[torch.Tensor]:
    if tensor.numel() == 0:
        return
    if one_piece:
        yield tensor.view(-1, tensor.shape[-1])
        return
    oriented = tensor.transpose(-1, -2) if transposed else tensor
    for index in np.ndindex(*oriented.shape[:-2]):
        yield oriented[index]


def _two_dim(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as rows and columns; a vector becomes one column."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.reshape(-1, 1)
