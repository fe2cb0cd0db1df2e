"""coder: functions of Python's standard library, to be written from their description.

The source is the running interpreter's own library (PSF licence), so nothing is fetched. A document is a
module, and its side of the split follows from its name: it is the same in every Python version, while the
functions may differ slightly. Test suites and vendored packages are left out.
"""

from __future__ import annotations

import ast
import inspect
import os
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

from zen_train.data.records import Record, ask, unit_hash

_LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "pydoc_data",
}
_CODE_CHARACTERS = (40, 1400)
_DESCRIPTION_CHARACTERS = (20, 500)


def records(folders: Mapping[str, Path], seed: int) -> Iterator[Record]:
    """One record for each function or method that has a description and a body of moderate length."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in _modules(library):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # templates and files in other encodings are no modules of today's Python
        module = path.relative_to(library).with_suffix("").as_posix().replace("/", ".")
        yield from _functions(module, source, tree, seed)


def _modules(library: Path) -> Iterator[Path]:
    """The source files of the library in a fixed order, without the folders that are left out."""
    for folder, names, files in os.walk(library):
        names[:] = sorted(set(names) - _LEFT_OUT)
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def _functions(module: str, source: str, tree: ast.Module, seed: int) -> Iterator[Record]:
    lines = source.splitlines()
    for node, parent in _definitions(tree.body, None):
        description = _description(node)
        code = _without_docstring(node, lines)
        if description is None or code is None:
            continue
        if not _CODE_CHARACTERS[0] <= len(code) <= _CODE_CHARACTERS[1]:
            continue
        kind = f"a method `{node.name}` of the class `{parent}`" if parent else f"a function `{node.name}`"
        yield ask(
            document=module,
            origin=f"{module}:{node.lineno}",
            prompt=_prompt(kind, _signature(node), description, unit_hash(f"{module}.{node.name}", seed)),
            answer=f"```python\n{code}\n```",
        )


def _definitions(body: list[ast.stmt], owner: str | None) -> Iterator[tuple[ast.FunctionDef, str | None]]:
    """Functions and methods with the class they belong to; those inside functions are left out."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield node, owner
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, node.name)
        elif isinstance(node, ast.If | ast.Try):
            yield from _definitions(node.body, owner)


def _prompt(kind: str, signature: str, description: str, choice: float) -> str:
    forms = (
        f"Write {kind} in Python.\n\n{description}\n\nSignature: `{signature}`",
        f"Implement this in Python, as {kind} with the signature `{signature}`:\n\n{description}",
        f"I need {kind}: `{signature}`. {description}\n\nPlease write the Python code.",
    )
    return forms[int(choice * len(forms))]


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def _description(node: ast.FunctionDef) -> str | None:
    """The first paragraph or two of the docstring, whole paragraphs only."""
    docstring = ast.get_docstring(node)
    if not docstring:
        return None
    taken: list[str] = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        if sum(map(len, taken)) + len(paragraph) > _DESCRIPTION_CHARACTERS[1] or ">>>" in paragraph:
            break
        taken.append(paragraph)
    description = "\n\n".join(taken).strip()
    return description if len(description) >= _DESCRIPTION_CHARACTERS[0] else None


def _without_docstring(node: ast.FunctionDef, lines: list[str]) -> str | None:
    """The source of the function, dedented, with decorators and without its docstring."""
    docstring, body = node.body[0], node.body[1:]
    if not body or docstring.lineno == node.lineno:
        return None
    assert docstring.end_lineno is not None
    assert node.end_lineno is not None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    kept = lines[first - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
    return textwrap.dedent("\n".join(kept)).expandtabs(4).rstrip()
