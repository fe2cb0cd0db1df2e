"""What an export may need before it starts: room for the header, and bytes on the disk."""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from zen_train.delta.decide import plain_entry
from zen_train.delta.direction_bits import MOST_BITS, most_directions
from zen_train.delta.export_options import ExportOptions
from zen_train.delta.low_rank import worth_it
from zen_train.delta.manifest import METADATA_KEY, DeltaConfig, TensorEntry
from zen_train.delta.pairing import Pair
from zen_train.delta.shard_writer import header_entry_bytes
from zen_train.delta.strict_json import compact

_NO_DIGEST = "0" * 64
_LONG_FIGURE = 0.000123456  # as many characters as a rounded figure can take
_SLACK_BYTES = 16  # per tensor


def largest_entries(
    pairs: list[Pair], tied: Mapping[str, str], options: ExportOptions, model_type: str | None
) -> dict[str, TensorEntry]:
    """The longest entry that each parameter can get, for the room that the header needs."""
    entries = {}
    for pair in pairs:
        entry = replace(plain_entry(pair), zeros=_LONG_FIGURE, relative_error=_LONG_FIGURE)
        if len(pair.tuned.shape) >= 2:
            transposed = options.is_transposed(pair.name, model_type)
            entry = replace(
                entry,
                kind="sign",
                scale=options.scale,
                planes=max(1, options.planes_of(pair.name)),
                rank=options.low_rank if worth_it(pair.tuned.shape, options.low_rank) else 0,
                transposed=transposed,
            )
            if most := _most_directions(pair, options):  # more numbers than any other form has
                entry = replace(
                    entry, kind="directions", scale=None, planes=0, directions=(most,) * MOST_BITS
                )
        if pair.grown:
            entry = replace(entry, kind="rows", base_rows=pair.base.shape[0])
        entries[pair.name] = replace(entry, parts=dict.fromkeys(entry.expected_parts(), _NO_DIGEST))
    for alias, stored in tied.items():
        shape = entries[stored].shape
        entries[alias] = TensorEntry(kind="tied", shape=shape, dtype=entries[stored].dtype, target=stored)
    return entries


def header_room_bytes(config: DeltaConfig) -> int:
    """Enough for the header of any shard, given the largest entries."""
    room = len(json.dumps({"__metadata__": {"format": "pt", METADATA_KEY: compact(config.to_json())}}))
    for name, entry in config.tensors.items():
        room += _SLACK_BYTES
        for suffix, (dtype, shape) in entry.expected_parts().items():
            room += header_entry_bytes(f"{name}.{suffix}", dtype or "BF16", shape)
    return room


def upper_bytes(pairs: list[Pair], options: ExportOptions) -> int:
    """The most that the tensors can take: packed where that is certain, float32 elsewhere."""
    total = 0
    for pair in pairs:
        certain = (
            len(pair.tuned.shape) >= 2 and options.max_relative_error(pair.name) is None and not pair.grown
        )
        per_row = options.planes_of(pair.name) * (pair.tuned.shape[-1] // 8 + 5) if certain else 0
        packed = prod(pair.tuned.shape[:-1]) * per_row
        if certain and worth_it(pair.tuned.shape, options.low_rank):
            packed += 2 * options.low_rank * prod(pair.tuned.shape[:-2]) * sum(pair.tuned.shape[-2:])
        if certain and (most := _most_directions(pair, options)):
            padding = MOST_BITS * most + max(pair.tuned.shape[-2:])
            bits = options.direction_bits * prod(pair.tuned.shape[-2:])
            packed = max(packed, prod(pair.tuned.shape[:-2]) * (int(bits / 8) + padding))
        total += packed if certain else 4 * pair.tuned.numel
    return total


def _most_directions(pair: Pair, options: ExportOptions) -> int:
    """How many coded directions a matrix may get; 0: it gets none."""
    if options.code != "directions" or pair.grown:
        return 0
    rows, columns = pair.tuned.shape[-2:]  # or the other way round, which is the same here
    return most_directions(rows, columns, options.direction_bits)
