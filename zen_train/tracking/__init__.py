"""Where the curves of a run go: CSV always, Weights & Biases when it can.

`resolve_wandb` decides before the model loads, `make_loggers` builds what the Trainer is given, and the other
functions act on those loggers after training. Importing this package loads neither Lightning nor wandb.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zen_train.tracking.config import CsvConfig, LoggerConfig, WandbConfig
from zen_train.tracking.decide import WandbDecision, resolve_wandb

if TYPE_CHECKING:
    from lightning.pytorch.loggers.logger import Logger

    from zen_train.tracking.wandb_logger import SafeWandbLogger

__all__ = [
    "CsvConfig",
    "LoggerConfig",
    "WandbConfig",
    "WandbDecision",
    "finish_loggers",
    "log_artifact",
    "log_picture",
    "make_loggers",
    "resolve_wandb",
]


def make_loggers(
    folder: str | Path, *, decision: WandbDecision, config: LoggerConfig, run_name: str | None = None
) -> list["Logger"]:
    """The loggers of one run: curves.csv first, then W&B unless the decision is `disabled`.

    Call it again with the same folder to resume: the CSV goes on, and W&B continues the same run. Raises
    OutputError when the folder holds files under these names that are not ours.
    """
    from zen_train.tracking.csv_logger import CurvesLogger

    loggers: list[Logger] = [CurvesLogger(folder, flush_every_n_rows=config.csv.flush_every_n_rows)]
    if decision.mode != "disabled":
        from zen_train.tracking.wandb_logger import SafeWandbLogger

        loggers.append(SafeWandbLogger(folder, decision=decision, config=config.wandb, run_name=run_name))
    return loggers


def log_artifact(
    loggers: Iterable["Logger"],
    folder: str | Path,
    *,
    name: str,
    metadata: Mapping[str, Any],
    base_name: str,
) -> None:
    """Upload a delta folder with the base model as its input, where a logger is online. Never raises."""
    for logger in _wandb_loggers(loggers):
        logger.log_artifact(folder, name=name, metadata=metadata, base_name=base_name)


def log_picture(loggers: Iterable["Logger"], path: str | Path) -> None:
    """Show the PNG of the curves with the W&B run. Never raises."""
    for logger in _wandb_loggers(loggers):
        logger.log_picture(path)


def finish_loggers(loggers: Iterable["Logger"], *, failed: bool = False) -> list[str]:
    """Write and close everything within `finish_timeout_s`. Returns lines to print: where, how to upload."""
    loggers = list(loggers)
    for logger in loggers:
        logger.save()
    lines = []
    for run in _wandb_loggers(loggers):
        run.finish(failed=failed)
        if run.sync_hint is not None:
            lines.append(f"W&B offline run in {run.local_folder}; upload with: {run.sync_hint}")
    return lines


def _wandb_loggers(loggers: Iterable["Logger"]) -> list["SafeWandbLogger"]:
    from zen_train.tracking.wandb_logger import SafeWandbLogger

    return [logger for logger in loggers if isinstance(logger, SafeWandbLogger)]
