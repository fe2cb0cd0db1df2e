"""Which variants stay on a tier: a byte budget, and the policy that decides what has to make room."""

from zen_train.serve.cache.config import PolicyConfig
from zen_train.serve.cache.plans import CacheSnapshot, EntryView, Hit, Join, Plan, Start, TooLarge, Wait
from zen_train.serve.cache.policy import TierCache

__all__ = [
    "CacheSnapshot",
    "EntryView",
    "Hit",
    "Join",
    "Plan",
    "PolicyConfig",
    "Start",
    "TierCache",
    "TooLarge",
    "Wait",
]
