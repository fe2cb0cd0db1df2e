"""agent: pick the tool for a request and give its arguments as JSON. A document is a service.

Source: the service models of the package `botocore` (Apache-2.0). The request is the first sentence of an
operation's documentation with values for its required arguments; the tools are that operation and three
others of the same service. Values are made up from the argument's own name and type, or taken from its list
of choices.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zen_train.data.corpora.text import pick, sentences, tidy
from zen_train.data.records import Record, ask, unit_hash

_TOOLS = 4
_REQUIRED = (1, 4)
_WORDS = (
    "atlas",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "harbour",
    "iris",
    "juniper",
    "kestrel",
    "lark",
)
_VERB_LIST = (
    "accept activate add allow apply approve assign associate attach cancel change check complete "
    "configure confirm connect copy create deactivate delete deploy deregister describe detach disable "
    "disassociate disconnect enable end export find force generate get give grant import initiate "
    "invoke link list lock merge modify move open provide publish purge put queue reboot register "
    "reject release remove rename replace request reset resize restart restore resume retrieve return "
    "revoke rotate run schedule search send set show shut start stop submit suspend switch tag "
    "terminate test transfer unlock untag update upgrade upload validate verify"
)
_VERBS = {form: v for v in _VERB_LIST.split(" ") for form in (v, v + "s", v + "es", v[:-1] + "ies")}
"""Both forms of the verbs that documentation begins with: `create` and `creates`, `modify` and `modifies`."""
_NO_VALUE = object()


def records(folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """One record for each operation whose required arguments are plain values or short lists of them."""
    for service in sorted(p for p in (folders["botocore"] / "botocore" / "data").iterdir() if p.is_dir()):
        models = sorted(service.glob("*/service-2.json"))
        if models:
            yield from _service(service.name, json.loads(models[-1].read_text(encoding="utf-8")), seed)


def _service(service: str, model: dict[str, Any], seed: int) -> Iterator[Record]:
    operations = {
        name: _arguments(operation, model["shapes"]) for name, operation in model["operations"].items()
    }
    names = sorted(operations)
    for name in names:
        request = _request(model["operations"][name])
        origin = f"{service}.{name}"
        values = _values(operations[name], origin, seed)
        if request is None or values is None or len(names) < _TOOLS:
            continue
        tools = _tools(name, names, origin, seed)
        listing = "\n".join(f"- {tool}({', '.join(operations[tool])})" for tool in tools)
        given = ", ".join(f"{key} = {_spoken(value)}" for key, value in values.items())
        forms = (
            f"Tools:\n{listing}\n\nRequest: {request} Use {given}.\n\nAnswer with one tool call as JSON.",
            f"You can call one of these tools:\n{listing}\n\n{request} ({given})",
            f"{request} Values: {given}.\n\nPick a tool and give its arguments as JSON:\n{listing}",
        )
        if len(listing) <= 420:
            call = json.dumps({"tool": name, "arguments": values}, ensure_ascii=False)
            yield ask(service, pick(forms, origin, seed), call, origin=origin)


def _arguments(operation: dict[str, Any], shapes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The required arguments of an operation, in the order of the model, with their shapes."""
    shape = shapes.get(operation.get("input", {}).get("shape", ""), {})
    members = shape.get("members", {})
    return {
        key: {**shapes[members[key]["shape"]], "shapes": shapes}
        for key in shape.get("required", [])
        if key in members
    }


def _values(arguments: dict[str, dict[str, Any]], origin: str, seed: int) -> dict[str, Any] | None:
    if not _REQUIRED[0] <= len(arguments) <= _REQUIRED[1]:
        return None
    values = {key: _value(key, shape, f"{origin}.{key}", seed) for key, shape in arguments.items()}
    return None if any(value is _NO_VALUE for value in values.values()) else values


def _value(key: str, shape: dict[str, Any], origin: str, seed: int) -> Any:
    kind = shape["type"]
    if kind == "string" and "enum" in shape:
        return pick(shape["enum"], origin, seed)
    if kind == "string":
        return _string(key, origin, seed)
    if kind in {"integer", "long"}:
        low = max(int(shape.get("min", 1)), 1)
        return low + int(unit_hash(origin, seed) * min(int(shape.get("max", low + 99)) - low + 1, 100))
    if kind == "boolean":
        return unit_hash(origin, seed) < 0.5
    if kind == "list":
        member = shape["shapes"][shape["member"]["shape"]]
        if member["type"] == "string":
            singular = key.removesuffix("s")
            values = [_value(singular, member, f"{origin}.{i}", seed) for i in range(2)]
            return list(dict.fromkeys(values))
    return _NO_VALUE


def _string(key: str, origin: str, seed: int) -> str:
    word = pick(_WORDS, origin, seed)
    number = int(unit_hash(origin + "#", seed) * 9000) + 1000
    parts = [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", key)] or ["item"]
    last = parts[-1]
    if last == "arn":
        return f"arn:aws:{origin.split('.')[0]}:eu-west-1:123456789012:{word}/{number}"
    if last == "id":
        return f"{parts[-2] if len(parts) > 1 else 'id'}-{number:04x}{number}"
    if "email" in parts:
        return f"{word}@example.com"
    if last == "name" and len(parts) > 1:
        last = parts[-2]
    return f"{word}-{last}"


def _spoken(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(_spoken(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _request(operation: dict[str, Any]) -> str | None:
    """The first sentence of the documentation as a request: `Deletes it` becomes `Please delete it`."""
    text = tidy(html.unescape(re.sub(r"<[^>]+>", " ", operation.get("documentation", ""))))
    text = re.sub(r"\s+([.,;:)])", r"\1", text)
    sentence = next(iter(sentences(text)), "").rstrip(".")
    first, _, rest = sentence.partition(" ")
    verb = _VERBS.get(first.lower())
    if verb is None or not 20 <= len(sentence) <= 220:
        return None
    return f"Please {verb} {rest}."


def _tools(name: str, names: list[str], origin: str, seed: int) -> list[str]:
    """`name` and three other operations, in an order that does not give it away."""
    others = sorted(
        (other for other in names if other != name), key=lambda o: unit_hash(f"{origin}/{o}", seed)
    )
    chosen = [name, *others[: _TOOLS - 1]]
    return sorted(chosen, key=lambda o: unit_hash(f"{origin}:{o}", seed))
