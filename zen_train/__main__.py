"""`python -m zen_train +variant=coder`: the command line.

Exit codes: 0 done, 2 a request that cannot be carried out (one message, no traceback), 130 interrupted and resumable.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from rich.console import Console

HELP = """\
usage: python -m zen_train +variant=NAME [setting=value ...]

  python -m zen_train +variant=coder                  train, export a delta of one bit a weight, report
  python -m zen_train +variant=coder scale=full       the lengths a GPU node would use
  python -m zen_train -m +variant=coder,math          one run after another
  python -m zen_train +variant=chat data=jsonl data.path=my.jsonl
  python -m zen_train +variant=coder resume=auto      continue after Ctrl+C
  python -m zen_train --variants                      what the 14 variants are trained on
  python -m zen_train +variant=coder --cfg job        the resolved configuration

Every setting is in the files of conf/; python -m zen_train.delta --help reads what a run exports."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    console = Console(highlight=False)
    if "--help" in words or "-h" in words:
        print(HELP)
        return 0
    from zen_train.errors import ZenTrainError

    try:
        if "--variants" in words:
            from zen_train.data.table import variants_table

            console.print(variants_table())
            return 0
        from zen_train.overrides import check_overrides

        check_overrides(words)
        if not any(word.startswith("scale=") for word in words):
            # Beside the other settings: argparse takes no positional argument after an option's value.
            first = next(
                index for index, word in enumerate(words) if "=" in word and not word.startswith("-")
            )
            words.insert(first, f"scale={_default_scale()}")
        return _with_hydra(words, console)
    except ZenTrainError as error:
        fail(error)
        return 2


def fail(error: Exception) -> None:
    """One message on standard error, as the user sees it."""
    console = Console(stderr=True, highlight=False)
    console.print("[bold red]error:[/] ", end="")
    console.print(str(error), markup=False, soft_wrap=True)


def _default_scale() -> str:
    import torch

    return "full" if torch.cuda.is_available() else "quick"


def _with_hydra(words: list[str], console: Console) -> int:
    """Compose the configuration and run once, or once per combination of a sweep."""
    import hydra
    from omegaconf import DictConfig

    exit_code = 0

    def task(composed: DictConfig) -> Any:
        nonlocal exit_code
        exit_code = max(exit_code, _run_one(composed, console))

    sys.argv = [sys.argv[0], *words]
    hydra.main(version_base=None, config_path="pkg://zen_train.conf", config_name="config")(task)()
    if "torch" in sys.modules:  # --cfg and the like end without it
        from zen_train.trainer import leave_process_group

        leave_process_group()
    return exit_code


def _run_one(composed: Any, console: Console) -> int:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from pydantic import ValidationError

    from zen_train.callbacks.graceful_stop import RunInterrupted
    from zen_train.config import RunConfig
    from zen_train.errors import ConfigError, ZenTrainError
    from zen_train.overrides import explain
    from zen_train.run import resume_command, run
    from zen_train.trainer import is_leader

    def warn(message: Warning | str) -> None:
        if is_leader():
            console.print(f"warning: {message}", style="yellow", markup=False)

    warnings.showwarning = lambda message, *_: warn(message)
    try:
        try:
            config = RunConfig.model_validate(OmegaConf.to_container(composed, resolve=True))
        except ValidationError as error:
            raise explain(error) from error
        except OmegaConfBaseException as error:
            raise ConfigError(f"the configuration does not resolve: {error}") from error
        run(config, console=console)
    except RunInterrupted as stop:
        if is_leader():
            console.print(f"\n{stop}. Continue with:\n  {resume_command()}", soft_wrap=True)
        return 130
    except ZenTrainError as error:
        fail(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
