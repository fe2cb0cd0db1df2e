"""Names of tensor element types, as safetensors writes them, and their torch counterparts.

One table for reading, writing and fingerprints, so that a name never depends on the torch version.
"""

import torch

from zen_train.errors import DeltaError

_CODE_BY_DTYPE: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPE_BY_CODE = {code: dtype for dtype, code in _CODE_BY_DTYPE.items()}

ARITHMETIC_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""The types a delta can be taken between; every other type is compared bit for bit and replaced whole."""


def dtype_code(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype, for example `BF16`."""
    code = _CODE_BY_DTYPE.get(dtype)
    if code is None:
        raise DeltaError(f"dtype {dtype} cannot be stored; supported: {', '.join(_DTYPE_BY_CODE)}")
    return code


def dtype_of_code(code: object, where: str) -> torch.dtype:
    """The torch dtype of a safetensors name; `where` says what is being read, for the error."""
    dtype = _DTYPE_BY_CODE.get(code) if isinstance(code, str) else None
    if dtype is None:
        raise DeltaError(f"{where}: dtype {code!r} is not supported; supported: {', '.join(_DTYPE_BY_CODE)}")
    return dtype
