"""One training run as one page: prepare, fit (merging, exporting and scoring on the way), report."""

from __future__ import annotations

import logging
import shlex
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rich.console import Console

from zen_train.base import prepare_base
from zen_train.config import ExportSection, RunConfig
from zen_train.data.load import data_module
from zen_train.delta import BaseInfo
from zen_train.delta.card import replace_card
from zen_train.errors import ConfigError, OutputError
from zen_train.evaluate import Evaluator
from zen_train.module import CausalLM
from zen_train.outputs import RunFolder
from zen_train.report import RunResults, model_card, render_terminal, write_html, write_metrics, write_picture
from zen_train.results import collect_results, provenance
from zen_train.tracking import finish_loggers, log_artifact, log_picture, make_loggers, resolve_wandb
from zen_train.trainer import Callbacks, build_callbacks, build_trainer, is_leader


def run(config: RunConfig, *, console: Console) -> RunResults | None:
    """Train one variant as configured. The results come back on rank 0, None elsewhere.

    Raises:
        ZenTrainError: anything the user can mend; the message says how.
        RunInterrupted: Ctrl+C or SIGTERM, after a resumable checkpoint was written.
    """
    started = time.perf_counter()
    _quiet_libraries()
    check_sense(config)
    leader = is_leader()
    folder = RunFolder(Path(config.output_dir).expanduser().absolute())
    checkpoint = folder.resume_path(config.resume)
    if leader:
        folder.check_free(resume=checkpoint, overwrite=config.overwrite)
        _announce(config, console)
    # Before anything slow, and before the only moment at which W&B could ask.
    tracking = resolve_wandb(config.logger.wandb, run_folder=folder.root)
    if leader:
        console.print(tracking.line(), style="dim", soft_wrap=True)
    L.seed_everything(config.seed, workers=True, verbose=False)

    base = prepare_base(config.base)
    tokenizer = base.tokenizer()
    data = data_module(
        config.data,
        config.variant,
        tokenizer=tokenizer,
        accumulate=config.trainer.accumulate,
        max_steps=config.trainer.max_steps,
    )
    module = CausalLM(
        base,
        attention=config.base.attention,
        tuning=config.tuning,
        optim=config.optim,
        trainer=config.trainer,
        export=config.export,
    )
    evaluator = Evaluator(
        module,
        data.val_dataloader,
        tokenizer=tokenizer,
        prompt=config.variant.sample_prompt,
        sample_tokens=config.evaluate.sample_tokens,
    )
    callbacks = build_callbacks(
        config,
        folder,
        base_info=BaseInfo.from_folder(
            base.folder, name=base.name, revision=base.revision, licence=base.licence, known=base.fingerprint
        ),
        evaluator=evaluator,
        console=console,
        provenance=lambda: artifact_provenance(config, callbacks),
    )
    data.setup()
    if leader:
        folder.create(config.model_dump(mode="json"), resume=checkpoint)
    loggers = make_loggers(folder.root, decision=tracking, config=config.logger, run_name=config.variant.name)
    trainer = build_trainer(config, callbacks, loggers=loggers)
    fit_started = time.perf_counter()
    try:
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=True)
    except BaseException:
        finish_loggers(loggers, failed=True)
        raise
    fit_seconds = time.perf_counter() - fit_started
    if not trainer.is_global_zero:
        return None
    if callbacks.export.report is None:
        raise OutputError(
            f"resume={config.resume}: that checkpoint has already done all trainer.max_steps={trainer.max_steps} "
            "steps. Raise trainer.max_steps to train on, or start anew with overwrite=true."
        )
    total_seconds = time.perf_counter() - started
    results = collect_results(
        config, base, folder, callbacks, total_seconds=total_seconds, fit_seconds=fit_seconds
    )
    publish(results, folder)
    log_picture(loggers, folder.picture)
    log_artifact(
        loggers,
        folder.delta,
        name=f"{config.variant.name}-delta",
        metadata=asdict(results.losses),
        base_name=base.name,
    )
    notes = finish_loggers(loggers)
    render_terminal(results, console)
    for note in notes:
        console.print(note, style="dim", soft_wrap=True)
    return results


def publish(results: RunResults, folder: RunFolder) -> None:
    """Write what people read: metrics.json, report.html, report.png, and the artifact's model card."""
    write_metrics(results, folder.metrics)
    write_html(results, folder.report)
    write_picture(results, folder.picture)
    replace_card(folder.delta, model_card(results))


def artifact_provenance(config: RunConfig, callbacks: Callbacks) -> dict[str, Any]:
    """How the exported weights came to be: training configuration, merges, machine."""
    return {
        "training": config.model_dump(mode="json", exclude={"logger", "output_dir", "overwrite", "resume"}),
        "merge": {
            "method": config.merge.method,
            "history": [asdict(event) for event in (callbacks.merge.events if callbacks.merge else [])],
        },
        "made_with": asdict(provenance(config)),
        "licence_of_base": config.base.licence,
    }


