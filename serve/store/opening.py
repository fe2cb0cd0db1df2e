"""Open an artifact to serve it: the errors of serving, the expected weights, the base that is served.

Opening reads descriptions and headers (about 20 ms for 270 tensors) and no tensor. Digests are compared
by who reads the tensors, the first time.
"""

from __future__ import annotations

from pathlib import Path

from zen_train.delta import BaseInfo, DeltaArtifact, Fingerprint
from zen_train.delta.dtypes import dtype_code
from zen_train.errors import DeltaError
from zen_train.serve.errors import VariantUnusableError


def open_delta(folder: Path, expected_hash: str | None = None) -> DeltaArtifact:
    """The artifact in `folder`.

    Raises:
        VariantUnusableError: it vanished, is damaged, or (with `expected_hash`) holds other weights by now.
    """
    try:
        artifact = DeltaArtifact.open(folder)
    except DeltaError as error:
        raise VariantUnusableError(f"the variant in {folder} cannot be served: {error}") from error
    except OSError as error:
        raise VariantUnusableError(
            f"the variant in {folder} cannot be read: {error.strerror or error}"
        ) from error
    if expected_hash is not None and artifact.content_hash != expected_hash:
        raise VariantUnusableError(
            f"{folder} was replaced: it holds the weights {artifact.content_hash[:16]}, expected {expected_hash[:16]}; "
            "ask for the variant again"
        )
    return artifact


def why_unusable(artifact: DeltaArtifact, served: Fingerprint | None, served_label: str) -> str | None:
    """None: it can be served on that base. `served` None: any base will do."""
    config = artifact.config
    if served is not None and config.base.fingerprint.root != served.root:
        return (
            f"{artifact.folder} belongs to another base: it was made from {config.base.label}, and {served_label} "
            f"(fingerprint {served.root[:16]}) is served; {first_difference(config.base, served)}. "
            "Serve that base, or train the variant on this one"
        )
    if all(entry.kind in ("same", "tied") for entry in config.tensors.values()):
        return (
            f"{artifact.folder} changes no tensor of its base; under its name the base would answer. "
            "Serve the base, or export a variant that was trained"
        )
    return None


def first_difference(made_from: BaseInfo, served: Fingerprint) -> str:
    """One sentence: where two bases differ."""
    wanted = made_from.fingerprint
    if missing := sorted(wanted.specs.keys() - served.specs.keys()):
        return f"the served base has no tensor {missing[0]} ({len(missing)} in all)"
    if extra := sorted(served.specs.keys() - wanted.specs.keys()):
        return f"the served base has a tensor more, {extra[0]} ({len(extra)} in all)"
    for name, spec in wanted.specs.items():
        found = served.specs[name]
        if found != spec:
            expected_form = f"{dtype_code(spec.dtype)} {list(spec.shape)}"
            return f"{name} is {expected_form} there and {dtype_code(found.dtype)} {list(found.shape)} here"
    changed = [name for name, digest in wanted.digests.items() if served.digests[name] != digest]
    return f"{len(changed)} of {len(wanted.digests)} tensors hold other values, {changed[0]} among them"
