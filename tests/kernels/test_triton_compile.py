"""Every autotune configuration, compiled ahead of time for sm_80 and sm_90 without a GPU."""

import pytest

pytest.importorskip("triton")

import triton

from tests.kernels.aot import SHARED_LIMIT_BYTES, compile_all, compile_one
from zen_train.kernels.directions_linear import triton_launch
from zen_train.kernels.directions_linear.triton_kernel import rows_kernel
from zen_train.kernels.one_bit_code import triton_launch as code_launch
from zen_train.kernels.one_bit_code.triton_kernel import change_sums_kernel, one_bit_code_kernel


@pytest.mark.parametrize("arch", [80, 90])
def test_no_configuration_spills_and_all_use_tensor_cores(arch):
    table = compile_all(arch)
    print("\n" + "\n".join(row.row() for row in table))
    for row in table:
        assert row.stack_bytes == 0, row.row()
        assert row.local_bytes == 0, row.row()
        assert row.registers <= 255, row.row()
        assert row.shared_bytes <= SHARED_LIMIT_BYTES[arch], row.row()
        assert "mma" in row.tensor_core, row.row()
        assert row.async_copies > 0, row.row()
        if row.kernel == "prefill_kernel":
            assert row.byte_loads == 0, row.row()
            assert ("wgmma" in row.tensor_core) == (arch == 90), row.row()


@pytest.mark.parametrize("arch", [80, 90])
def test_rows_of_directions_do_not_spill(arch):
    blocks = {"BLOCK_R": triton_launch.BLOCK_R, "BLOCK_K": triton_launch.BLOCK_K}
    row = compile_one(rows_kernel, arch, triton.Config(blocks, num_warps=triton_launch.WARPS), {})
    print("\n" + row.row())
    assert row.stack_bytes == row.local_bytes == 0, row.row()
    assert row.registers <= 255, row.row()


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    "settings", [{}, {"PER_ROW": True, "DITHER": True}, {"PER_ROW": False, "DITHER": False}], ids=str
)
def test_the_one_bit_code_does_not_spill(arch, settings):
    config = triton.Config({"BLOCK_K": code_launch.BLOCK_K}, num_warps=code_launch.WARPS)
    row = compile_one(one_bit_code_kernel if settings else change_sums_kernel, arch, config, settings)
    print("\n" + row.row())
    assert row.stack_bytes == row.local_bytes == 0, row.row()
    assert row.registers <= 64, (
        row.row()
    )  # all 2,048 threads of a multiprocessor at once are 32 registers each
