"""The body of a request: read within a size and a time, parsed, checked against its schema; errors name the field.

A body without Content-Length is counted while it comes. Large ones are parsed in a thread, so that they
delay no stream.
"""

from __future__ import annotations

import asyncio
import difflib
from typing import Any, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError

from zen_train.serve.api.http_errors import RequestTimeoutError, UnsupportedMediaError
from zen_train.serve.api.schema import NOT_OFFERED, Body
from zen_train.serve.errors import BadRequestError, TooLargeError

_INLINE_BYTES = 65_536
_DROPPED_SHARE = 8
_FORMS = {
    "prompt": "send a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "send a string of 1 to 1024 characters, or a list of at most 16",
    "content": "send a string or a list of text parts",
}
_MAX_KEYS = 64  # of one object that our schemas describe
_SHOWN_CHARS = 80

Schema = TypeVar("Schema", bound=Body)


async def read_body(request: Request, schema: type[Schema], *, max_bytes: int, timeout_s: float) -> Schema:
    """The request's body as `schema`.

    Raises:
        UnsupportedMediaError: the Content-Type is not JSON (browsers send other types across sites without asking).
        TooLargeError: more than `max_bytes`.
        RequestTimeoutError: not complete after `timeout_s`.
        BadRequestError: no JSON, or not of this schema.
        ClientDisconnect: the client went away.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaError(
            f"Content-Type is {kind or 'missing'!r}; send JSON with Content-Type: application/json"
        )
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, max_bytes)
    except TimeoutError:
        raise RequestTimeoutError(
            f"the body was not complete after {timeout_s:g} s; send it faster"
        ) from None
    if len(raw) <= _INLINE_BYTES:
        return parse(raw, schema)
    return await asyncio.to_thread(parse, raw, schema)


async def _read(request: Request, max_bytes: int) -> bytes:
    received, dropped_bytes = bytearray(), 0
    async for piece in request.stream():
        if len(received) <= max_bytes:
            received += piece
            continue
        # Most clients read no answer before they have sent everything, so a moderate excess is read and dropped.
        received.clear()
        received += b" " * (max_bytes + 1)
        dropped_bytes += len(piece)
        if dropped_bytes > _DROPPED_SHARE * max_bytes:
            break
    if len(received) > max_bytes:
        raise TooLargeError(f"the body is above {max_bytes} bytes (setting limits.max_body_bytes)")
    return bytes(received)


def parse(raw: bytes, schema: type[Schema]) -> Schema:
    """JSON text as `schema`. Raises BadRequestError."""
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise BadRequestError(f"the body is {_kind(document)}; send a JSON object")
    _check_keys(document, schema)
    for message in document["messages"] if isinstance(document.get("messages"), list) else ():
        if isinstance(message, dict) and len(message) > _MAX_KEYS:
            raise BadRequestError(
                f"a message has {len(message)} fields; send role and content", param="messages"
            )
    try:
        return schema.model_validate(document)
    except ValidationError as error:
        raise _explain(error) from None


def _check_keys(document: dict[str, Any], schema: type[BaseModel]) -> None:
    unknown = [key for key in document if key not in schema.model_fields]
    if unknown:
        name = unknown[0]
        close = difflib.get_close_matches(name[:_SHOWN_CHARS], schema.model_fields, n=1, cutoff=0.6)
        hint = (
            f" Did you mean {close[0]!r}?" if close else " It is neither OpenAI's nor one of this server's."
        )
        raise BadRequestError(f"unknown field {_show(name)}.{hint}", param=name[:_SHOWN_CHARS])


def _explain(error: ValidationError) -> BadRequestError:
    """The first problem as one sentence with its field."""
    problem = error.errors(include_url=False, include_context=False)[0]
    where = _where(problem["loc"])
    field = next(
        (str(part) for part in reversed(problem["loc"]) if isinstance(part, str) and part in NOT_OFFERED),
        None,
    )
    if problem["type"] == "missing":
        return BadRequestError(f"{where} is missing", param=where)
    if problem["type"] == "extra_forbidden":
        return BadRequestError(f"unknown field {where}", param=where)
    if field is not None:
        return BadRequestError(
            f"{where} cannot be honoured: {NOT_OFFERED[field]}. Leave it out.", param=where
        )
    forms = [_FORMS[part] for part in problem["loc"] if part in _FORMS]
    return BadRequestError(
        f"{where} is {_show(problem['input'])}: {forms[-1] if forms else problem['msg']}", param=where
    )


def _where(location: tuple[int | str, ...]) -> str:
    """A path such as messages[3].content, without the names that pydantic gives to the members of a union."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "bool", "int", "float"):
            path += f".{part}" if path else part
    return path[:200] or "body"


def _show(value: object) -> str:
    if isinstance(value, (dict, list)) and len(value) > 4:
        return f"{_kind(value)} of {len(value)} elements"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
