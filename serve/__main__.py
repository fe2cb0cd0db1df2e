"""`python -m zen_train.serve [setting=value ...]`: the command line of the server.

Exit codes: 0 ended after a drain, 2 a request that cannot be carried out (one message, no traceback), 130 ended at
once by a second signal.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rich.console import Console

HELP = """\
usage: python -m zen_train.serve [setting=value ...]

  python -m zen_train.serve                            the embedded base, and what outputs/ holds
  python -m zen_train.serve variants=DIR port=8001
  python -m zen_train.serve base=FOLDER engine.slots=8
  ZEN_SERVE_API_KEYS=secret python -m zen_train.serve host=0.0.0.0

  http://127.0.0.1:8000/     status page, and a box to try a variant beside the base
  http://127.0.0.1:8000/v1   for any OpenAI client; model="zen4-coder"

Ctrl+C or SIGTERM finishes what runs (drain_s), a second one ends at once. Settings:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until a signal ends it; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    console = Console(stderr=True, highlight=False)
    from zen_train.errors import ZenTrainError
    from zen_train.serve.config import read_config, settings

    if "--help" in words or "-h" in words:
        print(HELP)
        for name, default, meaning in settings():
            print(f"  {name + '=' + default:<44} {meaning}".rstrip())
        return 0
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    try:
        config = read_config(words)
        from zen_train.serve.server import run

        return run(config, console)
    except ZenTrainError as error:
        console.print("[bold red]error:[/] ", end="")
        console.print(str(error), markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:  # before the server took the signals over
        return 130


if __name__ == "__main__":
    sys.exit(main())
