"""The operators are proper `torch.library` citizens: opcheck passes and `torch.compile` sees one graph."""

import pytest
import torch

from tests.kernels.cases import Case, build, run_linear
from zen_train.kernels.bitdelta_embedding import registration as embedding_ops
from zen_train.kernels.bitdelta_linear import bitdelta_linear, registration
from zen_train.kernels.cpu import load
from zen_train.kernels.one_bit_code import registration as code_ops
from zen_train.kernels.sign_pack import registration as pack_ops

CASE = Case(m=5, n=16, k=24, mix="uniform", scale="row_col", planes=2)
needs_compiler = pytest.mark.skipif(not load(), reason="no C++ compiler here")


def arguments():
    inputs = build(CASE, torch.float32)
    bank = inputs.bank
    return inputs, (bank.sign_VPNB, bank.row_scale_VPN, bank.col_scale_VPK, inputs.variant)


def test_opcheck_of_the_reference_operators():
    inputs, parts = arguments()
    torch.library.opcheck(registration.reference_linear, (inputs.x, inputs.weight, inputs.bias, *parts))
    torch.library.opcheck(registration.reference_add_, (torch.zeros(5, 16), inputs.x, *parts))
    torch.library.opcheck(pack_ops.reference_sign_pack, (inputs.weight, None))
    torch.library.opcheck(
        code_ops.reference_one_bit_code_,
        (torch.zeros(16, 24), inputs.weight, inputs.weight * 0, True, 8.0, False),
    )
    sign, row, col, variant = parts
    torch.library.opcheck(
        embedding_ops.reference_embedding, (torch.arange(5), variant, inputs.weight, sign, row, col)
    )


@needs_compiler
def test_opcheck_of_the_cpu_operators():
    inputs, parts = arguments()
    ops = torch.ops.zen_train
    torch.library.opcheck(ops.cpu_linear.default, (inputs.x, inputs.weight, inputs.bias, *parts, -1, 128))
    torch.library.opcheck(ops.cpu_add_.default, (torch.zeros(5, 16), inputs.x, *parts, -1, 128))
    torch.library.opcheck(ops.cpu_sign_pack.default, (inputs.weight, inputs.weight * 0, -1))
    torch.library.opcheck(
        ops.cpu_one_bit_code_.default,
        (torch.zeros(16, 24), inputs.weight, inputs.weight * 0, True, 8.0, False, -1),
    )
    sign, row, col, variant = parts
    torch.library.opcheck(
        ops.cpu_embedding.default, (torch.arange(5), variant, inputs.weight, sign, row, col, -1)
    )


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_compiler)])
def test_compiled_layer_is_one_graph_and_gives_the_same(backend):
    inputs, _ = arguments()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return (
            bitdelta_linear(
                x, inputs.weight, inputs.bank, inputs.variant, bias_N=inputs.bias, backend=backend
            )
            * 2
        )

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(inputs.x), run_linear(inputs, backend) * 2)
