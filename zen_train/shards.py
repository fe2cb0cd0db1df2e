"""Parameters as whole tensors, wherever they live: plain, replicated (DDP) or sharded (FSDP2's DTensor).

Everything here that touches a DTensor is a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter (the whole of it unless it is sharded); shares storage."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def read_full(parameter: Tensor) -> Tensor:
    """The whole parameter, float32, on the CPU or its device. A plain one is not copied when it is float32."""
    tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return tensor.detach().float()


def read_full_as(parameter: Tensor, part: Tensor) -> Tensor:
    """The whole tensor of which `part` is this rank's piece, laid out as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return part.float()
    part = part.to(parameter.device)
    whole = DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
    return whole.full_tensor().float()


@torch.no_grad()
def write_full_(parameter: nn.Parameter | Tensor, tensor: Tensor) -> None:
    """Copy a whole tensor into a parameter in place, each rank keeping its own part. No communication."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(tensor)
        return
    tensor = tensor.to(device=parameter.device, dtype=parameter.dtype)
    # src_data_rank=None: every rank holds the same values already, so nothing is broadcast.
    laid_out = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(laid_out.to_local())
