"""A pytest plugin that builds the CPU kernels with AMX's tile registers in software (`emulated_amx.h`).

`pytest -p tests.kernels.emulated_amx -k amx tests/kernels` tests the AMX kernels where there is only AVX-512 for bf16.
"""

import zlib
from pathlib import Path

from zen_train.kernels.cpu import build

HEADER = Path(__file__).with_name("emulated_amx.h")

# The number only makes the compiled file another one when the header changes.
build._FLAGS = (
    *build._FLAGS, f"-DZT_EMULATED_AMX={zlib.crc32(HEADER.read_bytes())}", "-include", str(HEADER)
)  # fmt: skip
