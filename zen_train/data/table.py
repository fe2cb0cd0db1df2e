"""The table of the 14 variants: where their text comes from, under which licence, how it is split."""

from __future__ import annotations

from importlib.resources import files

import yaml
from rich.table import Table

from zen_train.data.config import VariantConfig


def variant_configs() -> dict[str, VariantConfig]:
    """Every file of `conf/variant/`, by name, checked."""
    folder = files("zen_train.conf") / "variant"
    names = sorted(item.name for item in folder.iterdir() if item.name.endswith(".yaml"))
    loaded = {name: yaml.safe_load((folder / name).read_text(encoding="utf-8")) for name in names}
    return {
        name.removesuffix(".yaml"): VariantConfig.model_validate(v["variant"]) for name, v in loaded.items()
    }


def variants_table() -> Table:
    """One row a variant and source; `ultra`, which uses all of them, is one row."""
    table = Table(
        "variant", "what for", "source", "licence", "download", "held out", "seed", title="variants"
    )
    for name, variant in variant_configs().items():
        held_out = f"{variant.split} ({variant.heldout_share:.0%})"
        if variant.corpus == "mixture":
            total = sum(source.size_bytes for source in variant.sources)
            source, licence = f"all {len(variant.sources)} sources of the others", "as theirs"
            table.add_row(
                name, variant.description, source, licence, _size(total), held_out, str(variant.seed)
            )
            continue
        sources = "\n".join(f"{source.package} {source.version}" for source in variant.sources)
        licences = "\n".join(source.licence for source in variant.sources)
        sizes = "\n".join(_size(source.size_bytes) for source in variant.sources)
        table.add_row(name, variant.description, sources, licences, sizes, held_out, str(variant.seed))
    return table


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes else "none"
