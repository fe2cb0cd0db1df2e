"""The model card of an artifact: a plain one at export, replaced once measurements exist."""

from pathlib import Path

from zen_train.delta.manifest import CONFIG_NAME, DeltaConfig
from zen_train.delta.publish import replace_file
from zen_train.errors import OutputError

CARD_NAME = "README.md"


def default_card(config: DeltaConfig) -> str:
    """A card without measurements."""
    base = config.base
    revision = f" at {base.revision}" if base.revision else ""
    directions = any(entry.directions for entry in config.tensors.values())
    what = "A delta of coded singular directions" if directions else "A one-bit delta"
    return (
        f"# {config.variant}\n\n"
        f"{what} against {base.name}{revision}, fingerprint `{base.fingerprint.root}`.\n"
        f"Licence of the base: {base.licence or 'not recorded'}.\n\n"
        "It is used together with that base. To write a full model folder:\n\n"
        "    python -m zen_train.delta apply DELTA_FOLDER BASE_FOLDER OUT_FOLDER\n"
    )


def replace_card(folder: str | Path, text: str) -> None:
    """Replace the card of a published artifact in one step. The card is not part of any digest."""
    if not (Path(folder) / CONFIG_NAME).is_file():
        raise OutputError(f"{folder} is no delta artifact: it has no {CONFIG_NAME}")
    replace_file(Path(folder) / CARD_NAME, text.encode())
