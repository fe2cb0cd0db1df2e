"""The run's folder: what lies where, refused when it holds another run, found again on a resume."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from zen_train.errors import OutputError

CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class RunFolder:
    """Paths inside `output_dir`."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / CONFIG_FILE

    @property
    def last_checkpoint(self) -> Path:
        return self.root / "checkpoints" / "last.ckpt"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def delta(self) -> Path:
        return self.root / "delta"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def picture(self) -> Path:
        return self.root / "report.png"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.json"

    def resume_path(self, resume: str | None) -> Path | None:
        """The checkpoint that `resume` names.

        Raises:
            OutputError: it does not exist; the message lists those that do.
        """
        if resume is None:
            return None
        path = self.last_checkpoint if resume == "auto" else Path(resume).expanduser()
        if not path.exists():
            found = sorted(str(file) for file in self.checkpoints.glob("*.ckpt")) or "none"
            raise OutputError(
                f"resume={resume}: there is no checkpoint at {path} (in {self.checkpoints}: {found}). "
                "Name an existing one, or leave resume away to start anew."
            )
        return path

    def check_free(self, *, resume: Path | None, overwrite: bool) -> None:
        """Refuse the folder when it holds a run that this one neither continues nor replaces. Changes nothing.

        Raises:
            OutputError: with the settings that would be accepted.
        """
        if self.root.exists() and not self.root.is_dir():
            raise OutputError(f"output_dir={self.root} is a file. Choose a folder with output_dir=PATH.")
        if resume is not None or not self.root.is_dir() or not any(self.root.iterdir()):
            return
        if not overwrite:
            raise OutputError(
                f"output_dir={self.root} already holds files. Continue that run with resume=auto, replace it with "
                "overwrite=true, or choose another folder with output_dir=PATH."
            )
        if not self.config.is_file():
            raise OutputError(
                f"output_dir={self.root} holds files that no zen_train run made (no {CONFIG_FILE}); overwrite=true "
                "does not delete those. Choose another folder with output_dir=PATH."
            )

    def create(self, resolved: dict[str, object], *, resume: Path | None) -> None:
        """Make the folder (emptied first, unless the run resumes) and keep the resolved configuration in it.

        Call it after `check_free` and once nothing else can refuse the run.

        Raises:
            OutputError: the folder cannot be written.
        """
        try:
            if resume is None and self.root.is_dir():
                shutil.rmtree(self.root)
            self.root.mkdir(parents=True, exist_ok=True)
            temporary = self.config.with_suffix(".tmp")
            temporary.write_text(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
            os.replace(temporary, self.config)
        except OSError as error:
            raise OutputError(
                f"output_dir={self.root} cannot be written ({error.strerror}). Choose another with output_dir=PATH."
            ) from error
