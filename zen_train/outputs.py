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

    def prepare(self, *, resume: Path | None, overwrite: bool) -> None:
        """Make the folder, or refuse it when it holds a run that this one does not continue.

        Raises:
            OutputError: the folder exists and holds files, or cannot be written.
        """
        if self.root.exists() and not self.root.is_dir():
            raise OutputError(f"output_dir={self.root} is a file. Choose a folder with output_dir=PATH.")
        if resume is None and self.root.is_dir() and any(self.root.iterdir()):
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
            shutil.rmtree(self.root)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise OutputError(
                f"output_dir={self.root} cannot be written ({error.strerror}). Choose another with output_dir=PATH."
            ) from error

    def save_config(self, resolved: dict[str, object]) -> None:
        """Keep the full resolved configuration with the run."""
        temporary = self.config.with_suffix(".tmp")
        temporary.write_text(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
        os.replace(temporary, self.config)
