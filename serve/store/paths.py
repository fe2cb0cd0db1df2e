"""A folder that a request names, as a path inside the root, or a refusal: no request reaches a file outside.

The answer is the real path, links followed, so that what was checked is what is opened. It does not
guard against somebody who can change the root itself between check and use: who may write there decides
what is served anyway.
"""

from __future__ import annotations

import os
from pathlib import Path

from zen_train.serve.errors import BadRequestError

MAX_PATH_BYTES = 4096
MAX_PART_BYTES = 255


def resolve_inside(root: Path, asked: str | Path, *, param: str = "lora_path") -> Path:
    """The folder that `asked` names: relative to `root`, or absolute and under it.

    Raises:
        BadRequestError: empty, too long, not text, with `..` or control characters, outside the root or
            through a link out of it, or no folder. What lies outside is refused in the same words
            whether it exists or not.
    """
    text = os.fspath(asked)
    shown = repr(text[:200])
    if problem := _malformed(text):
        raise BadRequestError(f"{param} {shown} {problem}; give a folder under {root}", param=param)
    real = Path(os.path.realpath(os.path.join(os.path.realpath(root), text)))
    if not is_inside(root, real):
        raise BadRequestError(
            f"{param} {shown} is outside of {root}; only folders under it are served, copy the artifact there",
            param=param,
        )
    if not real.is_dir():
        raise BadRequestError(f"{param} {shown} is no folder under {root}", param=param)
    return real


def is_inside(root: Path, real: Path) -> bool:
    """Whether a real path (links followed) is the root or under it."""
    return real.is_relative_to(os.path.realpath(root))


def _malformed(text: str) -> str | None:
    """What is wrong with the text itself."""
    if not text:
        return "is empty"
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        return "is not valid text"
    if len(raw) > MAX_PATH_BYTES or any(len(part) > MAX_PART_BYTES for part in raw.split(b"/")):
        return f"is too long (allowed: {MAX_PATH_BYTES} bytes, {MAX_PART_BYTES} between slashes)"
    if any(character < " " or character == "\x7f" for character in text):
        return "holds control characters"
    if ".." in text.split("/"):
        return "holds '..'"
    return None
