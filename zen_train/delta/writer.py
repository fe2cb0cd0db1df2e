"""Write a delta artifact: base and tuned model in, one published folder out. One tensor in memory at a time, or a few.

What becomes of a parameter:
  same   equal in value to the base's, or given no planes; nothing is stored
  sign   two or more dimensions: one bit an element and float32 scales
  directions   with code="directions", two or more dimensions: coded singular directions (signs where the bits pay for
         none, or the bound on the error does not hold)
  rows   a vocabulary that grew: the shared rows packed (or unchanged), the added rows stored whole
  dense  vectors, whatever is smaller whole than packed, and tensors beyond their error bound
  tied   a second name of another parameter (or a head equal to the embedding that the base ties it to)
It does not verify what it wrote: `verify_artifact` reads the files back.
"""

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import zen_train
from zen_train.delta import roles
from zen_train.delta.card import CARD_NAME, default_card
from zen_train.delta.codec import Scale
from zen_train.delta.decide import decide, plain_entry
from zen_train.delta.decision import Decision
from zen_train.delta.export_options import Code, EmbeddingRule, ExportOptions
from zen_train.delta.fingerprint import quick_check, tensor_digest
from zen_train.delta.manifest import (
    CONFIG_NAME,
    METADATA_KEY,
    BaseInfo,
    DeltaConfig,
    TensorEntry,
)
from zen_train.delta.pairing import Pair, pair_tensors, shared_bases
from zen_train.delta.plan import header_room_bytes, largest_entries, upper_bytes
from zen_train.delta.publish import new_folder
from zen_train.delta.report import ArtifactReport, TensorRow, summarise
from zen_train.delta.shard_writer import DEFAULT_SHARD_BYTES, ShardWriter
from zen_train.delta.sidecars import check_sidecars, file_digest
from zen_train.delta.sources import TensorSource
from zen_train.delta.strict_json import compact, readable
from zen_train.errors import DeltaError
from zen_train.ordered import in_order

MOST_WORKERS = 4
"""Matrices that are decomposed side by side: each takes some float64 copies of itself."""


