"""`delta_config.json`: what an artifact says about itself, as typed objects, read strictly and written
canonically.

A reader refuses another format, a higher major version, an unknown kind and any field of the wrong type; it
ignores fields it does not know. FORMAT.md is the specification.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zen_train.delta.codec import matrix_shape
from zen_train.delta.dtypes import dtype_code
from zen_train.delta.fingerprint import Fingerprint, fingerprint
from zen_train.delta.rows import packed_width
from zen_train.delta.sources import FolderSource
from zen_train.delta.strict_json import compact

FORMAT_NAME = "zen-delta"
FORMAT_VERSION = "1.0"
LOW_RANK_VERSION = "1.1"
"""Of artifacts that hold a low-rank part, which a reader of 1.0 refuses."""
DIRECTIONS_VERSION = "1.2"
"""Of artifacts that hold coded singular directions, which a reader of 1.1 refuses."""
FORMAT_MAJOR = 1
CONFIG_NAME = "delta_config.json"
METADATA_KEY = "delta_config"

Kind = Literal["sign", "directions", "dense", "same", "rows", "tied"]
KINDS: tuple[Kind, ...] = ("sign", "directions", "dense", "same", "rows", "tied")
_VOLATILE_CONFIG_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseInfo:
    """The base model that a delta belongs to."""

    name: str
    fingerprint: Fingerprint
    vocab_size: int
    dtype: str  # most common dtype of its tensors, as safetensors names it: "BF16"
    tied: bool  # head and embedding are one tensor
    revision: str | None = None
    config_hash: str | None = None
    model_type: str | None = None
    architecture: str | None = None
    licence: str | None = None

    @property
    def label(self) -> str:
        """How errors name it."""
        revision = f" at {self.revision}" if self.revision else ""
        return f"{self.name}{revision} (fingerprint {self.fingerprint.root[:16]})"

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        name: str | None = None,
        revision: str | None = None,
        licence: str | None = None,
        known: Fingerprint | None = None,
    ) -> "BaseInfo":
        """Describe a Hugging Face folder. Hashes every tensor unless its fingerprint is `known`."""
        source = FolderSource(folder)
        found = known or fingerprint(source)
        config = source.config
        nested = config.get("text_config")
        text = nested if isinstance(nested, dict) else config
        codes = [dtype_code(spec.dtype) for spec in found.specs.values()]
        stable = {key: value for key, value in config.items() if key not in _VOLATILE_CONFIG_KEYS}
        architectures = config.get("architectures") or [None]
        return cls(
            name=name or str(config.get("_name_or_path") or Path(folder).name),
            fingerprint=found,
            vocab_size=int(text.get("vocab_size", 0)),
            dtype=max(sorted(set(codes)), key=codes.count) if codes else "BF16",
            tied=bool(source.aliases()),
            revision=revision,
            config_hash=hashlib.sha256(compact(stable, constants=True).encode()).hexdigest(),
            model_type=config.get("model_type"),
            architecture=architectures[0],
            licence=licence,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """How one parameter of the variant is held.

    `shape` is the variant's. `dtype` is that of the base tensor (of the tuned one where the base has none).
    `parts` maps a suffix to the sha256 of the stored tensor `NAME.SUFFIX`.
    """

    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    parts: Mapping[str, str] = field(default_factory=dict)
    scale: str | None = None
    planes: int = 0
    rank: int = 0  # of the part `u v` beside the signs
    directions: tuple[int, ...] = ()  # kind directions: how many have more than 0, 1, ... bits
    transposed: bool = False
    base_tensor: str | None = None  # when the delta is against a base tensor of another name
    base_rows: int | None = None  # kind rows: rows shared with the base
    target: str | None = None  # kind tied: the parameter that holds the values
    zeros: float | None = None
    relative_error: float | None = None

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"kind": self.kind, "shape": list(self.shape), "dtype": self.dtype}
        if self.parts:
            out["parts"] = dict(self.parts)
        if self.planes:
            out |= {"scale": self.scale, "planes": self.planes}
        if self.rank:
            out["rank"] = self.rank
        if self.directions:
            out["directions"] = list(self.directions)
        if self.transposed:
            out["transposed"] = True
        optional = {
            "base_tensor": self.base_tensor,
            "base_rows": self.base_rows,
            "target": self.target,
            "zeros": None if self.zeros is None else rounded(self.zeros),
            "relative_error": None if self.relative_error is None else rounded(self.relative_error),
        }
        return out | {key: value for key, value in optional.items() if value is not None}

    @property
    def packed(self) -> bool:
        """Whether a coded delta is stored."""
        return bool(self.planes or self.directions)

    @property
    def needs_version(self) -> str:
        """The lowest version of the format that knows this form."""
        return DIRECTIONS_VERSION if self.directions else LOW_RANK_VERSION if self.rank else FORMAT_VERSION

    def packed_shape(self) -> tuple[int, ...]:
        """The stored shape of the packed share: all of the parameter, or the rows it shares with the base."""
        return self.shape if self.base_rows is None else (self.base_rows, *self.shape[1:])

    def expected_parts(self) -> dict[str, tuple[str | None, tuple[int, ...]]]:
        """`{suffix: (dtype or None for any, shape)}` of the tensors that this entry stores."""
        out: dict[str, tuple[str | None, tuple[int, ...]]] = {}
        if self.planes:
            *stack, rows, columns = matrix_shape(self.packed_shape(), self.transposed)
            for plane in range(self.planes):
                out[part_name("sign", plane)] = ("U8", (*stack, rows, packed_width(columns)))
                out[part_name("alpha", plane)] = ("F32", (*stack, rows if self.scale == "row" else 1))
            if self.rank:
                out["u"] = ("BF16", (*stack, rows, self.rank))
                out["v"] = ("BF16", (*stack, self.rank, columns))
        if self.directions:
            *stack, rows, columns = matrix_shape(self.shape, self.transposed)
            stacked = sum(self.directions)
            out["right"] = ("U8", (*stack, stacked, packed_width(columns)))
            out["left"] = ("U8", (*stack, rows, packed_width(stacked)))
            out["scales"] = ("F32", (*stack, self.directions[0]))
        if self.kind == "dense":
            out["dense"] = (None, self.shape)
        if self.kind == "rows":
            assert self.base_rows is not None
            out["rows"] = (None, (self.shape[0] - self.base_rows, *self.shape[1:]))
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaConfig:
    """The whole of `delta_config.json`."""

    variant: str
    step: int
    base: BaseInfo
    tensors: Mapping[str, TensorEntry]
    tied: bool  # the variant's head and embedding are one tensor
    vocab_size: int  # of the variant
    provenance: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # sidecar file name -> sha256
    created_by: Mapping[str, str] = field(default_factory=dict)
    format_version: str = FORMAT_VERSION

    @property
    def content_hash(self) -> str:
        """Identity of the weights: base root and every entry, without the figures that only inform."""
        entries = {
            name: {
                key: value for key, value in entry.to_json().items() if key not in ("zeros", "relative_error")
            }
            for name, entry in self.tensors.items()
        }
        return hashlib.sha256(
            compact({"base": self.base.fingerprint.root, "tensors": entries}).encode()
        ).hexdigest()

    def to_json(self) -> dict[str, Any]:
        base, prints = self.base, self.base.fingerprint
        return {
            "format": FORMAT_NAME,
            "format_version": self.format_version,
            "created_by": dict(self.created_by),
            "variant": self.variant,
            "step": self.step,
            "base": {
                "name": base.name,
                "revision": base.revision,
                "config_hash": base.config_hash,
                "vocab_size": base.vocab_size,
                "dtype": base.dtype,
                "tied": base.tied,
                "model_type": base.model_type,
                "architecture": base.architecture,
                "licence": base.licence,
                "fingerprint": prints.root,
            },
            "base_tensors": {
                name: [dtype_code(spec.dtype), list(spec.shape), prints.digests[name]]
                for name, spec in prints.specs.items()
            },
            "tied": self.tied,
            "vocab_size": self.vocab_size,
            "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
            "content_hash": self.content_hash,
            "provenance": dict(self.provenance),
            "files": dict(self.files),
        }


def part_name(part: str, plane: int) -> str:
    """`sign`, `sign.1`, ...: the suffix of a plane's tensor."""
    return part if plane == 0 else f"{part}.{plane}"


def rounded(value: float) -> float:
    """Six significant digits: what a stated figure carries."""
    return float(f"{value:.6g}")
