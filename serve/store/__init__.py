"""The artifacts that are served: found under one root, checked, named; in host memory where that helps."""

from zen_train.serve.store.catalogue import Catalogue
from zen_train.serve.store.host import HostTier
from zen_train.serve.store.opening import open_delta
from zen_train.serve.store.paths import resolve_inside
from zen_train.serve.store.seen import Broken, Changes

__all__ = [
    "Broken",
    "Catalogue",
    "Changes",
    "HostTier",
    "open_delta",
    "resolve_inside",
]
