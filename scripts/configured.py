"""The configuration of a training run, composed as the command line does, for scripts that need its base or data."""

from __future__ import annotations

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from zen_train.config import RunConfig


def configured(*words: str, variant: str = "coder") -> RunConfig:
    """What `python -m zen_train +variant=VARIANT WORDS` would run."""
    with initialize_config_module(version_base=None, config_module="zen_train.conf"):
        composed = compose("config", [f"+variant={variant}", *words])
    plain = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(plain, dict)
    plain.pop("hydra", None)
    return RunConfig.model_validate(plain)