def check_sense(config: RunConfig) -> None:
    """Combinations that are valid one by one and make no sense together.

    Raises:
        ConfigError: with the setting to change.
    """
    if config.tuning.method == "lora" and config.merge.method not in ("none", "mean"):
        raise ConfigError(
            f"merge={config.merge.method} works on weight matrices, and tuning.method=lora trains factors of them. "
            "Use merge=mean or merge=none with LoRA."
        )
    if config.export.used_code == "directions":
        _check_directions(config.export)
    elif config.export.bits_per_weight is not None:
        _check_bits(config, config.export.bits_per_weight)
    _check_one_bit_training(config)
    if config.merge.method != "none" and config.merge.every_n_steps > config.trainer.max_steps:
        warnings.warn(
            f"merge.every_n_steps={config.merge.every_n_steps} is longer than the run "
            f"(trainer.max_steps={config.trainer.max_steps}): nothing will be merged. Lower it, or set merge=none.",
            stacklevel=2,
        )
    if config.trainer.accelerator == "gpu" and not torch.cuda.is_available():
        raise ConfigError("trainer.accelerator=gpu, but torch sees no GPU here. Use trainer.accelerator=cpu.")


def _check_one_bit_training(config: RunConfig) -> None:
    """What `export.aware` and `export.distill_steps` cannot be combined with."""
    export, strategy, method = config.export, config.trainer.strategy, config.tuning.method
    if not export.aware and not export.distill_steps:
        return
    asked = "export.aware=true" if export.aware else f"export.distill_steps={export.distill_steps}"
    if export.aware and export.distill_steps:
        raise ConfigError(
            f"{asked} leaves nothing that export.distill_steps={export.distill_steps} could fit. Use one of them."
        )
    if export.low_rank:
        raise ConfigError(f"{asked} works on signs alone. Use export.low_rank=0, found {export.low_rank}.")
    if method == "lora":
        raise ConfigError(
            f"{asked} changes whole matrices, and tuning.method=lora keeps them. Use tuning.method=full."
        )
    if export.planes > 1:
        raise ConfigError(f"{asked} works on one plane of signs. Use export.planes=1, found {export.planes}.")
    if strategy == "fsdp2" or (export.distill_steps and strategy != "auto"):
        raise ConfigError(
            f"{asked} with trainer.strategy={strategy} is not supported. Use trainer.strategy="
            f"{'auto or ddp' if export.aware else 'auto'}."
        )


def _check_directions(export: ExportSection) -> None:
    """What `export.code=directions` cannot be combined with: settings of signs."""
    for setting, found in export.settings_of_signs().items():
        told, allowed = (str(word).lower() for word in (found, type(export).model_fields[setting].default))
        raise ConfigError(
            f"export.code=directions holds no signs, which export.{setting}={told} is about. Use "
            f"export.{setting}={allowed}, or export.code=signs."
        )


def _check_bits(config: RunConfig, bits: float) -> None:
    """What `export.bits_per_weight` cannot be combined with."""
    export, asked = config.export, f"export.bits_per_weight={bits:g}"
    if export.planes > 1:
        raise ConfigError(
            f"{asked} and export.planes={export.planes} both say how many bits. Use one of them."
        )
    if export.aware or export.distill_steps:
        other = "export.aware=true" if export.aware else f"export.distill_steps={export.distill_steps}"
        raise ConfigError(f"{asked} spreads sign planes, and {other} works on one plane. Use one of them.")
    if config.tuning.method == "lora" or config.trainer.strategy != "auto":
        raise ConfigError(
            f"{asked} measures whole matrices in one process. Use tuning.method=full and trainer.strategy=auto, found "
            f"{config.tuning.method} and {config.trainer.strategy}."
        )


def resume_command() -> str:
    """The command line that continues the run this process was started for."""
    kept = [word for word in sys.argv[1:] if not word.startswith(("resume=", "overwrite="))]
    return shlex.join(["python", "-m", "zen_train", *kept, "resume=auto"])


def _announce(config: RunConfig, console: Console) -> None:
    settings = config.trainer
    tokens = config.data.context_tokens * config.data.batch_size * settings.accumulate
    merging = "" if config.merge.method == "none" else f" every {config.merge.every_n_steps}"
    console.print(
        f"[bold]{config.variant.name}[/] on [bold]{config.base.name}[/]: {settings.max_steps} steps of {tokens} "
        f"tokens, merge={config.merge.method}{merging}, into {config.output_dir}",
        soft_wrap=True,
        highlight=False,
    )
    if config.scale == "quick":
        console.print(
            "scale=quick: minutes, to see it work. For a real run on a GPU: scale=full",
            style="dim",
            soft_wrap=True,
        )


def _quiet_libraries() -> None:
    """Keep the terminal for what the user needs. Warnings of our own and of torch still show."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning.*")
