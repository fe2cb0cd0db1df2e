"""What the server may be told: the typed schema of `conf/serve/`, and how `key=value` words become it.

Hydra composes the files as it does for training, so that `base=hf base.path=FOLDER` means the same. Unknown
keys are refused with the nearest that exists. Nothing after `read_config` sees an OmegaConf node.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from zen_train.config import BaseSection
from zen_train.errors import ConfigError
from zen_train.overrides import config_groups, schema_keys
from zen_train.serve.engine.config import EngineConfig
from zen_train.serve.router.config import RouterConfig

KEYS_VARIABLE, ADMIN_KEYS_VARIABLE = "ZEN_SERVE_API_KEYS", "ZEN_SERVE_ADMIN_KEYS"

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LimitsConfig(_Section):
    """What one request, and all of them together, may take."""

    max_body_bytes: Positive = Field(2 << 20, description="of one request, declared or not")
    max_header_bytes: Positive = Field(32 << 10, description="request line and headers")
    max_prompt_tokens: Positive | None = Field(None, description="None: what the context holds")
    max_output_tokens: Positive | None = Field(
        None, description="of one sequence; None: what the context holds"
    )
    max_choices: Positive = Field(64, description="sequences of one request: prompts times n")
    max_requests: Positive = Field(1024, description="requests being answered; one more gets 503")
    max_connections: Positive = Field(2048, description="open connections; one more is closed with 503")
    header_timeout_s: Seconds = Field(10.0, description="for a connection to send its request's headers")
    body_timeout_s: Seconds = Field(30.0, description="for a request to send its body")
    write_timeout_s: Seconds = Field(60.0, description="how long a client may take nothing of its answer")
    keep_alive_s: Positive = Field(30, description="how long an idle connection stays open")


class ServeConfig(_Section):
    """One server, complete."""

    base: BaseSection
    base_name: Annotated[str, Field(pattern=r"^[\w.@:/-]{1,128}$")] | None = Field(
        None, description="the name the base is asked by; None: the base's own"
    )
    variants: str = Field("outputs", description="the folder that holds the exported deltas")
    name_prefix: Annotated[str, Field(pattern=r"^[\w.-]{0,64}$")] = Field(
        "zen4-", description="before a variant's name: zen4-coder"
    )
    pin: list[str] = Field([], description="names that never leave the device")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="0: any free one")
    drain_s: Seconds = Field(30.0, description="how long running requests may go on after SIGTERM")
    rescan_s: Seconds | None = Field(
        5.0, description="how often the folder is looked at; None: only on request"
    )
    api_keys: list[SecretStr] = Field(
        [], strict=False, description=f"or {KEYS_VARIABLE}, comma separated; none: open"
    )
    admin_keys: list[SecretStr] = Field(
        [],
        strict=False,
        description=f"or {ADMIN_KEYS_VARIABLE}: needed to load, unload and pin; none: any key will do",
    )
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    limits: LimitsConfig = LimitsConfig()


def read_config(words: Sequence[str], *, environment: Mapping[str, str] | None = None) -> ServeConfig:
    """The configuration of a command line such as `["base=tiny", "port=0", "engine.slots=8"]`.

    `base=FOLDER` (with a slash, or an existing folder) is short for `base=hf base.path=FOLDER`.

    Raises:
        ConfigError: a word that cannot be read, an unknown key or choice, a value out of bounds.
    """
    composed = _compose(_checked(words))
    for variable, key in ((KEYS_VARIABLE, "api_keys"), (ADMIN_KEYS_VARIABLE, "admin_keys")):
        listed = (os.environ if environment is None else environment).get(variable, "").split(",")
        given = composed.get(key, [])
        given = given if isinstance(given, list) else [given]
        composed[key] = [*given, *(part.strip() for part in listed if part.strip())]
    try:
        return ServeConfig.model_validate(composed)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(problem) for problem in error.errors())) from None


def _checked(words: Sequence[str]) -> list[str]:
    keys = [key for key in schema_keys(ServeConfig) if key != "base"]
    bases = config_groups()["base"]
    checked = []
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lstrip("+")
        if not equals:
            raise ConfigError(
                f"cannot read {word!r}: write key=value, for instance port=8001 (--help lists the rest)"
            )
        if key == "base" and (
            "/" in value or os.sep in value or (value not in bases and Path(value).is_dir())
        ):
            quoted = value.replace("'", "\\'")
            checked += ["base=hf", f"base.path='{quoted}'"]
        elif key == "base" and value not in bases:
            raise ConfigError(
                f"base={value} does not exist.{_nearest(value, bases)} Choices: {', '.join(bases)}, or a folder."
            )
        elif key != "base" and key not in keys:
            raise ConfigError(f"unknown setting {key!r} in {word!r}.{_nearest(key, keys)}")
        else:
            checked.append(
                word if key == "base" else f"++{key}={value}"
            )  # known, whether or not the file has it
    return checked


def _compose(words: Sequence[str]) -> dict[str, Any]:
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_module("zen_train.conf", version_base=None):
            composed = OmegaConf.to_container(compose("serve/default", overrides=list(words)), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(
            f"cannot read the settings: {error}. Write key=value; quote special characters."
        ) from error
    assert isinstance(composed, dict)
    # A base's file may also set how it is trained (conf/base/zen4_70b.yaml); that is nothing to a server.
    return {str(key): value for key, value in composed.items() if key in ServeConfig.model_fields}


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {where!r}.{_nearest(where, list(schema_keys(ServeConfig)))}"
    if problem["type"] == "value_error":
        return str(problem["msg"]).removeprefix("Value error, ")
    shown = "..." if "keys" in where else repr(problem["input"])
    return f"{where}={shown}: {problem['msg']}"


def _nearest(name: str, known: Sequence[str]) -> str:
    last = {key.rsplit(".", 1)[-1]: key for key in known}
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    close = close or [
        last[key] for key in difflib.get_close_matches(name.rsplit(".", 1)[-1], list(last), n=2)
    ]
    return f" Did you mean {' or '.join(close)}?" if close else ""


def settings() -> list[tuple[str, str, str]]:
    """(dotted key, default, meaning) of everything that can be set, sections unfolded, for `--help`."""
    return [
        ("base", "smollm2", "a file of conf/base, or a model folder"),
        *(row for row in _settings(ServeConfig, "") if not row[0].startswith("base.")),
    ]


def _settings(section: type[BaseModel], prefix: str) -> list[tuple[str, str, str]]:
    rows = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            rows += _settings(field.annotation, f"{prefix}{name}.")
        else:
            default = "null" if field.default is None else str(field.default)
            rows.append((prefix + name, default, field.description or ""))
    return rows
