"""One-bit deltas: what a fine-tuned model adds to its base, as a folder that can be verified and applied.

`write_artifact` makes it, `DeltaArtifact` reads it, `verify_artifact` checks it, `apply_delta` and
`iter_applied` put base and delta together. The format is specified in FORMAT.md beside this file. Nothing
here imports transformers, Lightning, Hydra or torch.distributed.
"""

from zen_train.delta.apply import ApplyReport, apply_delta, iter_applied
from zen_train.delta.artifact import DeltaArtifact
from zen_train.delta.card import default_card, replace_card
from zen_train.delta.codec import EncodedTensor, Plane, decode, encode
from zen_train.delta.fingerprint import Fingerprint, fingerprint, full_check, quick_check, tensor_digest
from zen_train.delta.manifest import BaseInfo, DeltaConfig, TensorEntry
from zen_train.delta.pairing import export_order
from zen_train.delta.publish import new_folder, replace_file
from zen_train.delta.report import ArtifactReport, TensorRow
from zen_train.delta.rows import SignPack, pack_bits, sign_pack_rows, unpack_bits
from zen_train.delta.shard_reader import TensorSpec
from zen_train.delta.sidecars import sidecars_in
from zen_train.delta.sources import FolderSource, LazyTensor, StateDictSource, TensorSource
from zen_train.delta.verify import VerifyReport, verify_artifact
from zen_train.delta.writer import write_artifact

__all__ = [
    "ApplyReport",
    "ArtifactReport",
    "BaseInfo",
    "DeltaArtifact",
    "DeltaConfig",
    "EncodedTensor",
    "Fingerprint",
    "FolderSource",
    "LazyTensor",
    "Plane",
    "SignPack",
    "StateDictSource",
    "TensorEntry",
    "TensorRow",
    "TensorSource",
    "TensorSpec",
    "VerifyReport",
    "apply_delta",
    "decode",
    "default_card",
    "encode",
    "export_order",
    "fingerprint",
    "full_check",
    "iter_applied",
    "new_folder",
    "pack_bits",
    "quick_check",
    "replace_card",
    "replace_file",
    "sidecars_in",
    "sign_pack_rows",
    "tensor_digest",
    "unpack_bits",
    "verify_artifact",
    "write_artifact",
]
