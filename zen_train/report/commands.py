"""What to type after a run: the same commands in the terminal, the page and the model card."""

import shlex

from zen_train.report.results import RunResults


def next_commands(results: RunResults) -> list[tuple[str, str]]:
    """Pairs of purpose and command; empty when the run wrote no artifact."""
    artifact = results.places.artifact
    if artifact is None:
        return []
    base = results.places.base or "BASE_FOLDER"
    return [("full model", apply_command(artifact, base=base, output=f"{results.variant}-full"))]


def apply_command(artifact: str, *, base: str, output: str) -> str:
    """The command that writes the whole fine-tuned model from base and delta."""
    return f"python -m zen_train.delta apply {shlex.join([artifact, base, output])}"
