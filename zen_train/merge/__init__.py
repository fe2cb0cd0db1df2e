"""Merging checkpoints of one base model, tensor by tensor (formulas and timings: `README.md` in this folder).

Contract: tensors in, tensors out. `merge_tensor` takes one parameter of the base model and the same
parameter of one or more checkpoints, ordered oldest to newest, and returns the merged parameter with what is
worth logging; `merge_tensors` does it for many, on several cores. Equal inputs, seed and thread counts give
equal bits on one machine, and the global random state is neither read nor moved.

What it does not do: decide when to merge, walk over a model, gather shards, talk to other ranks, write into
a parameter. That is the merge callback's work.
"""

from zen_train.merge.factorise import SVDResult, svd
from zen_train.merge.many import merge_tensors
from zen_train.merge.result import TensorMerge
from zen_train.merge.rules import RULES, MergeRule, mean, merge_tensor, monosoup, svd_average
from zen_train.merge.shrinkage import Shrinkage, monosoup_shrinkage

__all__ = [
    "RULES",
    "MergeRule",
    "SVDResult",
    "Shrinkage",
    "TensorMerge",
    "mean",
    "merge_tensor",
    "merge_tensors",
    "monosoup",
    "monosoup_shrinkage",
    "svd",
    "svd_average",
]
