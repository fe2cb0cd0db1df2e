"""What an export is told: how to code, and within which bounds."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from zen_train.delta import roles
from zen_train.delta.codec import SCALES, Scale
from zen_train.errors import DeltaError

EmbeddingRule = Literal["auto", "sign", "dense"]
Code = Literal["signs", "directions"]
CODES: tuple[Code, ...] = ("signs", "directions")
EMBEDDING_RULES: tuple[EmbeddingRule, ...] = ("auto", "sign", "dense")
WITHOUT_SIGNS = {"planes": 1, "low_rank": 0, "scale": "row"}
"""What `code="directions"` leaves of the settings of signs: their defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """How to code. Bounds are on ||D - D_hat|| / ||D|| of one tensor; a tensor beyond its bound is stored
    dense (by code directions: as signs, if these keep it).
    """

    scale: Scale = "row"
    planes: int | Mapping[str, int] = 1  # by parameter: what is not named has 1; 0 drops its delta
    low_rank: int = 0  # singular directions kept in bf16 before the signs
    along_weight: float = 1.0  # see `along`; bounds are on the error of least squares, whatever it is
    code: Code = "signs"
    direction_bits: float = 1.0  # code directions: a weight, of each matrix
    embedding: EmbeddingRule = "auto"  # embedding and head: by the bound, always packed, never packed
    embedding_max_relative_error: float = 0.75
    matrix_max_relative_error: float | None = None
    transposed: Collection[str] | None = None  # parameters stored [in, out]; None: known from the model type

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise DeltaError(f"scale={self.scale!r} is unknown; allowed: {', '.join(SCALES)}")
        if self.embedding not in EMBEDDING_RULES:
            raise DeltaError(
                f"embedding={self.embedding!r} is unknown; allowed: {', '.join(EMBEDDING_RULES)}"
            )
        if isinstance(self.planes, int):
            if self.planes < 1:
                raise DeltaError(f"planes={self.planes} is not possible; at least 1 is needed")
        elif wrong := [name for name, planes in self.planes.items() if planes < 0]:
            raise DeltaError(f"planes of {wrong[0]} is {self.planes[wrong[0]]}; 0 or more is needed")
        if self.low_rank < 0:
            raise DeltaError(f"low_rank={self.low_rank} is not possible; 0 (none) or more is needed")
        _check_code(self)
        if isinstance(self.transposed, str):
            raise DeltaError("transposed must be a collection of parameter names, found one text")

    def is_transposed(self, name: str, model_type: str | None) -> bool:
        """True when `name` is stored `[in, out]`."""
        return roles.is_transposed(name, model_type) if self.transposed is None else name in self.transposed

    def planes_of(self, name: str) -> int:
        """How many planes `name` gets; 0: its delta is dropped."""
        return self.planes if isinstance(self.planes, int) else self.planes.get(name, 1)

    def max_relative_error(self, name: str) -> float | None:
        """The bound that `name` must keep to be packed; None for no bound."""
        if roles.is_embedding(name) or roles.is_head(name):
            return {"auto": self.embedding_max_relative_error, "sign": None, "dense": -1.0}[self.embedding]
        return self.matrix_max_relative_error


def _check_code(options: ExportOptions) -> None:
    if options.code not in CODES:
        raise DeltaError(f"code={options.code!r} is unknown; allowed: {', '.join(CODES)}")
    if not 0.0 < options.direction_bits < float("inf"):
        raise DeltaError(f"direction_bits={options.direction_bits} is not possible; more than 0 is needed")
    if options.code == "directions":
        for setting, needed in WITHOUT_SIGNS.items():
            if (found := getattr(options, setting)) != needed:
                raise DeltaError(
                    f"code=directions needs {setting}={needed}, found {found!r}; or use code=signs"
                )
