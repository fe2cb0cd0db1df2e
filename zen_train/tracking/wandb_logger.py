"""A W&B logger that can only help: no prompt, no long wait, no error that reaches the training loop.

Contract: Lightning's WandbLogger with the run kept in the run folder, its id saved beside it so that a
resumed run continues the same curves, figures drawn against optimizer steps, no checkpoints uploaded and a
quiet console. When wandb fails at any point, one warning says so and training goes on; an online run that
cannot start goes offline.

Does not decide the mode (see `decide`), and does not retry an upload: `wandb sync` does.
"""

import json
import os
import secrets
import string
import threading
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from zen_train.errors import OutputError
from zen_train.report.files import write_whole
from zen_train.tracking.config import WandbConfig
from zen_train.tracking.decide import WandbDecision

STEP_METRIC = "optimizer_step"
ID_FILE = "wandb_run.json"
FINISH_GRACE_S = 5.0
"""Waited beyond `finish_timeout_s`, so that wandb's own limit comes first where it has one."""


class SafeWandbLogger(WandbLogger):
    """See the module docstring. The run starts at the first use, not on construction."""

    def __init__(
        self, folder: str | Path, *, decision: WandbDecision, config: WandbConfig, run_name: str | None = None
    ) -> None:
        """`decision.mode` is `online` or `offline`; `folder` holds `wandb/` and the id file."""
        assert decision.mode != "disabled", "a disabled decision makes no logger"
        self._folder = Path(folder)
        self._mode: str = decision.mode
        self._limits = config
        self._last_step = 0
        self._warned = False
        self._local_folder: Path | None = None
        super().__init__(
            name=run_name,
            save_dir=self._folder,
            id=_saved_run_id(self._folder),
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=list(config.tags) or None,
            log_model=False,
        )
        self._wandb_init.pop("anonymous", None)  # wandb warns about the key itself

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The wandb run; an object that ignores everything when no run could be started."""
        if self._experiment is None:
            self._experiment = self._start()
        return self._experiment

    @property
    def version(self) -> str | None:
        """The run id, the same before and after a resume."""
        return self._id

    @property
    def online(self) -> bool:
        """Whether the run is, as far as known, being uploaded."""
        return self._mode == "online"

    @property
    def local_folder(self) -> Path | None:
        """The run's folder under `wandb/`; None before the start and on other ranks."""
        return self._local_folder

    @property
    def sync_hint(self) -> str | None:
        """How to upload an offline run; None when there is nothing to upload by hand."""
        if self._mode != "offline" or self._local_folder is None:
            return None
        return f"wandb sync {self._folder / 'wandb' / 'offline-run-*'}"

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log figures at an optimizer step. A step that the server has from before a resume stays."""
        if step is None:
            self._guard("logging figures", lambda run: run.log(dict(metrics)))
            return
        self._last_step = max(self._last_step, step)
        row = {**metrics, STEP_METRIC: step}
        self._guard("logging figures", lambda run: run.log(row, step=self._last_step))

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Show the configuration with the run."""
        values = vars(params) if isinstance(params, Namespace) else dict(params)
        self._guard("logging the configuration", lambda run: run.config.update(values, allow_val_change=True))

    @rank_zero_only
    def log_picture(self, path: str | Path, *, name: str = "report/curves") -> None:
        """Show a PNG with the run."""

        def send(run: Any) -> None:
            import wandb

            run.log({name: wandb.Image(str(path)), STEP_METRIC: self._last_step}, step=self._last_step)

        self._guard("logging the picture", send)

    @rank_zero_only
    def log_artifact(
        self, folder: str | Path, *, name: str, metadata: Mapping[str, Any], base_name: str
    ) -> None:
        """Upload a delta folder as an artifact whose input is the base model. Does nothing offline."""
        if not self.online:
            return

        def send(run: Any) -> None:
            import wandb

            base = wandb.Artifact(_artifact_name(base_name), type="base-model", metadata={"name": base_name})
            run.use_artifact(base)
            delta = wandb.Artifact(_artifact_name(name), type="delta", metadata=dict(metadata))
            delta.add_dir(str(folder))
            run.log_artifact(delta)

        self._guard("logging the delta", send)

    @rank_zero_only
    def finish(self, *, failed: bool = False) -> None:
        """End the run, waiting at most `finish_timeout_s` for the upload."""
        run = self._experiment
        if run is not None:
            limit_s = self._limits.finish_timeout_s + FINISH_GRACE_S
            self._in_time("finishing", lambda: run.finish(exit_code=int(failed)), timeout_s=limit_s)

    def __getstate__(self) -> dict[str, Any]:
        """Without the run: a spawned process starts it again under the same id."""
        return {**self.__dict__, "_experiment": None}

    def _start(self) -> Any:
        if self._mode == "offline":
            # wandb's error reports go out even offline, and wait 20 s at exit when packets are dropped.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        if not os.environ.get("WANDB_MODE", "set").strip():
            del os.environ["WANDB_MODE"]  # set to nothing means not set; wandb refuses it
        import wandb

        settings: dict[str, Any] = {
            "silent": True,
            "console": "off",
            "reinit": "finish_previous",  # a sweep runs several runs in one process
            "init_timeout": self._limits.init_timeout_s,
        }
        if "finish_timeout" in wandb.Settings.model_fields:
            settings["finish_timeout"] = self._limits.finish_timeout_s
        for mode in ("online", "offline") if self._mode == "online" else ("offline",):
            try:
                wandb.setup(settings=wandb.Settings(silent=True))
                run = wandb.init(**self._wandb_init, mode=mode, settings=wandb.Settings(**settings))
                run.define_metric(STEP_METRIC, hidden=True)
                run.define_metric("*", step_metric=STEP_METRIC, step_sync=True)
            except Exception as error:
                self._warn("starting", error)
                self._in_time("giving up the start", wandb.teardown, timeout_s=10)
                continue
            self._mode = mode
            self._local_folder = Path(run.dir).parent
            return run
        self._mode = "disabled"
        return _DummyExperiment()

    def _guard(self, what: str, call: Callable[[Any], object]) -> None:
        """Do something with the run; a failure is a warning, once."""
        try:
            call(self.experiment)
        except Exception as error:
            self._warn(what, error)

    def _in_time(self, what: str, call: Callable[[], object], *, timeout_s: float) -> None:
        """Call, but give up waiting after `timeout_s`; a failure or a timeout is a warning, once."""
        failures: list[Exception] = []

        def attempt() -> None:
            try:
                call()
            except Exception as error:
                failures.append(error)

        worker = threading.Thread(target=attempt, daemon=True)
        worker.start()
        worker.join(timeout_s)
        if worker.is_alive():
            failures.append(TimeoutError(f"still busy after {timeout_s:g} s"))
        for error in failures:
            self._warn(what, error)

    def _warn(self, what: str, error: BaseException) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"W&B failed while {what} ({type(error).__name__}: {error}); training goes on, "
                f"curves are in curves.csv and {self._folder / 'wandb'}",
                stacklevel=2,
            )


def _artifact_name(name: str) -> str:
    """A name that W&B accepts: letters, digits, dash, underscore and dot."""
    allowed = set(string.ascii_letters + string.digits + "-_.")
    return "".join(letter if letter in allowed else "-" for letter in name)[:128]


def _saved_run_id(folder: Path) -> str | None:
    """The id in `wandb_run.json`, made and saved on the first call. None on ranks that do not log."""
    if getattr(rank_zero_only, "rank", 0) != 0:
        return None
    path = folder / ID_FILE
    try:
        run_id = json.loads(path.read_text(encoding="utf-8"))["id"]
    except FileNotFoundError:
        run_id = "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps({"id": run_id}) + "\n").encode())
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise OutputError(
            f"cannot read the W&B run id from {path}: {error!r}. Delete the file to start a new W&B run"
        ) from error
    return str(run_id)
