"""Operator 3: rows of a one-bit embedding."""

import pytest
import torch

from tests.kernels.backends import EVERYWHERE, forced
from tests.kernels.cases import Case, build
from zen_train.kernels.bitdelta_embedding import bitdelta_embedding
from zen_train.kernels.bitdelta_linear import dense_delta


@pytest.fixture(params=EVERYWHERE)
def backend(request, monkeypatch):
    return forced(request.param, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", ["row", "matrix", "row_col"])
def test_rows_are_those_of_the_merged_table(backend, dtype, scale):
    case = Case(m=9, n=30, k=21, mix="uniform", planes=2, scale=scale, rank=3)
    inputs = build(case, dtype)
    ids = torch.arange(9) * 3
    rows = bitdelta_embedding(ids, inputs.weight, inputs.bank, inputs.variant, backend=backend)
    bank = inputs.bank
    for t in range(9):
        v = int(inputs.variant[t])
        row = inputs.weight[ids[t]].double()
        if v >= 0:
            col = None if bank.col_scale_VPK is None else bank.col_scale_VPK[v]
            row = row + dense_delta(bank.sign_VPNB[v], bank.row_scale_VPN[v], col, 21)[ids[t]].double()
            row = row + bank.left_VNR[v, ids[t]].double() @ bank.right_VRK[v].double()
        tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6}[dtype]
        torch.testing.assert_close(rows[t].double(), row, rtol=tolerance, atol=tolerance * 0.5)


def test_shape_of_the_ids_is_kept(backend):
    inputs = build(Case(m=6, n=12, k=16, mix="uniform"), torch.float32)
    out = bitdelta_embedding(
        torch.zeros(2, 3, dtype=torch.int32),
        inputs.weight,
        inputs.bank,
        inputs.variant.view(2, 3),
        backend=backend,
    )
    assert out.shape == (2, 3, 16)
