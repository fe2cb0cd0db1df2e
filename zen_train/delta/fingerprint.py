"""The identity of a base model: sha256 of every tensor's raw bytes, and one root over all of them.

A tensor's digest covers its bytes in the canonical dtype, row-major, little-endian. The root is the sha256
of the lines `NAME DTYPE SHAPE DIGEST\\n` (DTYPE as safetensors writes it, SHAPE as `[out,in]`), sorted by
NAME in UTF-8. So it does not depend on shards, on file layout or on the torch version (stanford_alpaca
#256: float sums did). A tied second name is not part of it.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from zen_train.delta.dtypes import ARITHMETIC_DTYPES, dtype_code
from zen_train.delta.shard_reader import TensorSpec
from zen_train.delta.sources import TensorSource
from zen_train.errors import DeltaError

_WORKERS = 2  # sha256 runs at about the speed of one NVMe drive per core; two keep up with two
_QUICK_TENSORS = 4
_QUICK_LIMIT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`root` in hex; `digests` and `specs` by tensor name."""

    root: str
    digests: Mapping[str, str]
    specs: Mapping[str, TensorSpec]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, row-major, without a copy when it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 of the raw bytes, in hex."""
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()


def root_of(digests: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> str:
    """The root over all tensors, in hex."""
    lines = []
    for name in sorted(digests, key=lambda n: n.encode()):
        shape = ",".join(map(str, specs[name].shape))
        lines.append(f"{name} {dtype_code(specs[name].dtype)} [{shape}] {digests[name]}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def fingerprint(source: TensorSource, *, dtype: torch.dtype | None = None) -> Fingerprint:
    """Read every tensor once and hash it, in the order of `source.names()`.

    `dtype`: the canonical dtype when the source holds its values wider (float32 masters of a bf16 base); a
    value that this cast would change raises DeltaError, because then the source is not that base.
    """
    specs = {name: source.spec(name) for name in source.names()}
    if dtype is not None:
        specs = {
            name: TensorSpec(dtype, spec.shape) if spec.dtype in ARITHMETIC_DTYPES else spec
            for name, spec in specs.items()
        }
    tensors = ((name, exact_cast(source.get(name), spec.dtype, name)) for name, spec in specs.items())
    digests = dict(_hash_ahead(tensors))
    return Fingerprint(root_of(digests, specs), digests, specs)


def exact_cast(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """The tensor in `dtype`; DeltaError when a value would change."""
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    if not torch.equal(cast.to(tensor.dtype), tensor):
        raise DeltaError(f"{name} holds {tensor.dtype} values that {dtype} cannot represent")
    return cast


def quick_check(
    source: TensorSource, expected: Fingerprint, *, expected_label: str = "the recorded base"
) -> None:
    """Names, shapes and dtypes of all tensors, and the digests of a few. Raises DeltaError naming both
    models.
    """
    _check_specs(source, expected, expected_label)
    by_size = sorted(expected.specs, key=lambda name: (expected.specs[name].size_bytes, name))
    small = [name for name in by_size if expected.specs[name].size_bytes <= _QUICK_LIMIT_BYTES] or by_size[:1]
    # Spread over sizes: norms are often equal between fine-tunes of one base, projections never are.
    step = max(1, (len(small) - 1) // max(_QUICK_TENSORS - 1, 1))
    _check_digests(source, expected, expected_label, dict.fromkeys([*small[::step], *small[-1:]]))


def full_check(
    source: TensorSource, expected: Fingerprint, *, expected_label: str = "the recorded base"
) -> None:
    """`quick_check`, then the digest of every tensor."""
    quick_check(source, expected, expected_label=expected_label)
    _check_digests(source, expected, expected_label, expected.specs)


def check_digest(
    source: TensorSource, name: str, tensor: torch.Tensor, expected: Fingerprint, expected_label: str
) -> None:
    """Compare one tensor, already read, with the fingerprint."""
    cast = _as_recorded(source, name, tensor, expected, expected_label)
    _compare(source, name, tensor_digest(cast), expected, expected_label)


def _check_specs(source: TensorSource, expected: Fingerprint, expected_label: str) -> None:
    names = set(source.names())
    both = _both(source, expected_label)
    missing = sorted(set(expected.specs) - names - set(source.aliases()))
    if missing:
        raise DeltaError(f"another base: tensor {missing[0]} ({len(missing)} in all) is missing. {both}")
    if extra := sorted(names - set(expected.specs)):
        raise DeltaError(f"another base: tensor {extra[0]} ({len(extra)} in all) is not part of it. {both}")
    for name, spec in expected.specs.items():
        found = source.spec(name)
        if found.shape != spec.shape:
            raise DeltaError(
                f"another base: {name} has shape {list(found.shape)}, expected {list(spec.shape)}. {both}"
            )
        wider = {found.dtype, spec.dtype} <= ARITHMETIC_DTYPES and found.dtype.itemsize > spec.dtype.itemsize
        if found.dtype != spec.dtype and not wider:
            raise DeltaError(f"another base: {name} is {found.dtype}, expected {spec.dtype}. {both}")


def _check_digests(
    source: TensorSource, expected: Fingerprint, expected_label: str, names: Iterable[str]
) -> None:
    tensors = (
        (name, _as_recorded(source, name, source.get(name), expected, expected_label)) for name in names
    )
    for name, found in _hash_ahead(tensors):
        _compare(source, name, found, expected, expected_label)


def _as_recorded(
    source: TensorSource, name: str, tensor: torch.Tensor, expected: Fingerprint, expected_label: str
) -> torch.Tensor:
    try:
        return exact_cast(tensor, expected.specs[name].dtype, name)
    except DeltaError as error:
        raise DeltaError(f"another base: {error}. {_both(source, expected_label)}") from error


def _compare(source: TensorSource, name: str, found: str, expected: Fingerprint, expected_label: str) -> None:
    if found != expected.digests[name]:
        raise DeltaError(
            f"another base: {name} has digest {found[:16]}, expected {expected.digests[name][:16]}. "
            f"{_both(source, expected_label)}"
        )


def _both(source: TensorSource, expected_label: str) -> str:
    return f"base given: {source.label}; base expected: {expected_label}"


def _hash_ahead(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, str]]:
    """Digests in order; hashing runs in threads (hashlib releases the interpreter lock), few tensors at a
    time.
    """
    with ThreadPoolExecutor(_WORKERS) as pool:
        waiting: deque[tuple[str, Future[str]]] = deque()
        for name, tensor in tensors:
            waiting.append((name, pool.submit(tensor_digest, tensor)))
            if len(waiting) > _WORKERS:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()
