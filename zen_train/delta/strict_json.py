"""JSON as the artifact uses it: no duplicate keys, no NaN or infinity, UTF-8, errors as `DeltaError`."""

import json
from typing import Any

from zen_train.errors import DeltaError


def parse_object(raw: bytes, where: str, *, constants: bool = False) -> dict[str, Any]:
    """Parse one JSON object. `where` names the source in the error.

    `constants` lets NaN and infinity pass, which some model configurations of other people hold.
    """

    def refuse_constant(text: str) -> float:
        if constants:
            return float(text)
        raise ValueError(f"{text} is not JSON")

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"duplicate key {next(n for n in names if names.count(n) > 1)!r}")
        return out

    try:
        value = json.loads(
            raw.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates
        )
    except (ValueError, RecursionError) as error:
        raise DeltaError(
            f"{where} is not valid JSON: {error}; the file is damaged, fetch it again"
        ) from error
    if not isinstance(value, dict):
        raise DeltaError(f"{where} must hold a JSON object, found {type(value).__name__}")
    return value


def compact(value: object, *, constants: bool = False) -> str:
    """The canonical text of a value: sorted keys, no spaces. Hashes are taken over this form."""
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=constants
        )
    except (TypeError, ValueError) as error:
        raise DeltaError(
            f"cannot be written as JSON: {error}; use plain numbers, text, lists and dicts"
        ) from error


def readable(value: dict[str, Any]) -> str:
    """The same content for people: one line per leaf group, two levels deep, so that tensors are one per
    line.
    """
    lines = []
    for key in sorted(value):
        item = value[key]
        if isinstance(item, dict) and item:
            inner = ",\n  ".join(f"{compact(k)}: {compact(item[k])}" for k in sorted(item))
            lines.append(f"{compact(key)}: {{\n  {inner}\n }}")
        else:
            lines.append(f"{compact(key)}: {compact(item)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"
