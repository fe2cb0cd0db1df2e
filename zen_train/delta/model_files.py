"""The files beside the weights of an applied variant: model configuration, tokenizer, chat template,
licence.
"""

import hashlib
import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from zen_train.delta.artifact import DeltaArtifact
from zen_train.delta.shard_reader import contained_file
from zen_train.delta.strict_json import parse_object
from zen_train.errors import DeltaError

# One set: files of two tokenizers must never be mixed.
_TOKENIZER_PATTERNS = (
    "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "*.model",
)  # fmt: skip
_OTHER_PATTERNS = ("generation_config.json", "LICENSE*", "NOTICE*", "*.py")


def is_tokenizer_file(name: str) -> bool:
    """True for files of a tokenizer or its chat template."""
    return _matches(name, _TOKENIZER_PATTERNS)


def read_sidecar(artifact: DeltaArtifact, name: str) -> bytes:
    """A sidecar file of the artifact, its digest checked."""
    path = contained_file(artifact.folder, name, str(artifact.folder))
    content = path.read_bytes()
    expected, found = artifact.config.files[name], hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DeltaError(
            f"{path} has digest {found[:16]}, expected {expected[:16]}; the file was changed, fetch it again"
        )
    return content


def copy_side_files(artifact: DeltaArtifact, base_folder: Path, out_folder: Path) -> None:
    """The artifact's sidecars, then what they leave open from the base folder."""
    names = set(artifact.config.files)
    for name in sorted(names):
        (out_folder / name).write_bytes(read_sidecar(artifact, name))
    patterns = (
        _OTHER_PATTERNS if any(map(is_tokenizer_file, names)) else _TOKENIZER_PATTERNS + _OTHER_PATTERNS
    )
    for path in sorted(base_folder.iterdir()):
        if path.is_file() and path.name not in names and _matches(path.name, patterns):
            shutil.copyfile(contained_file(base_folder, path.name, str(base_folder)), out_folder / path.name)


def write_model_config(base_config: dict[str, Any], artifact: DeltaArtifact, dtype: str, path: Path) -> None:
    """`config.json` of the variant: its own where the artifact carries one, else the base's, with
    vocabulary size, tying and dtype as they are now.
    """
    carried = artifact.config.files.get("config.json")
    config = (
        parse_object(read_sidecar(artifact, "config.json"), str(path), constants=True)
        if carried
        else dict(base_config)
    )
    settings = {"vocab_size": artifact.config.vocab_size, "tie_word_embeddings": artifact.config.tied}
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        text_config = dict(text_config)
        config["text_config"] = text_config | {
            key: value for key, value in settings.items() if key in text_config
        }
        settings = {key: value for key, value in settings.items() if key in config}
    config |= settings
    if dtype != "auto":
        for level in (config, config.get("text_config")):
            for key in ("dtype", "torch_dtype"):
                if isinstance(level, dict) and key in level:
                    level[key] = dtype
        if "torch_dtype" not in config:
            config["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
