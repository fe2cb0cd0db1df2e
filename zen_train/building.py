"""The model that is trained: the base loaded whole or sharded from the start, adapters, and what stays frozen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from zen_train.base import Base, quiet_transformers
from zen_train.config import TuningSection
from zen_train.delta.sources import uncompiled
from zen_train.errors import ConfigError
from zen_train.shards import write_full_


def whole_model(base: Base, tuning: TuningSection, *, attention: str) -> Any:
    """The base in float32 on the CPU, with LoRA adapters when they are asked for."""
    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(
            base.folder, dtype=torch.float32, attn_implementation=attention
        )
    if tuning.method == "lora":
        from peft import LoraConfig, get_peft_model

        lora = tuning.lora
        model = get_peft_model(
            model,
            LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=lora.target_modules,
                task_type="CAUSAL_LM",
            ),
        )
    return model


def sharded_model(
    base: Base, tuning: TuningSection, attention: str, *, mesh: DeviceMesh, device: torch.device
) -> Any:
    """FSDP2: parameters are born on the meta device, sharded block by block, then filled from the base's files."""
    if tuning.method == "lora":
        raise ConfigError(
            "tuning.method=lora with trainer.strategy=fsdp2 is not supported. Use strategy=ddp."
        )
    from accelerate import init_empty_weights

    config = AutoConfig.from_pretrained(base.folder, dtype=torch.float32)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    model.tie_weights()
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    source = base.source()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) and parameter.device.type == "meta":
                module.register_parameter(name, nn.Parameter(torch.empty_like(parameter, device=device)))
    model.tie_weights()
    fill_(model, ((name, source.get(name)) for name, _ in model.named_parameters()))
    return model


def freeze(model: Any, tuning: TuningSection) -> None:
    """Exclude from training what `tuning` says. Raises ConfigError when nothing would be left."""
    if tuning.freeze_embeddings:
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.requires_grad_(False)
    blocks = _blocks(model)
    if tuning.freeze_layers > len(blocks):
        raise ConfigError(
            f"tuning.freeze_layers={tuning.freeze_layers}: the model has {len(blocks)} blocks. "
            f"Use 0 to {len(blocks)}."
        )
    for block in blocks[: tuning.freeze_layers]:
        block.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("tuning freezes every parameter: nothing would be trained. Freeze less.")


@torch.no_grad()
def fill_(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite all parameters by their names, in place; names that the model does not have, such as tied ones, are
    passed over. Raises ConfigError for a parameter that no weight was given for: it would silently stay what it was.
    """
    left = dict(named_weights(model))
    for name, tensor in weights:
        if (parameter := left.pop(name, None)) is not None:
            write_full_(parameter, tensor)
    if left:
        named = f"{', '.join(sorted(left)[:3])}{' ...' if len(left) > 3 else ''}"
        raise ConfigError(
            f"All weights of the model were to be replaced, and {len(left)} were not given: {named}. A callback that "
            "renames modules makes names that the base's files do not have: wrap them without renaming."
        )


def named_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters under their names in the base's files, whatever `torch.compile` has wrapped."""
    for name, parameter in model.named_parameters():
        yield uncompiled(name), parameter


def _blocks(model: nn.Module) -> nn.ModuleList:
    """The stack of transformer blocks: the longest ModuleList of the decoder."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no stack of blocks; it cannot be frozen or sharded by block."
        )
    return max(lists, key=len)


@torch.no_grad()
def head_is_linear(model: Any) -> bool:
    """Whether logits are exactly `head(hidden)`: so for Llama, Mistral, Qwen, GPT-2; not with soft caps or scales."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    was_training = model.training
    model.eval()
    probe = torch.arange(4, device=head.weight.device)[None]
    same = torch.equal(head(model.get_decoder()(input_ids=probe)[0]), model(input_ids=probe).logits)
    model.train(was_training)
    return same
