"""The errors a caller can cause. Every message names the thing, the value got, what is allowed, and the remedy.

`ZenTrainError` is a `ValueError`: programs that embed zen_train catch one type, and the command line
prints the message without a traceback. A broken invariant of our own is an `assert`, never one of these.
"""


class ZenTrainError(ValueError):
    """A request that cannot be carried out as given."""


class ConfigError(ZenTrainError):
    """A configuration key or value that the schema refuses."""


class BaseModelError(ZenTrainError):
    """A base model that is missing, incomplete or not the one expected."""


class DataError(ZenTrainError):
    """A record, file or corpus that cannot be trained on."""


class DeltaError(ZenTrainError):
    """A delta artifact that is damaged, unsafe, or belongs to another base."""


class MergeError(ZenTrainError):
    """Checkpoints that cannot be merged."""


class OutputError(ZenTrainError):
    """An output folder that cannot be written as asked."""


class TrainingError(ZenTrainError):
    """A run that had to stop: a loss that is not finite, a disk that is full."""
