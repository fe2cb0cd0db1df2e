"""Where tensors come from: a folder of safetensors, or a state dict in memory. One tensor at a time.

Contract of `TensorSource`: `names()` lists each stored tensor once; a second name for the same storage (a
tied head) is in `aliases()` only, and `get` and `spec` accept either. Nothing here imports
torch.distributed: sharded parameters are wrapped by the caller in `LazyTensor`, whose `load` gathers one of
them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from zen_train.delta import roles
from zen_train.delta.shard_reader import TensorSpec, open_shards
from zen_train.delta.strict_json import parse_object
from zen_train.errors import DeltaError


class TensorSource(Protocol):
    """Named tensors of one model, read one at a time."""

    @property
    def label(self) -> str:
        """How error messages call this model."""
        ...

    def names(self) -> list[str]:
        """Stored tensors, each once, in reading order."""
        ...

    def aliases(self) -> dict[str, str]:
        """Second names of stored tensors: `{alias: stored name}`."""
        ...

    def spec(self, name: str) -> TensorSpec: ...

    def get(self, name: str) -> torch.Tensor: ...


class FolderSource:
    """A Hugging Face model folder: `model.safetensors`, or shards with an index. Pickle files are never read.

    A head that the configuration ties to the embedding is an alias, whether or not the folder also stores a
    copy of it (a stored copy that differs is a tensor of its own).
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        shards = open_shards(self.folder, "model")
        self._home = {name: shard for shard in shards for name in shard.names()}
        config_path = self.folder / "config.json"
        self.config: dict[str, Any] = (
            parse_object(config_path.read_bytes(), str(config_path), constants=True)
            if config_path.exists()
            else {}
        )
        self._aliases = self._find_tied()

    @property
    def label(self) -> str:
        return str(self.folder)

    def names(self) -> list[str]:
        return [name for name in self._home if name not in self._aliases]

    def aliases(self) -> dict[str, str]:
        return dict(self._aliases)

    def spec(self, name: str) -> TensorSpec:
        stored = self._stored_name(name)
        return self._home[stored].spec(stored)

    def get(self, name: str) -> torch.Tensor:
        stored = self._stored_name(name)
        return self._home[stored].get(stored)

    def _stored_name(self, name: str) -> str:
        stored = self._aliases.get(name, name)
        if stored not in self._home:
            raise DeltaError(f"{self.label} has no tensor {name}")
        return stored

    def _find_tied(self) -> dict[str, str]:
        embeddings = [name for name in self._home if roles.is_embedding(name)]
        heads = [name for name in self._home if roles.is_head(name) and name.endswith(".weight")]
        text_config = self.config.get("text_config")
        tied = self.config.get("tie_word_embeddings")
        if tied is None and isinstance(text_config, dict):
            tied = text_config.get("tie_word_embeddings")
        if len(embeddings) != 1 or len(heads) > 1 or tied is False:
            return {}
        embedding = embeddings[0]
        if not heads:
            architectures = self.config.get("architectures") or ["ForCausalLM"]
            has_head = any(
                str(a).endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
                for a in architectures
            )
            return {roles.default_head_name(self.config.get("model_type")): embedding} if has_head else {}
        head = heads[0]
        a, b = self._home[embedding], self._home[head]
        same = tied and a.spec(embedding) == b.spec(head) and torch.equal(a.get(embedding), b.get(head))
        return {head: embedding} if same else {}


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is made when asked for, such as a sharded parameter that `load` gathers."""

    spec: TensorSpec
    load: Callable[[], torch.Tensor]


LazyValue = torch.Tensor | LazyTensor | Callable[[], torch.Tensor]


def uncompiled(name: str) -> str:
    """A parameter's name as it is without `torch.compile`, which puts `_orig_mod.` where it wraps a module."""
    return name.replace("_orig_mod.", "")


class StateDictSource:
    """A state dict. `_orig_mod.` (torch.compile) leaves its names; entries that share storage are stored
    once.

    The first name of a shared storage, in the order of the mapping, is the stored one. A value may be a
    callable that makes the tensor: it is called anew by every `get`, and once more for its spec unless it
    is a `LazyTensor`. `tied` adds aliases that cannot be seen from storage.
    """

    def __init__(
        self,
        mapping: Mapping[str, LazyValue],
        *,
        label: str = "the model in memory",
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self._label = label
        self._values: dict[str, LazyValue] = {}
        self._specs: dict[str, TensorSpec] = {}  # of plain callables, once they were called
        self._aliases: dict[str, str] = {}
        by_storage: dict[tuple[Any, ...], str] = {}
        for raw_name, value in mapping.items():
            name = uncompiled(raw_name)
            if name in self._values or name in self._aliases:
                raise DeltaError(f"{label}: two entries are called {name} once `_orig_mod.` is removed")
            if tied and name in tied:
                self._aliases[name] = tied[name]
                continue
            if isinstance(value, torch.Tensor):
                first = by_storage.setdefault(_storage_key(value, f"{label}: {name}"), name)
                if first != name and value.numel():
                    self._aliases[name] = first
                    continue
            elif not isinstance(value, LazyTensor) and not callable(value):
                raise DeltaError(
                    f"{label}: {name} is a {type(value).__name__}; expected a tensor or a callable"
                )
            self._values[name] = value
        for alias, stored in (tied or {}).items():
            if stored not in self._values:
                raise DeltaError(f"{label}: {alias} is tied to {stored}, which does not exist")
            self._aliases[alias] = stored

    @property
    def label(self) -> str:
        return self._label

    def names(self) -> list[str]:
        return list(self._values)

    def aliases(self) -> dict[str, str]:
        return dict(self._aliases)

    def spec(self, name: str) -> TensorSpec:
        value = self._value(name)
        if isinstance(value, LazyTensor):
            return value.spec
        if isinstance(value, torch.Tensor):
            return _spec_of(value)
        if name not in self._specs:
            self.get(name)
        return self._specs[name]

    def get(self, name: str) -> torch.Tensor:
        value = self._value(name)
        if isinstance(value, torch.Tensor):
            return value.detach()
        made = (value.load if isinstance(value, LazyTensor) else value)().detach()
        found = _spec_of(made)
        announced = value.spec if isinstance(value, LazyTensor) else self._specs.setdefault(name, found)
        if found != announced:
            raise DeltaError(
                f"{self.label}: {name} was announced as {announced.dtype} {list(announced.shape)}, "
                f"loaded as {found.dtype} {list(found.shape)}"
            )
        return made

    def _value(self, name: str) -> LazyValue:
        stored = self._aliases.get(name, name)
        if stored not in self._values:
            raise DeltaError(f"{self.label} has no tensor {name}")
        return self._values[stored]


def _storage_key(tensor: torch.Tensor, where: str) -> tuple[Any, ...]:
    """Equal for two tensors that are views of the same memory."""
    if hasattr(tensor, "full_tensor"):
        raise DeltaError(f"{where} is sharded; wrap it in LazyTensor with a load that gathers it")
    if tensor.is_meta:
        raise DeltaError(f"{where} is on the meta device and has no values; load the model first")
    start = tensor.untyped_storage().data_ptr()
    return (tensor.device, start, tensor.storage_offset(), tensor.shape, tensor.stride())


def _spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tensor.dtype, tuple(tensor.shape))
