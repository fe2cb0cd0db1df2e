"""When checkpoints are merged, and whether the result is kept. What a merge computes is `zen_train.merge`'s.

Every N optimizer steps the current weights are scored, merged with the best previous weights, and scored again.
`accept="if_not_worse"` rolls back from a copy on disk when validation got worse. A merge is deterministic, leaves the
global random state untouched, and ends with identical weights on all ranks: one rank computes a matrix, the others
receive it (peft PR#2225), over a process group of its own whose timeout fits the slowest SVD (torchtune #2093).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from zen_train.aware import OneBitAdamW
from zen_train.callbacks.cadence import Cadence
from zen_train.callbacks.snapshot import Reader, Snapshot
from zen_train.callbacks.validation import Validation
from zen_train.config import MergeSection
from zen_train.merge import TensorMerge, merge_tensor, merge_tensors
from zen_train.merge.norms import sum_of_squares
from zen_train.module import CausalLM, trained_values
from zen_train.shards import read_full, read_full_as, write_full_


@dataclass(frozen=True, kw_only=True)
class MergeEvent:
    """One merge. Losses are held-out, per token; `relative_change` is over all merged tensors together."""

    step: int
    partner_step: int
    method: str
    accepted: bool
    seconds: float
    relative_change: float
    energy_kept: float | None
    loss_before: float
    loss_after: float
    skipped: int


class MergeCallback(L.Callback):
    """Put it before the `Validation` callback that it shares scores with.

    State: the cadence and the history of merges, both in the checkpoint.
    """

    def __init__(self, config: MergeSection, *, validation: Validation, folder: Path) -> None:
        self.config = config
        self.validation = validation
        self.folder = folder
        self.cadence = Cadence(config.every_n_steps)
        self.events: list[MergeEvent] = []
        self._group: dist.ProcessGroup | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(timeout=timedelta(minutes=self.config.timeout_minutes))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, CausalLM)
        if not self.cadence.due(trainer.global_step):
            return
        partner = self.validation.best.snapshot(pl_module)
        if partner is not None:
            self.merge(trainer, pl_module, partner)

    def merge(self, trainer: L.Trainer, module: CausalLM, partner: Snapshot) -> MergeEvent:
        """Merge the current weights with `partner` now; keep the result or roll it back."""
        step, best = trainer.global_step, self.validation.best
        assert best.step is not None
        loss_before = self.validation.score(trainer, module)
        copy = None
        if self.config.accept == "if_not_worse":
            copy = Snapshot.save(
                self.folder / "rollback.safetensors", trained_values(module), rank=module.global_rank
            )
        started = time.perf_counter()
        with partner.reader() as read_partner:
            merged = self._merge_weights(module, read_partner)
        module.encode()
        seconds = time.perf_counter() - started
        loss_after = self.validation.score(trainer, module)
        accepted = copy is None or loss_after <= loss_before
        if copy is not None:
            if not accepted:
                _barrier(self._group)
                copy.restore_(trained_values(module))
                module.encode()
            _barrier(self._group)
            copy.delete()
        if accepted and self.config.optimizer_state == "reset":
            _reset_moments(trainer.optimizers[0])
        self.validation.hand_over(step=step, score=loss_after if accepted else loss_before)
        event = MergeEvent(
            step=step,
            partner_step=best.step,
            method=self.config.method,
            accepted=accepted,
            seconds=seconds,
            relative_change=merged.relative_change,
            energy_kept=merged.energy_kept,
            loss_before=loss_before,
            loss_after=loss_after,
            skipped=merged.skipped,
        )
        self.events.append(event)
        self._log(trainer, event)
        return event

    def _merge_weights(self, module: CausalLM, read_partner: Reader) -> _Totals:
        """Merge every trained parameter in place."""
        totals = _Totals()
        if self._group is None:
            self._merge_alone(module, read_partner, totals)
        else:
            self._merge_in_turns(module, read_partner, totals)
            totals.reduce(self._group, module.device)
        return totals

    def _merge_alone(self, module: CausalLM, read_partner: Reader, totals: _Totals) -> None:
        """One process: a tensor per core, a few in memory at a time."""
        base, parameters = _base_reader(module), dict(trained_values(module))
        tensors = (
            (name, base(name, parameter), [read_partner(name).float(), read_full(parameter)])
            for name, parameter in parameters.items()
        )
        for name, merged in merge_tensors(self.config.method, tensors, **self._options()):
            parameter = parameters[name]
            totals.add(name, merged, base(name, parameter), read_full(parameter))
            write_full_(parameter, merged.weight)

    def _merge_in_turns(self, module: CausalLM, read_partner: Reader, totals: _Totals) -> None:
        """Several ranks: each computes one tensor of a turn, then all receive all of them."""
        base, named = _base_reader(module), list(trained_values(module))
        world = dist.get_world_size()
        for start in range(0, len(named), world):
            turn = named[start : start + world]
            mine: TensorMerge | None = None
            for owner, (name, parameter) in enumerate(turn):
                current, partner = read_full(parameter), read_full_as(parameter, read_partner(name))
                if owner == module.global_rank:
                    origin = base(name, parameter)
                    mine = merge_tensor(self.config.method, origin, [partner, current], **self._options())
                    totals.add(name, mine, origin, current)
            for owner, (_, parameter) in enumerate(turn):
                weight = mine.weight if mine is not None and owner == module.global_rank else None
                write_full_(parameter, self._from_owner(parameter, weight, owner))

    def _options(self) -> dict[str, Any]:
        return {"rank": self.config.rank, "energy": self.config.energy, "seed": self.config.seed}

    def _from_owner(self, parameter: Tensor, weight: Tensor | None, owner: int) -> Tensor:
        if weight is None:
            weight = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        weight = weight.contiguous()
        dist.broadcast(weight, src=owner, group=self._group)
        return weight

    @staticmethod
    def _log(trainer: L.Trainer, event: MergeEvent) -> None:
        values = {
            f"merge/{key}": float(value)
            for key, value in asdict(event).items()
            if isinstance(value, int | float) and key != "step"
        }
        for logger in trainer.loggers:
            logger.log_metrics(values, step=event.step)

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self.cadence.last_step, "events": [asdict(event) for event in self.events]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.cadence.last_step = state_dict["last_step"]
        self.events = [MergeEvent(**event) for event in state_dict["events"]]


class _Totals:
    """Sums over tensors, and over ranks in the end."""

    def __init__(self) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64)

    def add(self, name: str, merge: TensorMerge, base: Tensor, current: Tensor) -> None:
        """Count one merged tensor; `current` is its value before. Warns when it could not be merged."""
        if merge.skipped and not merge.skipped.startswith("delta below"):
            warnings.warn(f"merge skipped {name}: {merge.skipped}", stacklevel=2)
        delta = sum_of_squares(current - base)
        self._sums[0] += sum_of_squares(merge.weight - current)
        self._sums[1] += delta
        self._sums[2] += 1 if merge.skipped else 0
        if merge.energy_kept is not None:
            self._sums[3] += merge.energy_kept * delta
            self._sums[4] += delta

    def reduce(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        if group is not None:
            sums = self._sums.to(device)
            dist.all_reduce(sums, group=group)
            self._sums = sums.cpu()

    @property
    def relative_change(self) -> float:
        """||merged - current|| / ||current - base||, over all tensors."""
        return (self._sums[0] / self._sums[1]).sqrt().item() if self._sums[1] > 0 else 0.0

    @property
    def energy_kept(self) -> float | None:
        """Share of the squared spectrum kept, weighted by each tensor's change; None where no SVD was cut."""
        return (self._sums[3] / self._sums[4]).item() if self._sums[4] > 0 else None

    @property
    def skipped(self) -> int:
        return int(self._sums[2])


def _base_reader(module: CausalLM) -> Callable[[str, Tensor], Tensor]:
    """Gives the base's value of a parameter in float32 beside it. Adapter factors (LoRA) have none: zero."""
    source = module.base.source()
    known = set(source.names())

    def read(name: str, parameter: Tensor) -> Tensor:
        if name not in known:
            return torch.zeros(parameter.shape, device=parameter.device)
        return source.get(name).to(device=parameter.device, dtype=torch.float32)

    return read


def _reset_moments(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, OneBitAdamW):
        optimizer.reset_moments()
    else:
        optimizer.state.clear()


def _barrier(group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.barrier(group=group)
