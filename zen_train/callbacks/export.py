"""When the one-bit delta is exported: at the end of every fine-tune, and on demand at every checkpoint.

The callback gathers the tuned weights, hands them to `zen_train.delta`, and has what was written verified before it
reports success. Weights are read one tensor at a time; sharded ones are first staged on disk by rank 0, since the
artifact writer reads in its own order while gathering is a collective.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zen_train.building import named_weights
from zen_train.callbacks.allocation import planes_by_sensitivity
from zen_train.callbacks.cadence import Cadence
from zen_train.callbacks.probe import refuse_other_forms
from zen_train.config import ExportSection
from zen_train.delta import (
    ArtifactReport,
    BaseInfo,
    FolderSource,
    StateDictSource,
    TensorSource,
    sidecars_in,
    verify_artifact,
    write_artifact,
)
from zen_train.delta.sources import uncompiled
from zen_train.module import CausalLM
from zen_train.shards import read_full


class ExportCallback(L.Callback):
    """Writes `folder` at the end of the fit (`on_train_end`: `on_fit_end` comes after teardown).

    With `config.at_every_checkpoint`, also `folder-step-N` every `checkpoint_every_n_steps` optimizer steps.
    """

    def __init__(
        self,
        config: ExportSection,
        *,
        folder: Path,
        variant: str,
        base_info: BaseInfo,
        checkpoint_every_n_steps: int,
        provenance: Callable[[], dict[str, Any]],
    ) -> None:
        self.config = config
        self.folder = folder
        self.variant = variant
        self.base_info = base_info
        self.provenance = provenance
        self.cadence = Cadence(checkpoint_every_n_steps)
        self.report: ArtifactReport | None = None
        self.seconds = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse before the first step what could not be measured after the last one."""
        assert isinstance(pl_module, CausalLM)
        if self.config.used_code == "signs" and self.config.bits_per_weight is not None:
            asked = f"export.bits_per_weight={self.config.bits_per_weight:g}"
            refuse_other_forms(pl_module, asked, "export.planes")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.config.at_every_checkpoint and self.cadence.due(step) and step < trainer.max_steps:
            assert isinstance(pl_module, CausalLM)
            self.export(trainer, pl_module, self.folder.with_name(f"{self.folder.name}-step-{step}"))
            pl_module.encode()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, CausalLM)
        self.report = self.export(trainer, pl_module, self.folder)

    def export(self, trainer: L.Trainer, module: CausalLM, folder: Path) -> ArtifactReport | None:
        """Write and verify the delta of the current weights. All ranks call it; rank 0 gets the report."""
        started = time.perf_counter()
        report = None
        module.encode(exact=True)
        planes = planes_by_sensitivity(trainer, module, self.config) or self.config.planes
        with tuned_weights(module, staging=folder.with_name(f".{folder.name}-staging")) as tuned:
            if tuned is not None:
                base = module.base.source()
                report = write_artifact(
                    folder,
                    base=base,
                    tuned=tuned,
                    base_info=self.base_info,
                    variant=self.variant,
                    step=trainer.global_step,
                    scale=self.config.scale,
                    planes=planes,
                    along_weight=self.config.along_weight,
                    low_rank=self.config.low_rank,
                    code=self.config.used_code,
                    direction_bits=self.config.bits_per_weight or 1.0,
                    embedding=self.config.embedding,
                    embedding_max_relative_error=self.config.embedding_max_relative_error,
                    provenance=self.provenance(),
                    sidecars=sidecars_in(module.base.folder),
                    card=None,
                    max_shard_bytes=self.config.max_shard_bytes,
                    overwrite=True,
                )
                verify_artifact(folder, base=base, tuned=tuned)
        self.seconds += time.perf_counter() - started
        return report

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self.cadence.last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.cadence.last_step = state_dict["last_step"]


@contextmanager
def tuned_weights(module: CausalLM, *, staging: Path) -> Iterator[TensorSource | None]:
    """The tuned weights under their Hugging Face names; None on ranks other than 0. All ranks enter and leave."""
    getters = dict(full_weights(module))
    sharded = any(isinstance(parameter, DTensor) for parameter in module.model.parameters())
    try:
        if sharded:
            _stage(getters, staging, write=module.global_rank == 0)
            yield FolderSource(staging) if module.global_rank == 0 else None
        else:
            yield StateDictSource(getters) if module.global_rank == 0 else None
    finally:
        if dist.is_initialized():
            dist.barrier()
        if sharded and module.global_rank == 0:
            shutil.rmtree(staging, ignore_errors=True)


def full_weights(module: CausalLM) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """(name in the base's files, function that gives the whole float32 tensor). LoRA is merged into its matrix."""
    if module.tuning.method == "full":
        for name, parameter in named_weights(module.model):
            yield name, partial(read_full, parameter)
        return
    inner = module.model.get_base_model()
    adapted = {
        uncompiled(name): layer for name, layer in inner.named_modules() if hasattr(layer, "get_delta_weight")
    }
    for name, parameter in named_weights(inner):
        if ".lora_" in name:
            continue
        owner, plain = name.rsplit(".base_layer.", 1)[0], name.replace(".base_layer.", ".")
        layer = adapted[owner] if plain.endswith(".weight") and ".base_layer." in name else None
        yield plain, partial(_with_lora, parameter, layer)


def _with_lora(parameter: nn.Parameter, layer: Any) -> Tensor:
    weight = read_full(parameter)
    if layer is None:
        return weight
    return weight + sum(layer.get_delta_weight(adapter).detach().float() for adapter in layer.active_adapters)


def _stage(getters: dict[str, Callable[[], Tensor]], folder: Path, *, write: bool) -> None:
    """Gather every tensor in one order on all ranks; rank 0 writes each as a file of its own."""
    if write:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    weight_map = {}
    for index, (name, get) in enumerate(getters.items()):
        tensor = get()
        weight_map[name] = f"tensor-{index:05d}.safetensors"
        if write:
            save_file({name: tensor.cpu().contiguous()}, folder / weight_map[name])
    if write:
        _write_index(folder, weight_map)


def _write_index(folder: Path, weight_map: dict[str, str]) -> None:
    """The index that makes several safetensors files one model, in Hugging Face's form."""
    total = sum((folder / file).stat().st_size for file in weight_map.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