def write_artifact(
    folder: str | Path,
    *,
    base: TensorSource,
    tuned: TensorSource,
    base_info: BaseInfo,
    variant: str,
    step: int,
    scale: Scale = "row",
    planes: int | Mapping[str, int] = 1,
    along_weight: float = 1.0,
    low_rank: int = 0,
    code: Code = "signs",
    direction_bits: float = 1.0,
    embedding: EmbeddingRule = "auto",
    embedding_max_relative_error: float = 0.75,
    matrix_max_relative_error: float | None = None,
    transposed: Collection[str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    sidecars: Iterable[str | Path] = (),
    card: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    on_tensor: Callable[[TensorRow], None] | None = None,
) -> ArtifactReport:
    """Export `tuned - base` to `folder`, published in one step. Peak memory is near the largest tensor, with
    `code="directions"` near the MOST_WORKERS largest and their factors.

    `tuned` is read once, in the order of `export_order(tuned)`. `planes`: of every matrix, or by name (1 where a name
    is absent; 0 drops a delta, and the matrix is then the base's). `direction_bits`: a weight of each matrix, with
    `code="directions"`. `provenance` is plain JSON data (merge
    history, training configuration, licence of the data). `sidecars` are tokenizer and chat-template files
    to copy. Raises DeltaError for tensors that do not fit, NaN, infinity or another base, and OutputError
    for a folder that exists or cannot be written; then nothing is left behind and an older artifact stays
    as it was.
    """
    options = ExportOptions(
        scale=scale,
        planes=planes,
        along_weight=along_weight,
        low_rank=low_rank,
        code=code,
        direction_bits=direction_bits,
        embedding=embedding,
        embedding_max_relative_error=embedding_max_relative_error,
        matrix_max_relative_error=matrix_max_relative_error,
        transposed=transposed,
    )
    folder, copies = Path(folder), check_sidecars(sidecars)
    pairs, tied = pair_tensors(base, tuned)
    quick_check(base, base_info.fingerprint, expected_label=base_info.label)
    draft = largest_entries(pairs, tied, options, base_info.model_type)
    config = DeltaConfig(
        variant=variant,
        step=step,
        base=base_info,
        tensors=draft,
        tied=base_info.tied,
        vocab_size=max((p.tuned.shape[0] for p in pairs if p.grown), default=base_info.vocab_size),
        provenance=dict(provenance or {}),
        files={path.name: file_digest(path) for path in copies},
        created_by={"package": "zen_train", "version": zen_train.__version__},
    )
    room_bytes = header_room_bytes(config)
    needed_bytes = upper_bytes(pairs, options) + 3 * room_bytes + sum(p.stat().st_size for p in copies)
    with new_folder(folder, overwrite=overwrite, needed_bytes=needed_bytes) as temporary:
        with ShardWriter(
            temporary, "delta", header_room_bytes=room_bytes, max_shard_bytes=max_shard_bytes
        ) as writer:
            export = _Export(base, tuned, base_info, options, writer, on_tensor, shared_bases(pairs))
            # Signs use all cores for one tensor; directions are eigenproblems, side by side.
            workers = min(MOST_WORKERS, torch.get_num_threads()) if code == "directions" else 1
            for pair, decision in in_order(export.decided, export.read(pairs), workers=workers):
                export.add(pair, decision, tied)
            entries = export.finished_entries()
            config = replace(
                config,
                tensors=entries,
                tied=variant_is_tied(entries, base_info),
                format_version=max(
                    (e.needs_version for e in entries.values()), default=config.format_version
                ),
            )
            document = config.to_json()
            writer.finish({METADATA_KEY: compact(document)})
        (temporary / CONFIG_NAME).write_text(readable(document), encoding="utf-8")
        for path in copies:
            shutil.copyfile(path, temporary / path.name)
        (temporary / CARD_NAME).write_text(
            card if card is not None else default_card(config), encoding="utf-8"
        )
        size_by_file = {path.name: path.stat().st_size for path in temporary.iterdir()}
    return summarise(
        folder,
        content_hash=config.content_hash,
        size_by_file=size_by_file,
        rows=export.rows,
        tuned_numel=sum(pair.tuned.numel for pair in pairs),
        covered_numel=sum(pair.tuned.numel for pair in pairs if pair.name in entries),
        delta_square=export.delta_square,
        error_square=export.error_square,
        noisy=export.noisy,
    )


def variant_is_tied(entries: Mapping[str, TensorEntry], base: BaseInfo) -> bool:
    """Whether head and embedding of the variant are one tensor: by its head entry, else as in the base."""
    heads = [entry for name, entry in entries.items() if roles.is_head(name) and name.endswith(".weight")]
    return any(entry.kind == "tied" for entry in heads) if heads else base.tied


class _Read(NamedTuple):
    """One parameter before it is coded."""

    pair: Pair
    base: torch.Tensor | None
    tuned: torch.Tensor
    twin: str  # the first parameter with these values, itself in most cases


@dataclass
class _Export:
    """The state of one export: what was decided so far."""

    base: TensorSource
    tuned: TensorSource
    base_info: BaseInfo
    options: ExportOptions
    writer: ShardWriter
    on_tensor: Callable[[TensorRow], None] | None
    shared_bases: Collection[str]
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    rows: list[TensorRow] = field(default_factory=list)
    noisy: dict[str, float] = field(default_factory=dict)
    delta_square: float = 0.0
    error_square: float = 0.0
    twin_digests: dict[str, str] = field(default_factory=dict)

    def read(self, pairs: Iterable[Pair]) -> Iterator[_Read]:
        """Each parameter's tensors, in order; no base for one that is a twin of another."""
        for pair in pairs:
            tuned = self.tuned.get(pair.name).cpu()
            twin = pair.name
            if pair.base_name in self.shared_bases:
                # The base ties two names to this tensor; equal copies in an untied tuned model are stored once.
                twin = self.twin_digests.setdefault(tensor_digest(tuned), pair.name)
            base = self.base.get(pair.base_name).cpu() if twin == pair.name else None
            yield _Read(pair, base, tuned, twin)

    def decided(self, read: _Read) -> tuple[Pair, Decision]:
        """How it is held, and its code. Called from several threads."""
        pair = read.pair
        if read.base is None:
            entry = replace(plain_entry(pair), kind="tied", base_tensor=None, target=read.twin)
            return pair, Decision(entry=entry, parts={})
        try:
            return pair, decide(pair, read.base, read.tuned, self.options, self.base_info.model_type)
        except DeltaError as error:
            raise DeltaError(
                f"{pair.name}: {error}. base: {self.base.label}; tuned: {self.tuned.label}"
            ) from error

    def add(self, pair: Pair, decision: Decision, tied: Mapping[str, str]) -> None:
        """Queue one parameter, and record the names tied to it."""
        self.delta_square += decision.delta_square
        self.error_square += decision.error_square
        self.noisy[pair.name] = decision.noisy_zeros
        for suffix, tensor in decision.parts.items():
            self.writer.add(f"{pair.name}.{suffix}", tensor)
        self._record(
            pair.name, decision.entry, sum(t.numel() * t.element_size() for t in decision.parts.values())
        )
        for alias in (name for name, stored in tied.items() if stored == pair.name):
            target = decision.entry.target or pair.name
            entry = TensorEntry(
                kind="tied", shape=pair.tuned.shape, dtype=decision.entry.dtype, target=target
            )
            self._record(alias, entry, 0)

    def finished_entries(self) -> dict[str, TensorEntry]:
        """All entries with the digests of what was written."""
        digests = self.writer.digests()
        return {
            name: replace(
                entry, parts={suffix: digests[f"{name}.{suffix}"] for suffix in entry.expected_parts()}
            )
            for name, entry in self.entries.items()
        }

    def _record(self, name: str, entry: TensorEntry, size_bytes: int) -> None:
        self.entries[name] = entry
        row = TensorRow(name, entry.kind, entry.shape, size_bytes, entry.zeros, entry.relative_error)
        self.rows.append(row)
        if self.on_tensor is not None:
            self.on_tensor(row)
