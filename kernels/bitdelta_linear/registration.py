"""`torch.library` registration of operator 1, so that `torch.compile` and CUDA graphs see opaque operators.

One operator for each backend and entry point, each with a fake implementation. The C++ operators register themselves
when their library loads (`zen_train.kernels.cpu`).
"""

import torch
from torch import Tensor

from .reference import delta_term, linear_reference


def check_values(sign: Tensor, row_scale: Tensor, col_scale: Tensor | None, variant: Tensor) -> None:
    """Refuse an index out of range and a scale that is not finite. CPU only: elsewhere it would stop the device."""
    if torch.compiler.is_compiling() or variant.device.type != "cpu":
        return
    allowed = sign.shape[0] - 1
    bad = ((variant < -1) | (variant > allowed)).nonzero().flatten()
    if bad.numel():
        at = int(bad[0])
        raise ValueError(f"variant[{at}] is {int(variant[at])}; allowed: -1 (base) to {allowed}.")
    for name, scale in (("row_scale", row_scale), ("col_scale", col_scale)):
        if scale is not None and not bool(torch.isfinite(scale).all()):
            raise ValueError(
                f"{name} holds a NaN or an infinity; allowed: finite values. Export that delta again."
            )


@torch.library.custom_op("zen_train::reference_linear", mutates_args=())
def reference_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sign: Tensor,
    row_scale: Tensor,
    col_scale: Tensor | None,
    variant: Tensor,
) -> Tensor:
    """`linear_reference` as an operator."""
    return linear_reference(x, weight, bias, sign, row_scale, col_scale, variant)


@torch.library.custom_op("zen_train::reference_add_", mutates_args=("y",))
def reference_add_(
    y: Tensor, x: Tensor, sign: Tensor, row_scale: Tensor, col_scale: Tensor | None, variant: Tensor
) -> None:
    """`y += delta_term(x)` as an operator, one rounding."""
    y.copy_(y.to(torch.float32) + delta_term(x, sign, row_scale, col_scale, variant))


@torch.library.custom_op("zen_train::triton_linear", mutates_args=())
def triton_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sign: Tensor,
    row_scale: Tensor,
    col_scale: Tensor | None,
    variant: Tensor,
) -> Tensor:
    """The fused Triton kernels as an operator."""
    from .triton_launch import launch_linear

    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    launch_linear(y, x, weight, bias, sign, row_scale, col_scale, variant)
    return y


@torch.library.custom_op("zen_train::triton_add_", mutates_args=("y",))
def triton_add_(
    y: Tensor, x: Tensor, sign: Tensor, row_scale: Tensor, col_scale: Tensor | None, variant: Tensor
) -> None:
    """The Triton delta term added onto y as an operator."""
    from .triton_launch import launch_linear

    launch_linear(y, x, None, None, sign, row_scale, col_scale, variant)


def _fake_linear(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_add_(*_: object) -> None:
    return None


for _op in (reference_linear, triton_linear):
    _op.register_fake(_fake_linear)
for _op in (reference_add_, triton_add_):
    _op.register_fake(_fake_add_)
