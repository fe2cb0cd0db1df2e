"""Fake implementations of the C++ operators: shapes and dtypes only, for `torch.compile`."""

import torch
from torch import Tensor


def register_fakes() -> None:
    """Attach the fakes. Called once, right after the library was loaded."""

    @torch.library.register_fake("zen_train::cpu_linear")
    def _(x: Tensor, weight: Tensor, *_: object) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[0])

    @torch.library.register_fake("zen_train::cpu_add_")
    def _(*_: object) -> None:
        return None

    @torch.library.register_fake("zen_train::cpu_sign_pack")
    def _(w1: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n, k = w1.shape
        return (
            w1.new_empty(n, (k + 7) // 8, dtype=torch.uint8),
            w1.new_empty(n, dtype=torch.float64),
            w1.new_empty(n, dtype=torch.float64),
            w1.new_empty(n, dtype=torch.int64),
        )

    @torch.library.register_fake("zen_train::cpu_embedding")
    def _(ids: Tensor, variant: Tensor, table: Tensor, *_: object) -> Tensor:
        return table.new_empty(ids.shape[0], table.shape[1])

    @torch.library.register_fake("zen_train::cpu_one_bit_code_")
    @torch.library.register_fake("zen_train::cpu_decoder_")
    @torch.library.register_fake("zen_train::cpu_decoder_step_")
    def _(*_: object) -> None:
        return None

    @torch.library.register_fake("zen_train::cpu_head")
    def _(x: Tensor, weight: Tensor, *_: object) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)

    @torch.library.register_fake("zen_train::cpu_direction_rows")
    def _(rows: Tensor, *_: object) -> Tensor:
        return torch.empty_like(rows)

    @torch.library.register_fake("zen_train::cpu_top")
    def _(scores: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return scores.new_empty(scores.shape[0]), scores.new_empty(scores.shape[0], dtype=torch.int64)
