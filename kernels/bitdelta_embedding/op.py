"""`bitdelta_embedding`: rows of an embedding table, each with the one-bit delta of its token's variant.

Contract: as for `bitdelta_linear`. On a GPU an id or an index out of range yields a NaN row. The head of a tied model
is `bitdelta_linear` with the same table and bank.
"""

import torch
from torch import Tensor

from zen_train.kernels.bitdelta_linear.registration import check_values
from zen_train.kernels.common import DeltaBank, choose_backend
from zen_train.kernels.cpu import path_number

from . import registration

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def bitdelta_embedding(
    ids: Tensor, table_NK: Tensor, bank: DeltaBank, variant: Tensor, *, backend: str = "auto"
) -> Tensor:
    """`table[ids] + delta(variant)[ids]`.

    Args:
        ids: int32 or int64 `[...]`, row numbers.
        table_NK: `[N, K]`, bfloat16, float16 or float32.
        bank: deltas of the table; a low-rank residual is added too.
        variant: int32 or int64, shape of ids; -1 for the base.
        backend: `auto`, `reference`, `cpu` or `triton`.

    Returns:
        `[..., K]` in the table's dtype.

    Raises:
        ValueError: a shape, dtype or device that does not fit; on CPU also an id or an index out of range.
    """
    if table_NK.dtype not in DTYPES or tuple(table_NK.shape) != (bank.out_features, bank.in_features):
        raise ValueError(
            f"table_NK is {table_NK.dtype} {tuple(table_NK.shape)}; needed: bfloat16, float16 or float32 "
            f"{(bank.out_features, bank.in_features)}."
        )
    for name, index in (("ids", ids), ("variant", variant)):
        if index.dtype not in (torch.int32, torch.int64) or index.shape != ids.shape:
            raise ValueError(
                f"{name} is {index.dtype} {tuple(index.shape)}; needed: int32 or int64 {tuple(ids.shape)}."
            )
    for name, device in (("ids", ids.device), ("variant", variant.device), ("bank", bank.device)):
        if device != table_NK.device:
            raise ValueError(
                f"{name} is on {device}; needed: {table_NK.device}, where table_NK is. Move it first."
            )
    chosen = choose_backend(backend, table_NK.device)
    ids_T, variant_T = ids.reshape(-1), variant.reshape(-1)
    scales = (bank.sign_VPNB, bank.row_scale_VPN, bank.col_scale_VPK)
    if chosen == "cpu":
        out = torch.ops.zen_train.cpu_embedding(ids_T, variant_T, table_NK, *scales, path_number())
    elif chosen == "triton":
        out = registration.triton_embedding(ids_T, variant_T, table_NK, *scales)
    else:
        check_values(*scales, variant_T)
        _check_ids(ids_T, bank.out_features)
        out = registration.reference_embedding(ids_T, variant_T, table_NK, *scales)
    if bank.left_VNR is not None and bank.right_VRK is not None:
        slot = variant_T.long().clamp(0, bank.variants - 1)
        rows_TR = bank.left_VNR[slot, ids_T.long().clamp(0, bank.out_features - 1)]
        extra = torch.einsum("tr,trk->tk", rows_TR, bank.right_VRK[slot])
        out = torch.where((variant_T >= 0).unsqueeze(1), out + extra, out).to(table_NK.dtype)
    return out.view(*ids.shape, table_NK.shape[1])


def _check_ids(ids_T: Tensor, rows: int) -> None:
    if torch.compiler.is_compiling() or ids_T.device.type != "cpu":
        return
    bad = ((ids_T < 0) | (ids_T >= rows)).nonzero().flatten()
    if bad.numel():
        at = int(bad[0])
        raise ValueError(f"ids[{at}] is {int(ids_T[at])}; allowed: 0 to {rows - 1}.")
