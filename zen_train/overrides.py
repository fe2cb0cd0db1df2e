"""The command line checked before Hydra composes it: a typo gets the close match, a missing plus sign gets its hint.

Hydra refuses unknown keys too, but names neither the key meant nor the variants that exist.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Iterator
from importlib import resources
from types import UnionType

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from pydantic import BaseModel, ValidationError

from zen_train.config import RunConfig
from zen_train.errors import ConfigError

_HYDRA_PREFIXES = ("hydra", "hydra.")


def check_overrides(words: Iterable[str]) -> None:
    """Refuse what cannot be meant among `key=value` words. Flags (`-m`, `--cfg job`) are left to Hydra.

    Raises:
        ConfigError: an unknown key, group or choice, with the nearest that exists; a missing variant.
    """
    groups = config_groups()
    keys = set(schema_keys(RunConfig))
    seen = set()
    for word in words:
        if word.startswith("-") or "=" not in word:
            continue
        name, values, adds = _parse(word)
        seen.add(name)
        if name.startswith(_HYDRA_PREFIXES) or word.startswith("~"):
            continue
        if name in groups:
            for value in values:
                _check_choice(name, value, groups[name])
            if name == "variant" and not adds:
                raise ConfigError(
                    f"variant={values[0]} needs a plus sign, because no variant is the default: +{word}"
                )
        elif name not in keys:
            raise ConfigError(f"unknown setting {name!r} in {word!r}.{_nearest(name, [*keys, *groups])}")
    if "variant" not in seen and "variant.name" not in seen:
        listed = ", ".join(sorted(groups["variant"]))
        raise ConfigError(
            f"which variant? Add one of +variant={{{listed}}}, for instance: python -m zen_train +variant=coder   "
            "(python -m zen_train --variants describes them)"
        )


def config_groups() -> dict[str, list[str]]:
    """Config groups of a training run and their choices, from the files in conf/."""
    groups = {}
    for folder in resources.files("zen_train.conf").iterdir():
        if folder.is_dir() and folder.name != "serve":
            choices = [file.name[:-5] for file in folder.iterdir() if file.name.endswith(".yaml")]
            if choices:
                groups[folder.name] = sorted(choices)
    return groups


def schema_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All dotted keys of a schema, sections included."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for section in _sections(info.annotation):
            yield from schema_keys(section, f"{prefix}{name}.")


def explain(error: ValidationError) -> ConfigError:
    """A schema error as one line per setting: its name, the value got, what is allowed."""
    lines = []
    for problem in error.errors():
        where = ".".join(
            str(part) for part in problem["loc"] if part not in ("corpus", "jsonl", "parquet", "text")
        )
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown setting {where!r}.{_nearest(where, list(schema_keys(RunConfig)))}")
        elif problem["type"] == "value_error":
            lines.append(problem["msg"].removeprefix("Value error, "))
        else:
            where = where or "configuration"
            lines.append(f"{where}={problem['input']!r}: {problem['msg']}")
    return ConfigError("\n".join(lines))


def _parse(word: str) -> tuple[str, list[str], bool]:
    """(key, the values it takes: several in a sweep, whether it adds)."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ConfigError(
            f"cannot read {word!r}: {error}. Write key=value; quote special characters."
        ) from error
    sweep = override.is_sweep_override()
    values = (
        [str(v) for v in override.sweep_string_iterator()]
        if sweep
        else [str(override.get_value_element_as_str())]
    )
    return override.key_or_group, values, override.is_add()


def _check_choice(group: str, value: str, choices: list[str]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{group}={value} does not exist.{_nearest(value, choices)} Choices: {', '.join(choices)}."
        )


def _nearest(name: str, known: list[str]) -> str:
    close = [key for key in known if len(name) > 2 and key.startswith(name)][:2]
    close = close or difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    if not close:  # the right key in the wrong section, or none
        last = name.rsplit(".", 1)[-1]
        tails = {key.rsplit(".", 1)[-1]: key for key in known}
        close = [tails[tail] for tail in difflib.get_close_matches(last, list(tails), n=2, cutoff=0.6)]
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _sections(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, UnionType, typing.Annotated):
        for argument in typing.get_args(annotation):
            yield from _sections(argument)
