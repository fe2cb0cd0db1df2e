"""The LightningModule around a causal language model: float32 masters, token-normalised loss, AdamW, cosine.

It trains what `TuningSection` names and knows nothing of merging, exporting or reporting. Its checkpoint holds
the trainable parameters only; what is frozen is the base, and the base is on disk already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zen_train.aware import OneBitAdamW
from zen_train.base import Base
from zen_train.building import fill_, freeze, head_is_linear, named_weights, sharded_model, whole_model
from zen_train.config import ExportSection, OptimSection, TrainerSection, TuningSection
from zen_train.data.packing import model_inputs, separates_documents
from zen_train.delta.roles import is_embedding, is_head, is_transposed
from zen_train.errors import ConfigError, TrainingError
from zen_train.loss import IGNORE, head_nll, logits_nll, shifted

Batch = Mapping[str, Any]


class CausalLM(L.LightningModule):
    """One base model under training.

    A batch is what `TextDataModule` yields: `input_ids`, `labels`, `position_ids` of shape [B, T], `window_tokens`
    (labelled tokens of the whole optimizer step, over all micro-batches and ranks) and `record_ids`.
    """

    def __init__(
        self,
        base: Base,
        *,
        attention: str = "sdpa",
        tuning: TuningSection,
        optim: OptimSection,
        trainer: TrainerSection,
        export: ExportSection | None = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.attention = attention
        self.tuning, self.optim, self.settings = tuning, optim, trainer
        self.export = export or ExportSection()
        self.one_bit: OneBitAdamW | None = None
        self.strict_loading = False  # a checkpoint holds what is trained, not what is frozen
        self.window_nll = 0.0
        self.gradient_norm = math.nan
        self.model: Any = None  # PreTrainedModel, or PEFT's wrapper of one; their types describe neither well

    # -- building ---------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the model on first use, sharded from the start when the trainer has a device mesh."""
        if self.model is not None:
            return
        sharded = self.device_mesh is not None
        if self.device_mesh is None:
            self.model = whole_model(self.base, self.tuning, attention=self.attention)
        else:
            mesh = self.device_mesh["data_parallel"]
            self.model = sharded_model(self.base, self.tuning, self.attention, mesh=mesh, device=self.device)
        freeze(self.model, self.tuning)
        if self.settings.gradient_checkpointing:
            name = "activation_checkpointing_enable"  # since transformers 5.20; the other one is deprecated there
            enable = getattr(self.model, name, None) or self.model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        self.head_is_linear = not sharded and head_is_linear(self.model)
        if not sharded and not separates_documents(self.model, vocabulary=self.model.config.vocab_size):
            raise ConfigError(
                f"{type(self.model).__name__} with base.attention={self.attention} ignores position_ids, so documents "
                "packed into one block would see each other. Use another base.attention or another base."
            )
        if self.settings.compile:
            self.model.get_decoder().compile()  # in place: parameter names stay as they are
        self.model.train()

    # -- loss -------------------------------------------------------------------------------------------------------

    def nll(self, batch: Batch) -> Tensor:
        """Summed negative log-likelihood of the labelled tokens of a batch. float32 scalar."""
        inputs = model_inputs(batch)
        if not self.head_is_linear:
            return logits_nll(self.model(**inputs).logits, batch["labels"])
        hidden_BTD = self.model.get_decoder()(**inputs)[0]
        label_BT = shifted(batch["labels"])
        kept_BT = label_BT != IGNORE
        return head_nll(hidden_BTD[kept_BT], self.model.get_output_embeddings(), label_BT[kept_BT])

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        nll = self.nll(batch)
        value = nll.item()
        if not math.isfinite(value):
            records = sorted({record for block in batch["record_ids"] for record in block})
            raise TrainingError(
                f"The loss became {value} at optimizer step {self.trainer.global_step + 1}. The batch held: "
                f"{', '.join(records[:8])}{' ...' if len(records) > 8 else ''}. The last good checkpoint is kept. "
                "Lower optim.learning_rate, raise optim.warmup_steps, or look at these records; then resume=auto."
            )
        self.window_nll += value
        # Lightning divides by the accumulation and DDP averages over ranks; the window's token count undoes both, so
        # that every token of an optimizer step weighs the same however the step was split (torchtune PR#1875).
        return nll * (
            self.trainer.accumulate_grad_batches * self.trainer.world_size / int(batch["window_tokens"])
        )

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        tokens = int((batch["labels"] != IGNORE).sum())
        self.log("val/loss", self.nll(batch) / max(tokens, 1), batch_size=max(tokens, 1), sync_dist=True)

    # -- optimizer --------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        config = self.optim
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.ndim >= 2]
        others = [parameter for parameter in trained if parameter.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizer: torch.optim.Optimizer = self._optimizer(
            [group for group in groups if group["params"]],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            fused=not any(isinstance(parameter, DTensor) for parameter in trained),
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_share(step, config, self.settings.max_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _optimizer(self, groups: list[dict[str, Any]], **adamw: Any) -> torch.optim.AdamW:
        """AdamW, or the one that ends with one-bit weights (`export.aware`)."""
        if not self.export.aware:
            return torch.optim.AdamW(groups, **adamw)
        source, model_type, coded = self.base.source(), self.model.config.model_type, self.coded_parameters()
        stored = {parameter: source.get(name).to(parameter.device) for name, parameter in coded.items()}
        self.one_bit = OneBitAdamW(
            groups,
            base=stored,
            transposed=[parameter for name, parameter in coded.items() if is_transposed(name, model_type)],
            start=max(1, round(self.settings.max_steps * (1.0 - self.export.aware_share))),
            scale=self.export.scale,
            along_weight=self.export.along_weight,
            latent_rate=self.export.aware_rate,
            dither=self.codes_in_bf16,
            **adamw,
        )
        return self.one_bit

    def coded_parameters(self) -> dict[str, nn.Parameter]:
        """What one-bit training codes: every trained matrix, embedding and head unless they are exported dense."""
        dense = self.export.embedding == "dense"
        return {
            name: parameter
            for name, parameter in trained_parameters(self)
            if parameter.ndim >= 2 and not (dense and (is_embedding(name) or is_head(name)))
        }

    @property
    def codes_in_bf16(self) -> bool:
        """Whether the forward pass sees one-bit weights in bf16, on whose grid the base lies."""
        source = self.base.source()
        stored = {source.spec(name).dtype for name in source.names()}
        return self.settings.precision == "bf16-mixed" and stored <= {torch.bfloat16}

    def encode(self, *, exact: bool = False) -> None:
        """Bring one-bit weights in step with their latents after something wrote to those; `exact`: for export."""
        if self.one_bit is not None:
            self.one_bit.encode(exact=exact)

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by global norm. Lightning refuses to for a fused optimizer under autocast, for a scaler's sake."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val or math.inf)
        self.gradient_norm = norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()
        if not math.isfinite(self.gradient_norm):
            raise TrainingError(
                f"The gradient norm became {self.gradient_norm} at optimizer step {self.trainer.global_step + 1}; the "
                "weights were not changed by it and the last good checkpoint is kept. Lower optim.learning_rate or "
                "raise optim.warmup_steps, then resume=auto."
            )

    # -- checkpoint -------------------------------------------------------------------------------------------------

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on one-bit-aware with a run that was not, or the other way round."""
        groups = [
            group for state in checkpoint.get("optimizer_states", ()) for group in state["param_groups"]
        ]
        saved = any("coded" in group for group in groups)
        if groups and saved != self.export.aware:
            yes, no = str(saved).lower(), str(self.export.aware).lower()
            raise ConfigError(
                f"The checkpoint is of a run with export.aware={yes}, and export.aware={no} is asked for: the state of "
                f"its optimizer does not fit. Resume with export.aware={yes}, or start anew with overwrite=true."
            )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Only what is trained: a checkpoint never repeats the base (#21823)."""
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return {
            name: tensor for name, tensor in super().state_dict(*args, **kwargs).items() if name in trained
        }


def learning_rate_share(step: int, config: OptimSection, max_steps: int) -> float:
    """Share of the peak learning rate at an optimizer step: linear warm-up, then cosine to the final share."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    floor = config.final_learning_rate_share
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def load_weights_(module: CausalLM, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite parameters by their names in the base's files, in place, one at a time.

    Same Parameter, same storage, so optimizers and compiled graphs stay valid. LoRA adapters are switched off:
    the weights given replace the sum of matrix and adapter.
    """
    if module.tuning.method == "lora":
        module.model.unload()
        module.model = module.model.get_base_model()
    fill_(module.model, weights)


def trained_parameters(module: CausalLM) -> Iterator[tuple[str, nn.Parameter]]:
    """(name inside the Hugging Face model, parameter) of everything that is trained."""
    for name, parameter in named_weights(module.model):
        if parameter.requires_grad:
            yield name, parameter


def trained_values(module: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """The same with what the optimizer moves: the latent of a one-bit weight. Write to them, then `module.encode()`."""
    for name, parameter in trained_parameters(module):
        yield name, parameter if module.one_bit is None else module.one_bit.latent(parameter)
