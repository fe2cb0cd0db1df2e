"""Open a delta artifact for reading: memory-mapped, checked against its own description, no base needed.

Opening checks the configuration, the shard headers and that exactly the described tensors are there. Values
are checked when they are used: `alpha` and `planes` refuse NaN, infinity, negative scales and set padding
bits; `part(..., check_digest=True)` also compares the digest. `verify_artifact` does all of it for every
tensor.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from zen_train.delta.codec import Plane, add_delta, check_planes, matrix_shape, measure
from zen_train.delta.directions_parts import Directions, check_directions, directions_product
from zen_train.delta.dtypes import ARITHMETIC_DTYPES, dtype_code
from zen_train.delta.fingerprint import tensor_digest
from zen_train.delta.low_rank import shifted
from zen_train.delta.manifest import CONFIG_NAME, METADATA_KEY, DeltaConfig, TensorEntry, part_name
from zen_train.delta.manifest_reader import parse_config
from zen_train.delta.report import TensorRow
from zen_train.delta.rows import all_finite, square_distance
from zen_train.delta.shard_reader import PICKLE_SUFFIXES, SafetensorsFile, contained_file, open_shards
from zen_train.delta.strict_json import parse_object
from zen_train.errors import DeltaError

_OPEN_ATTEMPTS = 20


class DeltaArtifact:
    """An artifact on disk. All shards are mapped at once, so that a later re-export leaves this reader
    unharmed.
    """

    def __init__(self, folder: Path, config: DeltaConfig, shards: list[SafetensorsFile]) -> None:
        self.folder = folder
        self.config = config
        self.content_hash = config.content_hash
        self.shards = tuple(shards)
        self._home = {name: shard for shard in shards for name in shard.names()}

    @classmethod
    def open(cls, folder: str | Path) -> "DeltaArtifact":
        """Map and check a folder. Raises DeltaError for anything FORMAT.md forbids a reader to accept."""
        folder = Path(folder)
        for _ in range(_OPEN_ATTEMPTS):
            before = _folder_identity(folder)
            try:
                artifact = cls._open_once(folder)
            except DeltaError:
                if _folder_identity(folder) == before:
                    raise
            else:
                if _folder_identity(folder) == before:
                    return artifact
        raise DeltaError(
            f"{folder} was replaced {_OPEN_ATTEMPTS} times while it was being opened; try again later"
        )

    @classmethod
    def _open_once(cls, folder: Path) -> "DeltaArtifact":
        if not (folder / CONFIG_NAME).exists():
            raise DeltaError(f"{folder} has no {CONFIG_NAME}; it is no delta artifact")
        config_path = contained_file(folder, CONFIG_NAME, str(folder))
        document = parse_object(config_path.read_bytes(), str(config_path))
        config = parse_config(document, str(config_path))
        _refuse_pickles(folder)
        shards = open_shards(folder, "delta")
        copies = [shard.metadata[METADATA_KEY] for shard in shards if METADATA_KEY in shard.metadata]
        if len(copies) != 1 or parse_object(copies[0].encode(), f"{shards[0].path}: metadata") != document:
            raise DeltaError(
                f"{folder}: {CONFIG_NAME} and the copy in the safetensors metadata differ; "
                "the files belong to different exports or were changed, fetch the folder again"
            )
        artifact = cls(folder, config, shards)
        artifact._check_stored()
        return artifact

    def entry(self, name: str) -> TensorEntry:
        """How `name` is held; a tied name gives the entry it is tied to."""
        return self.config.tensors[self.resolve(name)]

    def resolve(self, name: str) -> str:
        """The parameter that holds the values of `name`: itself, or the target of a tied name."""
        entry = self.config.tensors.get(name)
        if entry is None:
            raise DeltaError(f"{self.folder}: the delta has no parameter {name}")
        return entry.target or name

    def base_name(self, name: str) -> str:
        """The base tensor that `name` is built on."""
        return self.entry(name).base_tensor or self.resolve(name)

    def part(self, name: str, suffix: str, *, check_digest: bool = False) -> torch.Tensor:
        """The stored tensor `NAME.SUFFIX`, memory-mapped, with the digest compared on demand."""
        stored = f"{self.resolve(name)}.{suffix}"
        if stored not in self._home:
            raise DeltaError(
                f"{self.folder}: {name} is held as {self.entry(name).kind} and has no part {suffix!r}"
            )
        tensor = self._home[stored].get(stored)
        if check_digest:
            expected, found = self.entry(name).parts[suffix], tensor_digest(tensor)
            if found != expected:
                raise DeltaError(
                    f"{self.folder}: {stored} has digest {found[:16]}, expected {expected[:16]}; "
                    "the file is damaged, fetch it again"
                )
        return tensor

    def planes(self, name: str, *, check_digest: bool = False) -> tuple[Plane, ...]:
        """The bit planes of a packed parameter (empty where nothing is packed), with values and padding
        checked.
        """
        entry = self.entry(name)
        planes = tuple(
            Plane(
                self.part(name, part_name("sign", number), check_digest=check_digest),
                self.part(name, part_name("alpha", number), check_digest=check_digest),
            )
            for number in range(entry.planes)
        )
        if planes:
            try:
                check_planes(planes, entry.packed_shape(), transposed=entry.transposed)
            except DeltaError as error:
                raise DeltaError(f"{self.folder}: {name}: {error}") from error
        return planes

    def direction_parts(self, name: str, *, check_digest: bool = False) -> Directions:
        """Coded directions as they are stored, with values and padding checked."""
        entry = self.entry(name)

        right, left, scales = (
            self.part(name, what, check_digest=check_digest) for what in ("right", "left", "scales")
        )
        parts = Directions(right, left, scales, entry.directions)
        try:
            check_directions(parts, matrix_shape(entry.shape, entry.transposed)[-1])
        except DeltaError as error:
            raise DeltaError(f"{self.folder}: {name}: {error}") from error
        return parts

    def directions(self, name: str, *, check_digest: bool = False) -> torch.Tensor:
        """What coded directions add, float32 in the stored shape."""
        entry, parts = self.entry(name), self.direction_parts(name, check_digest=check_digest)
        product = directions_product(parts, matrix_shape(entry.shape, entry.transposed)[-1])
        return product.mT.contiguous() if entry.transposed else product

    def shifted_base(self, name: str, base: torch.Tensor, *, check_digest: bool = False) -> torch.Tensor:
        """What the signs of a parameter are added to: `base`, or in float32 base plus a product of factors."""
        entry = self.entry(name)
        if entry.directions:
            return self.directions(name, check_digest=check_digest) + base.to(torch.float32)
        if not entry.rank:
            return base
        u, v = (self.whole(name, suffix, check_digest=check_digest) for suffix in ("u", "v"))
        return shifted(base, u, v, transposed=entry.transposed)

    def squares(
        self, name: str, base: torch.Tensor, tuned: torch.Tensor, planes: Sequence[Plane] | None = None
    ) -> tuple[float, float]:
        """(||D||^2, ||D - D_hat||^2) of a packed parameter, `D = tuned - base`, element by element from the bits.

        `planes`: other ones than those that are stored.
        """
        entry = self.entry(name)
        if entry.directions:
            delta = tuned.to(torch.float32) - base.to(torch.float32)
            return square_distance(tuned, base), square_distance(delta, self.directions(name))
        from_base = self.shifted_base(name, base)
        coded, left = measure(from_base, tuned, planes or self.planes(name), transposed=entry.transposed)
        # What was coded is the whole delta, unless a low-rank part holds some of it.
        return square_distance(tuned, base) if entry.rank else coded, left

    def delta(self, name: str) -> torch.Tensor:
        """The float32 delta of a parameter of kind sign, directions, rows or same, in the stored shape of the base
        tensor.

        A dense parameter replaces the base tensor, so it has no delta of its own: see `iter_applied`.
        """
        entry = self.entry(name)
        if entry.kind == "dense":
            raise DeltaError(
                f"{self.folder}: {name} is stored whole (dense); it has no delta, use iter_applied"
            )
        planes = self.planes(name)
        shape = entry.packed_shape()
        nothing = torch.zeros(shape)
        if not planes:
            return self.shifted_base(name, nothing)
        return add_delta(self.shifted_base(name, nothing), planes, transposed=entry.transposed)

    def whole(self, name: str, suffix: str, *, check_digest: bool = False) -> torch.Tensor:
        """The `dense` or `rows` part of a parameter, refused when a value is not finite."""
        tensor = self.part(name, suffix, check_digest=check_digest)
        if tensor.dtype in ARITHMETIC_DTYPES and not all_finite(tensor):
            raise DeltaError(
                f"{self.folder}: {name}.{suffix} holds NaN or infinite values; the data is damaged"
            )
        return tensor

    def tensor_report(self) -> list[TensorRow]:
        """One row for each parameter, in the order of the configuration."""
        rows = []
        for name, entry in self.config.tensors.items():
            sizes = [
                self._home[f"{name}.{suffix}"].spec(f"{name}.{suffix}").size_bytes for suffix in entry.parts
            ]
            rows.append(
                TensorRow(name, entry.kind, entry.shape, sum(sizes), entry.zeros, entry.relative_error)
            )
        return rows

    def _check_stored(self) -> None:
        described = {
            f"{name}.{suffix}": expected
            for name, entry in self.config.tensors.items()
            for suffix, expected in entry.expected_parts().items()
        }
        if missing := sorted(set(described) - set(self._home)):
            raise DeltaError(
                f"{self.folder}: tensor {missing[0]} ({len(missing)} in all) is described but not stored"
            )
        if extra := sorted(set(self._home) - set(described)):
            raise DeltaError(
                f"{self.folder}: tensor {extra[0]} ({len(extra)} in all) is stored but not described"
            )
        for stored, (code, shape) in described.items():
            spec = self._home[stored].spec(stored)
            found = dtype_code(spec.dtype)
            if spec.shape != shape or code not in (None, found):
                raise DeltaError(
                    f"{self.folder}: {stored} is {found} {list(spec.shape)}, "
                    f"expected {code or 'any'} {list(shape)}"
                )


def _folder_identity(folder: Path) -> tuple[int, int]:
    """Changes when another folder takes this name: a re-export while files are being opened."""
    if not folder.is_dir():
        raise DeltaError(f"{folder} is not a folder; give the folder of a delta artifact")
    status = folder.stat()
    return status.st_ino, status.st_ctime_ns


def _refuse_pickles(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLE_SUFFIXES:
            raise DeltaError(
                f"{folder} holds {path.name}, which may be a pickle; an artifact holds none, remove it"
            )
