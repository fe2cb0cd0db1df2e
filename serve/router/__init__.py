"""Who waits, who runs, whose weights are on the device; the rules are in this folder's README."""

from zen_train.serve.router.config import RouterConfig
from zen_train.serve.router.metrics import NoMetrics, RouterMetrics
from zen_train.serve.router.names import Changes
from zen_train.serve.router.request import RoutedRequest
from zen_train.serve.router.router import Loaded, Router
from zen_train.serve.router.snapshot import RouterSnapshot, VariantView
from zen_train.serve.router.ticket import Ticket

__all__ = [
    "Changes",
    "Loaded",
    "NoMetrics",
    "RoutedRequest",
    "Router",
    "RouterConfig",
    "RouterMetrics",
    "RouterSnapshot",
    "Ticket",
    "VariantView",
]
