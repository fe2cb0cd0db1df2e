"""Match the tensors of a tuned model with those of its base, before anything is read or written.

Every stored tensor of both sides takes part in exactly one `Pair`; what does not fit is refused with both
shapes.
"""

from collections import Counter
from dataclasses import dataclass

from zen_train.delta import roles
from zen_train.delta.shard_reader import TensorSpec
from zen_train.delta.sources import TensorSource
from zen_train.errors import DeltaError


@dataclass(frozen=True, slots=True)
class Pair:
    """One parameter of the tuned model. `base_name` differs from `name` where only the tuned model is
    untied.
    """

    name: str
    base_name: str
    base: TensorSpec
    tuned: TensorSpec

    @property
    def grown(self) -> bool:
        """The vocabulary grew: the tuned tensor has more rows, the rest is equal."""
        return self.base.shape != self.tuned.shape


def export_order(tuned: TensorSource) -> list[str]:
    """The order in which an export reads the tuned tensors, each exactly once: heads last.

    Ranks that only help to gather sharded parameters follow the same list.
    """
    names = tuned.names()
    return [n for n in names if not roles.is_head(n)] + [n for n in names if roles.is_head(n)]


def pair_tensors(base: TensorSource, tuned: TensorSource) -> tuple[list[Pair], dict[str, str]]:
    """Pairs in export order, and the tied names of the variant `{name: stored name}`. Raises DeltaError."""
    base_names, base_aliases = set(base.names()), base.aliases()
    tuned_names, tuned_aliases = set(tuned.names()), tuned.aliases()
    both = f"base: {base.label}; tuned: {tuned.label}"
    missing = sorted(base_names - tuned_names - set(tuned_aliases))
    extra = sorted(tuned_names - base_names - set(base_aliases))
    if missing or extra:
        found = []
        if missing:
            found.append(f"{missing[0]} ({len(missing)} in all) is in the base and not in the tuned model")
        if extra:
            found.append(f"{extra[0]} ({len(extra)} in all) is in the tuned model and not in the base")
        raise DeltaError(f"the models have different tensors: {'; '.join(found)}. {both}")
    pairs = []
    for name in export_order(tuned):
        base_name = name if name in base_names else base_aliases[name]
        pair = Pair(name, base_name, base.spec(base_name), tuned.spec(name))
        if pair.grown and not _is_grown_vocabulary(pair):
            raise DeltaError(
                f"{name} has shape {list(pair.tuned.shape)} in the tuned model and {list(pair.base.shape)} "
                f"in the base; only a vocabulary may grow. {both}"
            )
        pairs.append(pair)
    tied = {alias: stored for alias, stored in tuned_aliases.items() if stored in tuned_names}
    # A tuned model that lists each parameter once does not name the head that the base ties to its embedding.
    for alias, stored in base_aliases.items():
        if alias not in tuned_names and stored in tuned_names:
            tied.setdefault(alias, stored)
    return pairs, tied


def shared_bases(pairs: list[Pair]) -> set[str]:
    """Base tensors on which more than one tuned tensor builds: the base ties what the tuned model unties."""
    counts = Counter(pair.base_name for pair in pairs)
    return {name for name, count in counts.items() if count > 1}


def _is_grown_vocabulary(pair: Pair) -> bool:
    base, tuned = pair.base.shape, pair.tuned.shape
    vocabulary = roles.is_embedding(pair.name) or roles.is_head(pair.name)
    return vocabulary and len(base) == len(tuned) > 0 and base[1:] == tuned[1:] and 0 < base[0] < tuned[0]
