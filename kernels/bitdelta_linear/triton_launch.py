"""Choice and launch of the Triton kernels of operator 1, without a host synchronisation.

Contract: `sign [V, P, N, B]` (slots may lie apart), contiguous `row_scale [V, P, N or 1]` and `col_scale [V, P, K]`; x,
weight and y with unit inner stride (others are copied). Up to DECODE_TOKENS tokens take the decode kernel, more take
the prefill kernel. The tile sizes are autotuned on a GPU; the interpreter takes the first configuration of each list.
"""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from .triton_kernel import decode_kernel, prefill_kernel

DECODE_TOKENS = 64


def _config(block_n: int, block_k: int, warps: int, stages: int, **blocks: int) -> triton.Config:
    return triton.Config(
        {"BLOCK_N": block_n, "BLOCK_K": block_k, **blocks}, num_warps=warps, num_stages=stages
    )


# For each padded token count. No configuration spills on the architecture it is listed for (held by a test).
DECODE_CONFIGS = {
    16: [_config(32, 64, 4, 5), _config(16, 128, 4, 5), _config(64, 128, 4, 3)],
    32: [_config(32, 128, 4, 4), _config(16, 128, 4, 4), _config(64, 64, 4, 4)],
    64: [_config(32, 64, 4, 4), _config(16, 64, 4, 4), _config(64, 64, 4, 4)],
}
DECODE_CONFIGS_SM90 = {**DECODE_CONFIGS, 16: [_config(32, 128, 4, 4), *DECODE_CONFIGS[16]]}
PREFILL_CONFIGS = [
    _config(64, 64, 4, 3, BLOCK_T=64),
    _config(128, 64, 8, 3, BLOCK_T=128),
    _config(64, 64, 4, 3, BLOCK_T=128),
    _config(64, 128, 4, 3, BLOCK_T=16),
]
# wgmma reads B from shared memory; mma.sync keeps it in registers and would spill here.
PREFILL_CONFIGS_SM90 = [
    *PREFILL_CONFIGS,
    _config(128, 64, 8, 2, BLOCK_T=256),
    _config(128, 64, 4, 2, BLOCK_T=64),
]


# y is both read and written in the add form: tuning must not add more than once.
@cache
def _tuned_decode(block_t: int, sm90: bool) -> Any:
    configs = (DECODE_CONFIGS_SM90 if sm90 else DECODE_CONFIGS)[block_t]
    tune = triton.autotune(configs, key=["N", "K", "V", "HAS_W"], restore_value=["y_ptr"])
    return tune(decode_kernel)


@cache
def _tuned_prefill(sm90: bool) -> Any:
    configs = PREFILL_CONFIGS_SM90 if sm90 else PREFILL_CONFIGS
    tune = triton.autotune(configs, key=["N", "K", "V", "T_CLASS", "HAS_W"], restore_value=["y_ptr"])
    return tune(prefill_kernel)


def sort_tokens(variant: Tensor, variants: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token numbers sorted by group, group of each place, and the first place of each of `variants + 2` groups.

    Group 0 is the base, 1 + v is variant v, `variants + 1` holds every index out of range. All int32 on the device.
    """
    valid = (variant >= -1) & (variant < variants)
    group = torch.where(valid, variant + 1, variants + 1)
    sorted_group, order = torch.sort(group, stable=True)
    edges = torch.arange(variants + 3, device=variant.device, dtype=sorted_group.dtype)
    start = torch.searchsorted(sorted_group, edges)
    return order.to(torch.int32), sorted_group.to(torch.int32), start.to(torch.int32)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def token_class(tokens: int) -> int:
    """Power of two at or above the token count: one tuning for each class, not for each count."""
    return triton.next_power_of_2(tokens)


def launch_linear(
    y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    sign: Tensor,
    row_scale: Tensor,
    col_scale: Tensor | None,
    variant: Tensor,
) -> None:
    """Fill y (with a weight) or add onto y (without)."""
    tokens, k = x.shape
    variants, planes, n, _ = sign.shape
    if tokens == 0:
        return
    target = y if y.stride(1) == 1 else y.contiguous()
    x, row_scale = _rows(x), row_scale.contiguous()
    if not sign[0].is_contiguous():  # slots may lie apart, parts of a larger buffer
        sign = sign.contiguous()
    weight = None if weight is None else _rows(weight)
    order, group, start = sort_tokens(variant, variants)
    shared = {
        "y_ptr": target,
        "x_ptr": x,
        "w_ptr": x if weight is None else weight,
        "bias_ptr": x if bias is None else bias.contiguous(),
        "sign_ptr": sign,
        "row_ptr": row_scale,
        "col_ptr": row_scale if col_scale is None else col_scale.contiguous(),
        "order_ptr": order,
        "start_ptr": start,
        "T": tokens,
        "N": n,
        "K": k,
        "B": sign.shape[3],
        "V": variants,
        "sign_stride": sign.stride(0),
        "y_stride": target.stride(0),
        "x_stride": x.stride(0),
        "w_stride": 0 if weight is None else weight.stride(0),
        "HAS_W": weight is not None,
        "HAS_BIAS": bias is not None,
        "HAS_COL": col_scale is not None,
        "PER_MATRIX": row_scale.shape[2] == 1 and n != 1,
        "PLANES": planes,
        "INTERPRETED": x.device.type == "cpu",
    }
    tuned = x.device.type == "cuda"
    sm90 = tuned and torch.cuda.get_device_capability(x.device)[0] >= 9
    if tokens <= DECODE_TOKENS:
        block_t = max(16, triton.next_power_of_2(tokens))
        few = {**shared, "group_ptr": group, "BLOCK_T": block_t}
        if tuned:
            _tuned_decode(block_t, sm90)[lambda meta: (triton.cdiv(n, meta["BLOCK_N"]),)](**few)
        else:
            config = DECODE_CONFIGS[block_t][0].kwargs
            decode_kernel[(triton.cdiv(n, config["BLOCK_N"]),)](**few, **config)
    else:
        many = {**shared, "GROUPS": triton.next_power_of_2(variants + 2), "T_CLASS": token_class(tokens)}

        def grid(meta: dict) -> tuple[int, int]:
            return triton.cdiv(tokens, meta["BLOCK_T"]) + variants + 1, triton.cdiv(n, meta["BLOCK_N"])

        if tuned:
            _tuned_prefill(sm90)[grid](**many)
        else:
            config = PREFILL_CONFIGS[0].kwargs
            prefill_kernel[grid(config)](**many, **config)
    if target is not y:
        y.copy_(target)
