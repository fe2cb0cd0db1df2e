"""A variant through lm-eval: base plus delta as a transformers model in memory, scored on the harness's own tasks.

The model is built tensor by tensor from the base's files and the artifact; nothing of its size is written to disk.
lm-eval is an optional dependency (the extra `eval`), imported when tasks are looked up. It neither trains nor serves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from zen_train.base import quiet_transformers
from zen_train.delta import DeltaArtifact, FolderSource, iter_applied
from zen_train.delta.apply import stored_as
from zen_train.delta.dtypes import ARITHMETIC_DTYPES
from zen_train.delta.model_files import copy_side_files, write_model_config
from zen_train.errors import BaseModelError, ConfigError, DataError

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is asked of lm-eval, under its own names. `limit` below 1 is a share of the examples."""

    tasks: list[str]
    include_path: str | None = None
    limit: int | float | None = None
    num_fewshot: int | None = None
    batch_size: int = 1
    apply_chat_template: bool = False
    device: str = "cpu"
    dtype: Dtype = "float32"


def evaluate(
    delta: str | Path, base: str | Path, settings: Settings, *, with_base: bool = False
) -> dict[str, Any]:
    """lm-eval's results of base + delta, and under `zen_delta` which delta it was and, when asked for, the base's.

    Raises:
        ConfigError: lm-eval is not installed, or a task is not known.
        DataError: the examples of a task cannot be read.
        DeltaError: another base or a damaged artifact.
    """
    tasks = _Tasks(settings)
    artifact = DeltaArtifact.open(delta)
    results = tasks.score(*applied_model(artifact, base, settings.dtype))
    about: dict[str, Any] = {
        "folder": str(artifact.folder),
        "variant": artifact.config.variant,
        "content_hash": artifact.content_hash,
        "base": str(base),
        "base_results": None,
    }
    if with_base:  # one after the other, so that two models are never in memory together
        about["base_results"] = tasks.score(*_base_model(base, settings.dtype))["results"]
    return results | {"zen_delta": about}


def applied_model(
    artifact: DeltaArtifact, base_folder: str | Path, dtype: Dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Base + delta and its tokenizer, as transformers loads the folder that `apply_delta` writes.

    Raises:
        DeltaError: another base or damaged data.
        BaseModelError: transformers finds parameters that base and delta do not give.
    """
    base = FolderSource(base_folder)
    weights = dict(_rounded(artifact, base, getattr(torch, dtype)))
    with tempfile.TemporaryDirectory() as folder:  # of small files: configuration, tokenizer, chat template
        copy_side_files(artifact, Path(base_folder), Path(folder))
        write_model_config(base.config, artifact, dtype, Path(folder) / "config.json")
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    # The class itself: AutoModelForCausalLM takes no state dict without a folder.
    model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    with quiet_transformers():
        model, loaded = model_class.from_pretrained(
            None, config=config, state_dict=weights, dtype=getattr(torch, dtype), output_loading_info=True
        )
    if missing := sorted([*loaded["missing_keys"], *loaded["unexpected_keys"]]):
        raise BaseModelError(
            f"{base.label}: {len(missing)} parameters of {model_class.__name__} do not fit its files, for example "
            f"{missing[0]}; evaluate the folder that `python -m zen_train.delta apply` writes instead"
        )
    return model, tokenizer


def _rounded(
    artifact: DeltaArtifact, base: FolderSource, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in iter_applied(artifact, base):
        fits = tensor.dtype in ARITHMETIC_DTYPES
        entry = artifact.config.tensors[artifact.config.tensors[name].target or name]
        yield name, stored_as(tensor, dtype, transposed=entry.transposed) if fits else tensor


def _base_model(base: str | Path, dtype: Dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
    return model, AutoTokenizer.from_pretrained(base)


class _Tasks:
    """lm-eval with the tasks asked for, looked up before any model is built."""

    def __init__(self, settings: Settings) -> None:
        try:
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ConfigError(
                f"lm-eval is not installed ({error}). Install the extra: pip install 'zen-train[eval]', in the "
                "repository pip install -c constraints.txt -e '.[eval]'"
            ) from error
        self.settings = settings
        self.manager = TaskManager(include_path=settings.include_path)
        self.names: list[str] = []
        for wanted in settings.tasks:
            found = self.manager.match_tasks([wanted])
            if not found:
                raise ConfigError(
                    f"lm-eval knows no task {wanted!r} among {len(self.manager.all_tasks)}; `lm-eval ls tasks` lists "
                    "them, --include-path names a folder with tasks of your own"
                )
            self.names += [name for name in found if name not in self.names]

    def score(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        asked = self.settings
        wrapped = HFLM(
            pretrained=model.to(asked.device).eval(), tokenizer=tokenizer, batch_size=asked.batch_size
        )
        try:
            results = simple_evaluate(
                wrapped,
                tasks=self.names,
                task_manager=self.manager,
                num_fewshot=asked.num_fewshot,
                limit=asked.limit,
                apply_chat_template=asked.apply_chat_template,
                log_samples=False,
            )
        except OSError as error:
            raise DataError(
                f"lm-eval could not read the examples of {', '.join(self.names)}: {error}. Check the network, or "
                "the data_files of a task of your own."
            ) from error
        assert results is not None, "only ranks other than the first get nothing"
        return dict(results)
