"""What a user reads when a run ends: what was gained, what the delta keeps, its size, and what to type next.

Contract: prints to the console it is given and fits 80 columns. Text from outside (names, paths, warnings) is
never read as Rich markup. Does not print samples or per-tensor rows: those are in the report.
"""

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from zen_train.report import units
from zen_train.report.commands import next_commands
from zen_train.report.results import RunResults


def render_terminal(results: RunResults, console: Console) -> None:
    """Print the summary of one run."""
    console.print(
        Panel(
            Group(_quality(results), Text(), _facts(results)),
            title=_line("bold", f"{results.variant} on {results.base.name}"),
            title_align="left",
            border_style="cyan",
            padding=(1, 2),
        )
    )
    for warning in results.all_warnings():
        console.print(Text.assemble(("Warning: ", "bold yellow"), warning))
    console.print(_places(results))


def _quality(results: RunResults) -> Group:
    losses = results.losses
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), expand=True, show_edge=False)
    table.add_column("held-out text")
    for heading in ("base", "fine-tune", "delta"):
        table.add_column(heading, justify="right", style="bold" if heading == "delta" else "")
    models = ("base", "fine_tune", "delta")
    table.add_row("loss per token", *(units.loss_text(getattr(losses, model)) for model in models))
    table.add_row("perplexity", *(units.perplexity_text(losses.perplexity(model)) for model in models))
    table.add_row(
        "size",
        *(units.bytes_text(size) for size in (None, results.size.bf16_model_bytes)),
        units.bytes_text(results.size.stored_bytes),
    )
    share = losses.share_kept
    if share is None:
        verdict = Text.assemble(("No share kept: ", "bold yellow"), f"{losses.share_kept_reason}.")
    else:
        colour = "green" if share >= 0.9 else "yellow" if share >= 0.5 else "red"
        verdict = Text.assemble(
            "The delta keeps ",
            (units.share_text(share), f"bold {colour}"),
            " of what the fine-tune gained",
        )
        if results.size.ratio is not None:
            verdict.append_text(
                Text.assemble(", and is ", (units.ratio_text(results.size.ratio), "bold"), " smaller")
            )
        verdict.append(".")
    return Group(table, Text(), verdict)


def _facts(results: RunResults) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("training", Text(f"{results.steps} steps, {units.count_text(results.tokens)} tokens"))
    if results.merge is not None and results.merge.method != "none":
        merges = results.curves.merges
        accepted = sum(point.accepted for point in merges)
        grid.add_row("merging", Text(f"{results.merge.method}, {accepted} of {len(merges)} merges accepted"))
    bits = results.size.bits_per_compressed_weight
    if bits is not None:
        grid.add_row("coded weights", Text(f"{units.bits_text(bits)} bits each, scales included"))
    phases = ", ".join(f"{name} {units.seconds_text(seconds)}" for name, seconds in results.seconds.named())
    total = units.seconds_text(results.seconds.total)
    grid.add_row("time", Text(f"{total}" + (f" ({phases})" if phases else "")))
    grid.add_row("device", Text(results.provenance.device))
    return grid


def _places(results: RunResults) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    places = results.places
    for name, place in (("delta", places.artifact), ("report", places.report), ("run folder", places.run)):
        if place is not None:
            grid.add_row(name, Text(place))
    for purpose, command in next_commands(results):
        grid.add_row(purpose, Text(command, style="bold cyan"))
    return grid


def _line(style: str, text: str) -> Text:
    return Text(f" {text} ", style=style)
