"""The files of conf/data and conf/variant: each is valid, and a wrong key or value is refused."""

from __future__ import annotations

from importlib.resources import files

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from zen_train.data.config import DataConfig, SourceConfig, VariantConfig
from zen_train.data.corpora import CORPORA
from zen_train.data.table import variant_configs, variants_table

NAMES = [
    *("agent", "chat", "coder", "finance", "legal", "math", "medical"),
    *("reasoner", "science", "security", "support", "translate", "ultra", "writer"),
]
DATA = TypeAdapter(DataConfig)


def _yaml(group: str, name: str) -> dict:
    return yaml.safe_load((files("zen_train.conf") / group / f"{name}.yaml").read_text())


def test_there_are_exactly_the_fourteen_variants():
    assert sorted(variant_configs()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_file_is_valid_and_names_a_corpus(name):
    text = (files("zen_train.conf") / "variant" / f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    assert list(yaml.safe_load(text)) == ["variant"]
    variant = variant_configs()[name]
    assert (variant.name, variant.served_name) == (name, f"zen4-{name}")
    assert variant.corpus in CORPORA


def test_ultra_has_the_sources_the_seed_and_the_share_of_all_others():
    """Then a document that another variant holds out is held out here too."""
    variants = variant_configs()
    ultra = variants.pop("ultra")
    others = {source.package: source for variant in variants.values() for source in variant.sources}
    assert {source.package: source for source in ultra.sources} == others
    assert {(v.seed, v.heldout_share) for v in variants.values()} == {(ultra.seed, ultra.heldout_share)}


def test_the_table_shows_every_variant_with_its_licences():
    console = Console(width=240)
    with console.capture() as capture:
        console.print(variants_table())
    for name, variant in variant_configs().items():
        assert name in capture.get()
        if name != "ultra":
            assert all(source.licence in capture.get() for source in variant.sources)


@pytest.mark.parametrize("kind", ["corpus", "jsonl", "parquet", "text"])
def test_a_data_file_is_valid_and_lists_every_field(kind):
    values = _yaml("data", kind)
    if kind != "corpus":
        assert values["path"] == "???", "Hydra then asks for it"
    data = DATA.validate_python({**values, **({} if kind == "corpus" else {"path": "x"})})
    assert set(values) == set(type(data).model_fields)
    defaults = type(data)(kind=kind, **({} if kind == "corpus" else {"path": "x"}))
    assert data == defaults, "the file and the schema state the same defaults"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"context_token": 128}, "context_token"),
        ({"context_tokens": 8}, "greater than or equal to 16"),
        ({"batch_size": "4"}, "valid integer"),
        ({"too_long": "drop"}, "'error', 'truncate', 'skip' or 'split'"),
        ({"kind": "csv"}, "'corpus', 'jsonl', 'parquet', 'text'"),
        ({"path": "x"}, "path"),
    ],
    ids=["typo", "bound", "type", "choice", "kind", "foreign"],
)
def test_a_wrong_data_setting_is_refused(change, complaint):
    with pytest.raises(ValidationError, match=complaint):
        DATA.validate_python({"kind": "corpus", **change})


def test_a_downloaded_source_must_be_pinned():
    with pytest.raises(ValidationError, match="needs its sha256"):
        SourceConfig(package="p", version="1", kind="wheel", licence="MIT", size_bytes=1)


def test_a_variant_without_a_source_is_refused():
    values = _yaml("variant", "coder")["variant"]
    with pytest.raises(ValidationError, match="sources"):
        VariantConfig.model_validate({**values, "sources": []})
