"""The curves of a run as one flat `curves.csv`: one row for each optimizer step, correct after a resume.

Contract: a Lightning logger. The first column is `step`; figures logged for a step share its row. The first
figure that a resumed process logs drops the rows of later steps (they belong to the part that is being
repeated), so each step appears once. A last line that a crash cut short is dropped. Only rank 0 writes.

Lightning's own CSVLogger deletes an existing file, which loses the curve of everything before a resume.
Hyperparameters are not written: the run keeps its resolved configuration beside this file.
"""

import csv
import io
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from zen_train.errors import OutputError
from zen_train.report.files import write_whole

STEP_COLUMN = "step"


class CurvesLogger(Logger):
    """Append figures to `folder/curves.csv`; rewrite it only when a column or an earlier row changes."""

    FILE_NAME = "curves.csv"

    def __init__(self, folder: str | Path, *, flush_every_n_rows: int = 10) -> None:
        """`folder` is created when missing. Raises OutputError when an existing curves.csv is not ours."""
        super().__init__()
        self._folder = Path(folder)
        self._flush_every_n_rows = flush_every_n_rows
        self._rows: dict[int, dict[str, str]] = {}
        self._columns: list[str] = [STEP_COLUMN]
        self._unwritten_steps: list[int] = []
        self._rewrite = True
        self._logged = False
        if getattr(rank_zero_only, "rank", 0) == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._read_existing()

    @property
    def path(self) -> Path:
        """The CSV file."""
        return self._folder / self.FILE_NAME

    @property
    def name(self) -> str:
        """The folder's name."""
        return self._folder.name

    @property
    def version(self) -> str:
        """Empty: a run folder holds one run."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self._folder)

    @property
    def log_dir(self) -> str:
        """The run folder."""
        return str(self._folder)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: see the module docstring."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add figures (numbers or scalar tensors) to the row of an optimizer step.

        Left out: Lightning's own `epoch`, and figures without a step, which have no row to go to.
        """
        if step is None:
            return
        if not self._logged:
            self._drop_rows_after(step)
            self._logged = True
        new = {name: repr(float(value)) for name, value in metrics.items() if name != "epoch"}
        if not new:
            return
        if step in self._rows and step not in self._unwritten_steps:
            self._rewrite = True
        if step not in self._rows:
            if self._rows and step < next(reversed(self._rows)):
                self._rewrite = True
            self._unwritten_steps.append(step)
            self._rows[step] = {}
        for name in new:
            if name not in self._columns:
                self._columns.append(name)
                self._rewrite = True
        self._rows[step].update(new)
        if len(self._unwritten_steps) > self._flush_every_n_rows:
            self._write(keep_open=step)

    @rank_zero_only
    def save(self) -> None:
        """Write everything logged so far."""
        self._write(keep_open=None)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write everything logged so far."""
        self.save()

    def _write(self, *, keep_open: int | None) -> None:
        """Write the rows that are not on disk, except the step that is still collecting figures."""
        steps = [step for step in self._unwritten_steps if step != keep_open]
        if self._rewrite and self._rows:
            self._rows = dict(sorted(self._rows.items()))
            steps = [step for step in self._rows if step != keep_open]
            write_whole(self.path, (_csv_line(self._columns) + self._lines(steps)).encode())
            self._rewrite = False
        elif steps:
            try:
                with self.path.open("a", newline="", encoding="utf-8") as file:
                    file.write(self._lines(steps))
            except OSError as error:
                raise OutputError(
                    f"cannot write {self.path}: {error.strerror or error}. Free some space"
                ) from error
        self._unwritten_steps = [step for step in self._unwritten_steps if step == keep_open]

    def _lines(self, steps: list[int]) -> str:
        return "".join(
            _csv_line([str(step), *(self._rows[step].get(name, "") for name in self._columns[1:])])
            for step in steps
        )

    def _drop_rows_after(self, step: int) -> None:
        kept = {old: row for old, row in self._rows.items() if old <= step}
        if len(kept) < len(self._rows):
            self._rows = kept
            self._rewrite = True

    def _read_existing(self) -> None:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        whole_lines, cut, _ = text.rpartition("\n")
        if not cut:
            return
        header, *lines = csv.reader(io.StringIO(whole_lines))
        if header[:1] != [STEP_COLUMN] or not all(line[:1] and line[0].isdecimal() for line in lines):
            raise OutputError(
                f"{self.path} exists and is not a file of curves: its first column must be {STEP_COLUMN!r} "
                "and hold whole numbers. Move it away, or choose another output folder"
            )
        self._columns = header
        for line in lines:
            self._rows[int(line[0])] = {
                name: cell for name, cell in zip(header[1:], line[1:], strict=False) if cell != ""
            }
        self._rewrite = len(whole_lines) + 1 < len(text)


def _csv_line(cells: list[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()
