"""Users' own data: JSON lines, parquet and text files, turned into records that errors can name.

A row is a chat (`messages`), a prompt with its completion, or a text; which one is decided row by row from
the fields it has. Everything wrong with a row is an error with file and line: nothing is skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from zen_train.data.records import ROLES, Message, Record
from zen_train.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Names of columns. Where a row has several, messages win over prompt, and prompt over text."""

    messages: str = "messages"
    role: str = "role"
    content: str = "content"
    prompt: str = "prompt"
    completion: str = "completion"
    system: str | None = None
    text: str = "text"
    document: str | None = None


def read_jsonl(path: Path, fields: Fields) -> Iterator[Record]:
    """The records of a file of JSON objects, one a line; empty lines are allowed.

    Raises:
        DataError: the file is missing or empty, or a line is malformed; the message has file and line.
    """
    found = False
    with open(_existing_file(path), "rb") as file:
        for number, raw in enumerate(file, start=1):
            origin = f"{path}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not line:
                    continue
                row = json.loads(line)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{origin}: not UTF-8 (byte {error.start} of the line); save the file as UTF-8"
                ) from error
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{origin}: not JSON: {error.msg} at column {error.colno}; "
                    "each line must be one JSON object"
                ) from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{origin}: a JSON {type(row).__name__}, but each line must be one JSON object"
                )
            found = True
            yield row_record(row, fields, origin)
    if not found:
        raise DataError(f"{path}: the file has no records; write one JSON object a line")


def read_parquet(path: Path, fields: Fields) -> Iterator[Record]:
    """The records of a parquet file, or of all `*.parquet` files of a folder.

    Raises:
        DataError: no such file, no rows, no usable column, or a bad row; the message has file and row (from
        0).
    """
    files = sorted(path.glob("**/*.parquet")) if path.is_dir() else [_existing_file(path)]
    found = False
    for file in files:
        try:
            table = pq.ParquetFile(file)
            wanted = [name for name in _column_names(fields) if name in table.schema_arrow.names]
            if not wanted:
                raise DataError(
                    f"{file}: none of the columns {', '.join(_column_names(fields))}; it has "
                    f"{', '.join(table.schema_arrow.names)}. Name yours, like data.prompt_field=question."
                )
            number = 0
            for batch in table.iter_batches(columns=wanted):
                for row in batch.to_pylist():
                    found = True
                    present = {key: value for key, value in row.items() if value is not None}
                    yield row_record(present, fields, f"{file}:row {number}")
                    number += 1
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file}: not a readable parquet file: {error}") from error
    if not found:
        raise DataError(f"{path}: no records; the file is empty, or the folder has no *.parquet files")


def read_text(path: Path, *, pattern: str) -> Iterator[Record]:
    """One record for a text file, or one for each file of a folder that `pattern` matches.

    Raises:
        DataError: nothing to read, an empty file, or a file that is not UTF-8.
    """
    files = (
        [p for p in sorted(path.glob(pattern)) if p.is_file()] if path.is_dir() else [_existing_file(path)]
    )
    if not files:
        raise DataError(f"{path}: no file matches data.pattern={pattern!r}")
    for file in files:
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        try:
            text = file.read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file}: not UTF-8 text (byte {error.start}); convert it, or narrow data.pattern"
            ) from error
        if not text:
            raise DataError(f"{file}: the file is empty; remove it, or narrow data.pattern")
        yield Record(document=name, text=text, origin=str(file))


def row_record(row: Mapping[str, Any], fields: Fields, origin: str) -> Record:
    """One row as a record.

    Raises:
        DataError: no usable field, a wrong type or an unknown role.
    """
    if fields.messages in row:
        messages = _messages(row[fields.messages], fields, origin)
        return Record(document=_document(row, fields, origin, messages), messages=messages, origin=origin)
    if fields.prompt in row and fields.completion in row:
        turns = [
            Message("user", _string(row, fields.prompt, origin)),
            Message("assistant", _string(row, fields.completion, origin)),
        ]
        if fields.system is not None and fields.system in row:
            turns.insert(0, Message("system", _string(row, fields.system, origin)))
        messages = tuple(turns)
        return Record(document=_document(row, fields, origin, messages), messages=messages, origin=origin)
    if fields.text in row:
        text = _string(row, fields.text, origin)
        return Record(document=_document(row, fields, origin, text), text=text, origin=origin)
    raise DataError(
        f"{origin}: the row has the fields {', '.join(row) or 'none'}, but needs {fields.messages!r}, or "
        f"{fields.prompt!r} and {fields.completion!r}, or {fields.text!r}. Name yours, for example "
        "data.prompt_field=question."
    )


def _messages(value: Any, fields: Fields, origin: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{origin}: {fields.messages!r} must be a list of messages that is not empty")
    messages = []
    for number, turn in enumerate(value, start=1):
        where = f"{origin}: message {number}"
        if not isinstance(turn, dict) or fields.role not in turn or fields.content not in turn:
            raise DataError(f"{where} must be an object with {fields.role!r} and {fields.content!r}")
        role, content = turn[fields.role], turn[fields.content]
        if role not in ROLES:
            raise DataError(f"{where} has the role {role!r}; allowed are {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise DataError(f"{where}: {fields.content!r} must be a string, not {type(content).__name__}")
        messages.append(Message(role, content))
    return tuple(messages)


def _string(row: Mapping[str, Any], field: str, origin: str) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise DataError(f"{origin}: the field {field!r} must be a string, not {type(value).__name__}")
    return value


def _document(row: Mapping[str, Any], fields: Fields, origin: str, content: object) -> str:
    """The row's document field, or a digest of its content: equal rows then stay on one side of the split."""
    if fields.document is None:
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]
    if fields.document not in row:
        raise DataError(f"{origin}: the row has no field {fields.document!r} (data.document_field)")
    return str(row[fields.document])


def _column_names(fields: Fields) -> list[str]:
    names = (fields.messages, fields.prompt, fields.completion, fields.system, fields.text, fields.document)
    return [name for name in names if name is not None]


def _existing_file(path: Path) -> Path:
    if path.is_dir():
        raise DataError(f"{path}: a folder, but a file is needed here")
    if not path.is_file():
        raise DataError(f"{path}: no such file; data.path is taken relative to the folder you start from")
    return path
