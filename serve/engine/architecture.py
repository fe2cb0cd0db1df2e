"""What a model folder's config.json says, reduced to what the decoder operator needs; everything else is
refused.

Contract: a model that this engine would compute differently from transformers is refused by the name of the
option, never served approximately. Rotation tables come from transformers' own functions. It reads no
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from zen_train.errors import BaseModelError
from zen_train.kernels.decoder import DecoderShape, Rotary

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose table does not depend on the length of the sequence at hand."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and options of one served model."""

    model_type: str
    layers: int
    hidden: int
    mlp: int
    vocabulary: int
    decoder: DecoderShape
    tied: bool
    """Head and embedding are one tensor."""
    qkv_bias: bool
    head_norms: bool
    """Qwen3's RMS norm of each query and key head."""
    context_tokens: int

    @property
    def kv_token_values(self) -> int:
        """Numbers that one token's keys and values take over all layers."""
        return 2 * self.layers * self.decoder.kv_heads * self.decoder.head_dim


def read_architecture(folder: Path, *, context_tokens: int | None) -> tuple[Architecture, Rotary]:
    """Read and check config.json; make the rotation tables for `context_tokens` positions (None: the model's
    own number).

    Raises:
        BaseModelError: no such folder or file, or an architecture or option that is not served, by name.
    """
    if not (folder / "config.json").is_file():
        raise BaseModelError(f"{folder} has no config.json. Give the folder that save_pretrained wrote.")
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, OSError) as error:
        raise BaseModelError(f"{folder}/config.json cannot be read: {error}") from error
    _refuse_unknown(config, folder)
    longest = int(config.max_position_embeddings)
    context = context_tokens or longest
    if context > longest:
        raise BaseModelError(
            f"context_tokens={context} is more than the model's max_position_embeddings={longest}; "
            f"allowed: 1 to {longest}."
        )
    heads = int(config.num_attention_heads)
    shape = DecoderShape(
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        norm_eps=float(config.rms_norm_eps),
        window_tokens=_window(config, folder, context),
    )
    architecture = Architecture(
        model_type=config.model_type,
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        mlp=int(config.intermediate_size),
        vocabulary=int(config.vocab_size),
        decoder=shape,
        tied=bool(config.tie_word_embeddings),
        qkv_bias=config.model_type == "qwen2",
        head_norms=config.model_type == "qwen3",
        context_tokens=context,
    )
    return architecture, _rotary(config, folder, shape.head_dim, context)


def _refuse_unknown(config: PretrainedConfig, folder: Path) -> None:
    if config.model_type not in MODEL_TYPES:
        raise BaseModelError(
            f"{folder}: model_type={config.model_type!r} is not served by this engine; "
            f"served: {', '.join(MODEL_TYPES)}."
        )
    neutral: dict[str, Any] = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
    }
    for option, needed in neutral.items():
        found = getattr(config, option, needed)
        if found != needed:
            raise BaseModelError(
                f"{folder}: {option}={found!r} is not served by this engine; needed: {needed!r}."
            )


def _window(config: PretrainedConfig, folder: Path, context_tokens: int) -> int | None:
    """The window of all blocks, None where it never hides anything."""
    window = getattr(config, "sliding_window", None)
    if config.model_type.startswith("qwen") and not getattr(config, "use_sliding_window", False):
        window = None
    if window is None or window >= context_tokens:
        return None
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise BaseModelError(
            f"{folder}: layer_types mixes {sorted(kinds)}; one window for all blocks is served. "
            f"Set context_tokens to {window} or less: within the window all blocks are alike."
        )
    return int(window)


def _rotary(config: PretrainedConfig, folder: Path, head_dim: int, positions: int) -> Rotary:
    options = dict(getattr(config, "rope_parameters", None) or {})
    kind = options.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise BaseModelError(
            f"{folder}: rope_type={kind!r} is not served by this engine; served: {', '.join(ROPE_TYPES)}."
        )
    if kind == "default":
        theta = float(options["rope_theta"])
        frequency, scaling = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim), 1.0
    else:
        frequency, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angle = torch.arange(positions).float().unsqueeze(1) * frequency.float()
    return Rotary(cos=angle.cos() * scaling, sin=angle.sin() * scaling)
