"""Read `delta_config.json` strictly. Every refusal names the field, what was found and what is expected."""

import re
from collections.abc import Mapping
from typing import Any

from zen_train.delta.codec import SCALES
from zen_train.delta.dtypes import dtype_of_code
from zen_train.delta.fingerprint import Fingerprint, root_of
from zen_train.delta.manifest import (
    FORMAT_MAJOR,
    FORMAT_NAME,
    FORMAT_VERSION,
    KINDS,
    BaseInfo,
    DeltaConfig,
    TensorEntry,
)
from zen_train.delta.shard_reader import TensorSpec
from zen_train.errors import DeltaError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MISSING = object()


def parse_config(raw: Mapping[str, Any], where: str) -> DeltaConfig:
    """Build the typed configuration. Unknown fields are ignored; everything known is checked."""
    _check_format(raw, where)
    base = _parse_base(raw, where)
    tensors = {
        name: _parse_entry(entry, f"{where}: tensors.{name}")
        for name, entry in _need(raw, "tensors", dict, where).items()
    }
    config = DeltaConfig(
        variant=_need(raw, "variant", str, where),
        step=_need(raw, "step", int, where),
        base=base,
        tensors=tensors,
        tied=_need(raw, "tied", bool, where),
        vocab_size=_need(raw, "vocab_size", int, where),
        provenance=_need(raw, "provenance", dict, where),
        files={
            name: _digest(digest, f"{where}: files.{name}")
            for name, digest in _need(raw, "files", dict, where).items()
        },
        created_by=_need(raw, "created_by", dict, where),
        format_version=_need(raw, "format_version", str, where),
    )
    _check_coverage(config, where)
    stated = _digest(_need(raw, "content_hash", str, where), f"{where}: content_hash")
    if stated != config.content_hash:
        raise DeltaError(
            f"{where}: content_hash is {stated[:16]}, its content gives {config.content_hash[:16]}; "
            "the file was changed, fetch it again"
        )
    return config


def _check_format(raw: Mapping[str, Any], where: str) -> None:
    name = raw.get("format")
    if name != FORMAT_NAME:
        raise DeltaError(f"{where}: format is {name!r}, expected {FORMAT_NAME!r}; this is no delta artifact")
    version = _need(raw, "format_version", str, where)
    match = re.fullmatch(r"(\d+)\.(\d+)", version)
    if not match:
        raise DeltaError(
            f"{where}: format_version {version!r} is not MAJOR.MINOR, such as {FORMAT_VERSION!r}"
        )
    if int(match[1]) != FORMAT_MAJOR:
        raise DeltaError(
            f"{where}: format_version {version} is not readable, this reader knows {FORMAT_MAJOR}.x; "
            "use a matching zen_train"
        )


def _parse_base(raw: Mapping[str, Any], where: str) -> BaseInfo:
    base = _need(raw, "base", dict, where)
    at = f"{where}: base"
    digests, specs = {}, {}
    for name, item in _need(raw, "base_tensors", dict, where).items():
        here = f"{where}: base_tensors.{name}"
        if not isinstance(item, list) or len(item) != 3:
            raise DeltaError(f"{here} must be [dtype, shape, digest], found {item!r}")
        specs[name] = TensorSpec(dtype_of_code(item[0], here), _shape(item[1], here))
        digests[name] = _digest(item[2], here)
    stated = _digest(_need(base, "fingerprint", str, at), f"{at}.fingerprint")
    if stated != root_of(digests, specs):
        raise DeltaError(
            f"{at}.fingerprint {stated[:16]} does not follow from base_tensors; the file was changed"
        )
    return BaseInfo(
        name=_need(base, "name", str, at),
        fingerprint=Fingerprint(stated, digests, specs),
        vocab_size=_need(base, "vocab_size", int, at),
        dtype=_need(base, "dtype", str, at),
        tied=_need(base, "tied", bool, at),
        revision=_maybe_text(base, "revision", at),
        config_hash=_maybe_text(base, "config_hash", at),
        model_type=_maybe_text(base, "model_type", at),
        architecture=_maybe_text(base, "architecture", at),
        licence=_maybe_text(base, "licence", at),
    )


