"""Compile the Triton kernels for a GPU that is not there, and read what the compiler made of them."""

import re
import subprocess
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zen_train.kernels.bitdelta_linear import triton_launch
from zen_train.kernels.bitdelta_linear.triton_kernel import decode_kernel, prefill_kernel

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_POINTERS = {
    "y_ptr": "bf16",
    "x_ptr": "bf16",
    "w_ptr": "bf16",
    "bias_ptr": "bf16",
    "sign_ptr": "u8",
    "row_ptr": "fp32",
    "col_ptr": "fp32",
    "order_ptr": "i32",
    "start_ptr": "i32",
    "group_ptr": "i32",
    "out_ptr": "fp32",
    "coefficient_ptr": "fp32",
    "right_ptr": "u8",
    "slot_ptr": "i32",
    "latent_ptr": "fp32",
    "base_ptr": "bf16",
    "alpha_ptr": "fp32",
    "size_ptr": "fp64",
    "square_ptr": "fp64",
}
_SCALARS = {"along_weight": "fp32"}
_MULTIPLES_OF_16 = {
    "N",
    "K",
    "B",
    "sign_stride",
    "right_stride",
    "y_stride",
    "x_stride",
    "w_stride",
    "out_stride",
    "latent_stride",
    "base_stride",
}
SHARED_LIMIT_BYTES = {80: 163 * 1024, 90: 227 * 1024}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What one configuration became on one architecture."""

    kernel: str
    arch: int
    blocks: str
    warps: int
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    tensor_core: str
    async_copies: int
    byte_loads: int

    def row(self) -> str:
        """One line of the table."""
        return (
            f"sm_{self.arch} {self.kernel:15s} {self.blocks:26s} warps {self.warps} registers {self.registers:3d} "
            f"stack {self.stack_bytes} local {self.local_bytes} shared {self.shared_bytes:6d} "
            f"{self.tensor_core:16s} async copies {self.async_copies:2d} byte loads {self.byte_loads}"
        )


def compile_one(
    kernel: triton.JITFunction, arch: int, config: triton.Config, extra: dict[str, int]
) -> Compiled:
    """Compile one configuration for `sm_<arch>` (80 or 90), bf16, base product fused in."""
    fixed = {
        "HAS_W": True,
        "HAS_BIAS": False,
        "HAS_COL": False,
        "PER_MATRIX": False,
        "PLANES": 1,
        "INTERPRETED": False,
        **extra,
        **config.kwargs,
    }
    fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
    signature, hints = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in fixed:
            signature[name] = "constexpr"
            continue
        signature[name] = f"*{_POINTERS[name]}" if name in _POINTERS else _SCALARS.get(name, "i32")
        if name in _POINTERS or name in _MULTIPLES_OF_16:
            hints[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=hints)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notice on the future default of fused multiply-adds
        built = triton.compile(
            source,
            target=GPUTarget("cuda", arch, 32),
            options={"num_warps": config.num_warps, "num_stages": config.num_stages},
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert numbers is not None, usage
    ptx = built.asm["ptx"]
    shapes = re.findall(r"(wgmma|mma)[._a-z]*\.sync\.aligned\.(m\d+n\d+k\d+)", ptx)
    return Compiled(
        kernel=kernel.__name__,
        arch=arch,
        blocks=" ".join(
            f"{key[6:]}{value}" for key, value in {**config.kwargs, **extra}.items() if "BLOCK" in key
        ),
        warps=config.num_warps,
        registers=int(numbers[1]),
        stack_bytes=int(numbers[2]),
        local_bytes=int(numbers[3]),
        shared_bytes=built.metadata.shared,
        tensor_core=" ".join(sorted({f"{kind}.{shape}" for kind, shape in shapes})),
        async_copies=len(re.findall(r"cp\.async\.c", ptx)),
        byte_loads=len(re.findall(r"ld\.global[.a-z0-9]*\.b8", ptx)),
    )


def compile_all(arch: int) -> list[Compiled]:
    """Every autotune configuration for one architecture."""
    decode = triton_launch.DECODE_CONFIGS_SM90 if arch >= 90 else triton_launch.DECODE_CONFIGS
    jobs = [
        (decode_kernel, arch, config, {"BLOCK_T": block_t})
        for block_t, configs in decode.items()
        for config in configs
    ]
    prefill = triton_launch.PREFILL_CONFIGS_SM90 if arch >= 90 else triton_launch.PREFILL_CONFIGS
    jobs += [(prefill_kernel, arch, config, {"GROUPS": 16, "T_CLASS": 512}) for config in prefill]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda job: compile_one(*job), jobs))
