"""support: how to do something with the AWS command line. A document is a service.

Source: the worked examples of the package `awscli` (Apache-2.0): a title, a sentence on what is done, a
command.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from zen_train.data.corpora.text import lower_first, pick, tidy
from zen_train.data.records import Record, ask

_TITLE = re.compile(r"^\*\*(?:Example\s+\d+\s*[:.]?\s*)?(.+?)\*\*\s*$", flags=re.MULTILINE)
_LINK = re.compile(r"`([^`<]+?)\s*<[^>]+>`__?|`([^`]+)`__?")
_COMMAND_CHARACTERS = (12, 700)


def records(folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """One record for each example that shows a command."""
    examples = folders["awscli"] / "awscli" / "examples"
    for path in sorted(examples.rglob("*.rst")):
        relative = path.relative_to(examples).with_suffix("").as_posix()
        if "/" not in relative:
            continue
        text = path.read_text(encoding="utf-8")
        # The text before the first title, then title and body in turn.
        parts = _TITLE.split(text)[1:]
        for number, (title, body) in enumerate(zip(parts[::2], parts[1::2], strict=True), start=1):
            record = _example(title, body, relative, f"{relative}:{number}", seed)
            if record is not None:
                yield record


def _example(title: str, body: str, relative: str, origin: str, seed: int) -> Record | None:
    match = re.search(
        r"^(?P<intro>.*?)::[ \t]*\n(?P<code>(?:[ \t]*\n|[ \t]+[^\n]*(?:\n|$))+)", body, flags=re.DOTALL
    )
    if not match:
        return None
    introduction = _plain(match["intro"]).rstrip(" :.")
    block = re.split(r"\n\s*\n", textwrap.dedent(match["code"].strip("\n").expandtabs(4)))[0]
    command = "\n".join(line.rstrip() for line in block.strip().split("\n"))
    service = relative.split("/")[0]
    if not command.startswith("aws ") or not _COMMAND_CHARACTERS[0] <= len(command) <= _COMMAND_CHARACTERS[1]:
        return None
    if (
        not introduction
        or "\n\n" in match["intro"].strip()
        or len(introduction) > 400
        or "previous" in introduction
    ):
        return None
    goal = lower_first(re.sub(r"^To\s+", "", _plain(title), flags=re.IGNORECASE)).rstrip(".")
    forms = (
        f"How do I {goal} with the AWS CLI?",
        f"I want to {goal}. Which command of the AWS CLI ({service}) does that?",
        f"Show me the AWS CLI command to {goal}.",
    )
    if not re.match(r"^To\s", _plain(title), flags=re.IGNORECASE):
        forms = (f"AWS CLI, {service}: {_plain(title)}. What is the command?",) * 3
    return ask(service, pick(forms, origin, seed), f"{introduction}:\n\n```\n{command}\n```", origin=origin)


def _plain(text: str) -> str:
    """reStructuredText without its marks: literals as `code`, links by their text."""
    text = text.replace("``", "\x00")
    text = _LINK.sub(lambda m: m.group(1) or m.group(2), text)
    return tidy(text.replace("\x00", "`").replace("**", "").replace("*", ""))