def _parse_entry(raw: object, where: str) -> TensorEntry:
    if not isinstance(raw, dict):
        raise DeltaError(f"{where} must be an object, found {type(raw).__name__}")
    kind = raw.get("kind")
    if kind not in KINDS:
        raise DeltaError(f"{where}: kind {kind!r} is unknown; this reader knows {', '.join(KINDS)}")
    dtype = _need(raw, "dtype", str, where)
    dtype_of_code(dtype, where)
    planes = _optional(raw, "planes", int, where) or 0
    rank = _optional(raw, "rank", int, where) or 0
    scale = _optional(raw, "scale", str, where)
    entry = TensorEntry(
        kind=kind,
        shape=_shape(_need(raw, "shape", list, where), where),
        dtype=dtype,
        parts={
            suffix: _digest(d, f"{where}: parts.{suffix}") for suffix, d in (raw.get("parts") or {}).items()
        },
        scale=scale,
        planes=planes,
        rank=rank,
        directions=_directions(raw, where),
        transposed=_optional(raw, "transposed", bool, where) or False,
        base_tensor=_optional(raw, "base_tensor", str, where),
        base_rows=_optional(raw, "base_rows", int, where),
        target=_optional(raw, "target", str, where),
        zeros=_optional(raw, "zeros", float, where),
        relative_error=_optional(raw, "relative_error", float, where),
    )
    if planes < 0 or (planes > 0) != (scale in SCALES) or (kind == "sign" and not planes):
        raise DeltaError(f"{where}: planes {planes} with scale {scale!r} is not possible for kind {kind}")
    if rank < 0 or (rank and not planes):
        raise DeltaError(f"{where}: rank {rank} is not possible with {planes} planes")
    if (kind == "directions") != bool(entry.directions) or (
        entry.directions and (planes or len(entry.shape) < 2)
    ):
        raise DeltaError(
            f"{where}: directions {list(entry.directions)} with {planes} planes and shape {list(entry.shape)} are not "
            f"possible for kind {kind}"
        )
    if planes and kind not in ("sign", "rows"):
        raise DeltaError(f"{where}: kind {kind} has no planes, found {planes}")
    if (kind == "rows") != (entry.base_rows is not None) or (kind == "tied") != (entry.target is not None):
        raise DeltaError(f"{where}: base_rows belongs to kind rows and target to kind tied, and only there")
    if entry.base_rows is not None and not (entry.shape and 0 < entry.base_rows < entry.shape[0]):
        raise DeltaError(
            f"{where}: base_rows {entry.base_rows} does not lie inside shape {list(entry.shape)}"
        )
    expected, found = set(entry.expected_parts()), set(entry.parts)
    if expected != found:
        raise DeltaError(
            f"{where}: parts are {sorted(found)}, kind {kind} needs {sorted(expected)}; "
            "a part that this reader does not know may not be skipped"
        )
    return entry


def _check_coverage(config: DeltaConfig, where: str) -> None:
    base_specs = config.base.fingerprint.specs
    if missing := sorted(set(base_specs) - set(config.tensors)):
        raise DeltaError(
            f"{where}: base tensor {missing[0]} ({len(missing)} in all) has no entry; coverage must be 100 %"
        )
    for name, entry in config.tensors.items():
        here = f"{where}: tensors.{name}"
        if entry.target is not None:
            target = config.tensors.get(entry.target)
            if target is None or target.kind == "tied" or target.shape != entry.shape:
                raise DeltaError(
                    f"{here}: tied to {entry.target!r}, which holds no values of shape {list(entry.shape)}"
                )
            continue
        base = base_specs.get(entry.base_tensor or name)
        if base is None:
            raise DeltaError(
                f"{here}: the base has no tensor {entry.base_tensor or name!r}; a left-over tensor"
            )
        grown = len(base.shape) == len(entry.shape) and base.shape[1:] == entry.shape[1:]
        fits = grown if entry.kind == "dense" else base.shape == entry.packed_shape()
        if not fits:
            raise DeltaError(f"{here}: shape {list(entry.shape)} does not fit the base's {list(base.shape)}")


def _need(raw: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = raw.get(key, _MISSING)
    if value is _MISSING:
        raise DeltaError(f"{where}: field {key} is missing")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise DeltaError(f"{where}: field {key} must be {kind.__name__}, found {value!r:.80}")
    return value


def _optional(raw: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    return None if raw.get(key) is None else _need(raw, key, kind, where)


def _maybe_text(raw: Mapping[str, Any], key: str, where: str) -> str | None:
    value: str | None = _optional(raw, key, str, where)
    return value


def _shape(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in value):
        raise DeltaError(f"{where}: shape must be a list of whole numbers, found {value!r:.80}")
    return tuple(value)


def _directions(raw: Mapping[str, Any], where: str) -> tuple[int, ...]:
    counts = _optional(raw, "directions", list, where) or []
    if (
        not all(type(count) is int and count > 0 for count in counts)
        or sorted(counts, reverse=True) != counts
    ):
        raise DeltaError(
            f"{where}: directions must be positive counts, none above the one before, found {counts!r:.80}"
        )
    return tuple(counts)


def _digest(value: object, where: str) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise DeltaError(f"{where} must be a sha256 in lower-case hex, found {value!r:.80}")
    return value
