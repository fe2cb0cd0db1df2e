"""Relative error by layer and module: tensor names sorted into the grid that page and picture draw."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from zen_train.report.results import TensorRow

GAUSSIAN_RELATIVE_ERROR = 0.603
"""`sqrt(1 - 2/pi)`: relative error of one sign bit and the best scale on a Gaussian delta (BitDelta)."""

_IN_LAYER = re.compile(r"(?:^|\.)(\d+)\.(.+)$")


@dataclass(frozen=True, kw_only=True)
class ErrorGrid:
    """`cells[module][layer]` is the mean relative error of that module there, None where it has no tensor."""

    layers: tuple[int, ...]
    modules: tuple[str, ...]
    cells: tuple[tuple[float | None, ...], ...]
    outside: tuple[tuple[str, float], ...]
    """Name and error of approximated tensors that belong to no layer: embeddings, head."""

    def values(self) -> list[float]:
        """Every error in the grid."""
        return [value for row in self.cells for value in row if value is not None]


def error_grid(tensors: Sequence[TensorRow]) -> ErrorGrid:
    """Sort the approximated tensors by the first number in their name and by what follows it.

    Numbers further on (experts) are averaged over. Modules keep the order in which they first appear.
    """
    errors: dict[tuple[str, int], list[float]] = defaultdict(list)
    outside = []
    for row in tensors:
        if row.relative_error is None:
            continue
        match = _IN_LAYER.search(row.name)
        if match is None:
            outside.append((row.name.removesuffix(".weight"), row.relative_error))
        else:
            path = [part for part in match[2].removesuffix(".weight").split(".") if not part.isdecimal()]
            errors[".".join(path), int(match[1])].append(row.relative_error)
    modules = list(dict.fromkeys(module for module, _ in errors))
    layers = sorted({layer for _, layer in errors})
    cells = tuple(
        tuple(sum(found) / len(found) if (found := errors.get((module, layer))) else None for layer in layers)
        for module in modules
    )
    return ErrorGrid(layers=tuple(layers), modules=_short_names(modules), cells=cells, outside=tuple(outside))


def _short_names(modules: Sequence[str]) -> tuple[str, ...]:
    """The last part of each dotted path, or as many parts as it takes to keep them apart."""
    for parts in range(1, 10):
        short = [".".join(module.split(".")[-parts:]) for module in modules]
        if len(set(short)) == len(short):
            return tuple(short)
    return tuple(modules)
