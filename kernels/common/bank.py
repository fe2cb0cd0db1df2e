"""`DeltaBank`: the one-bit deltas of several variants for one weight matrix, in slots.

Legend: V slots (variants), P sign planes, N outputs, K inputs, B = ceil(K / 8) bytes of a sign row, R rank.
Bit i of byte j of a sign row is input column 8j + i; 1 means +1, 0 means -1 (the layout of the delta artifact).
The dense form of slot v is sum_p row_scale[v,p,:,None] * col_scale[v,p,None,:] * S[v,p] + left[v] @ right[v].

Contract: shapes and dtypes are checked at construction. Values are checked where they enter: `put()` and
`check_values()`; the CPU kernels check again the scales of the variants they use. The tensors may be updated in
place (a server does); the object itself never changes. It does not know names, files or caches of variants.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def _require(tensor: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; needed: {dtype} of shape {shape}. "
            "Use DeltaBank.zeros() to get matching buffers."
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class DeltaBank:
    """Deltas of V variants for one `[N, K]` weight."""

    in_features: int
    """K."""
    sign_VPNB: Tensor
    """uint8 `[V, P, N, ceil(K/8)]`."""
    row_scale_VPN: Tensor
    """float32 `[V, P, N]`, or `[V, P, 1]` for one scale per matrix."""
    col_scale_VPK: Tensor | None = None
    """float32 `[V, P, K]`, or None."""
    left_VNR: Tensor | None = None
    """Low-rank residual `[V, N, R]` (floating point), together with `right_VRK`, or None."""
    right_VRK: Tensor | None = None
    """Low-rank residual `[V, R, K]`, same dtype as `left_VNR`, or None."""

    def __post_init__(self) -> None:
        if self.in_features < 1:
            raise ValueError(f"in_features is {self.in_features}; allowed: 1 or more.")
        sign = self.sign_VPNB
        row_bytes = (self.in_features + 7) // 8
        if sign.dtype != torch.uint8 or sign.dim() != 4 or 0 in sign.shape:
            raise ValueError(
                f"sign_VPNB is {sign.dtype} of shape {tuple(sign.shape)}; needed: torch.uint8 [V, P, N, {row_bytes}], "
                "no dimension empty."
            )
        if sign.shape[3] != row_bytes:
            raise ValueError(
                f"sign_VPNB has {sign.shape[3]} bytes a row; needed for in_features={self.in_features}: {row_bytes}. "
                "Pack the signs again, eight columns to a byte."
            )
        v, p, n = sign.shape[:3]
        per_matrix = self.row_scale_VPN.dim() == 3 and self.row_scale_VPN.shape[2] == 1
        _require(self.row_scale_VPN, "row_scale_VPN", torch.float32, (v, p, 1 if per_matrix else n))
        if self.col_scale_VPK is not None:
            _require(self.col_scale_VPK, "col_scale_VPK", torch.float32, (v, p, self.in_features))
        if (self.left_VNR is None) != (self.right_VRK is None):
            raise ValueError("one of left_VNR and right_VRK is missing; give both or neither.")
        if self.left_VNR is not None and self.right_VRK is not None:
            rank = self.left_VNR.shape[-1]
            if not self.left_VNR.is_floating_point():
                raise ValueError(f"left_VNR is {self.left_VNR.dtype}; allowed: floating point.")
            _require(self.left_VNR, "left_VNR", self.left_VNR.dtype, (v, n, rank))
            _require(self.right_VRK, "right_VRK", self.left_VNR.dtype, (v, rank, self.in_features))
        for name, tensor in self._tensors().items():
            if tensor.device != sign.device:
                raise ValueError(f"{name} is on {tensor.device}; needed: {sign.device}, where sign_VPNB is.")

    @classmethod
    def zeros(
        cls,
        *,
        variants: int,
        out_features: int,
        in_features: int,
        planes: int = 1,
        per_matrix: bool = False,
        with_columns: bool = False,
        rank: int = 0,
        rank_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "DeltaBank":
        """Empty slots: every scale is 0, so a slot that was never filled serves the base."""
        v, p, n, k = variants, planes, out_features, in_features

        def scale(*shape: int, fill: float = 0.0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.float32, device=device)

        return cls(
            in_features=k,
            sign_VPNB=torch.zeros(v, p, n, (k + 7) // 8, dtype=torch.uint8, device=device),
            row_scale_VPN=scale(v, p, 1 if per_matrix else n),
            col_scale_VPK=scale(v, p, k, fill=1.0) if with_columns else None,
            left_VNR=torch.zeros(v, n, rank, dtype=rank_dtype, device=device) if rank else None,
            right_VRK=torch.zeros(v, rank, k, dtype=rank_dtype, device=device) if rank else None,
        )

    @property
    def variants(self) -> int:
        """V, the number of slots."""
        return self.sign_VPNB.shape[0]

    @property
    def planes(self) -> int:
        """P, the number of sign planes."""
        return self.sign_VPNB.shape[1]

    @property
    def out_features(self) -> int:
        """N."""
        return self.sign_VPNB.shape[2]

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.sign_VPNB.device

    @property
    def bytes_per_variant(self) -> int:
        """Bytes that one slot takes."""
        return sum(t.nbytes for t in self._tensors().values()) // self.variants

    def put(
        self,
        slot: int,
        *,
        sign_PNB: Tensor,
        row_scale_PN: Tensor,
        col_scale_PK: Tensor | None = None,
        left_NR: Tensor | None = None,
        right_RK: Tensor | None = None,
    ) -> None:
        """Fill one slot in place. A part that the bank holds and the call leaves out is reset to neutral.

        Raises:
            ValueError: slot out of range, a shape that does not fit, a part the bank has no room for, a scale or
                factor that is not finite. Nothing is written then.
        """
        if not 0 <= slot < self.variants:
            raise ValueError(f"slot is {slot}; allowed: 0 to {self.variants - 1}.")
        parts = {
            "sign_VPNB": sign_PNB,
            "row_scale_VPN": row_scale_PN,
            "col_scale_VPK": col_scale_PK,
            "left_VNR": left_NR,
            "right_VRK": right_RK,
        }
        held = self._tensors()
        for name, part in parts.items():
            if part is None:
                continue
            if name not in held:
                raise ValueError(
                    f"a value for {name} was given, but the bank has none. Create it with DeltaBank.zeros()."
                )
            if tuple(part.shape) != tuple(held[name].shape[1:]):
                raise ValueError(
                    f"the part for {name} has shape {tuple(part.shape)}; needed: {tuple(held[name].shape[1:])}."
                )
            if part.is_floating_point() and not bool(torch.isfinite(part).all()):
                raise ValueError(f"the part for {name} holds a NaN or an infinity. Export that delta again.")
        for name, tensor in held.items():
            part = parts[name]
            if part is not None:
                tensor[slot].copy_(part)
            else:
                tensor[slot].fill_(1.0 if name == "col_scale_VPK" else 0.0)

    def check_values(self) -> None:
        """Refuse scales and factors that are not finite. Synchronises a GPU: call it at load, not per step.

        Raises:
            ValueError: naming the tensor and the slot.
        """
        for name, tensor in self._tensors().items():
            if not tensor.is_floating_point():
                continue
            bad = (~torch.isfinite(tensor)).flatten(1).any(dim=1).nonzero().flatten().tolist()
            if bad:
                raise ValueError(
                    f"{name} of slot {bad[0]} holds a NaN or an infinity. Export that delta again."
                )

    def _tensors(self) -> dict[str, Tensor]:
        named = {
            "sign_VPNB": self.sign_VPNB,
            "row_scale_VPN": self.row_scale_VPN,
            "col_scale_VPK": self.col_scale_VPK,
            "left_VNR": self.left_VNR,
            "right_VRK": self.right_VRK,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}
