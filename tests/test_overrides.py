"""The command line refuses what cannot be meant, and says what was meant."""

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from pydantic import ValidationError

from zen_train.config import RunConfig
from zen_train.errors import ConfigError
from zen_train.kernels.common.along import ALONG_WEIGHT
from zen_train.overrides import check_overrides, config_groups, explain, schema_keys
from zen_train.run import check_sense

GROUPS = config_groups()


def composed(*overrides: str) -> dict:
    with initialize_config_module("zen_train.conf", version_base=None):
        return OmegaConf.to_container(compose("config", overrides=list(overrides)), resolve=True)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "which variant?"),
        (["trainer.max_steps=3"], "which variant?"),
        (["variant=coder"], r"\+variant=coder"),
        (["+variant=codr"], "Did you mean coder"),
        (["+variant=coder,maht"], "Did you mean math"),
        (["+variant=coder", "trainer.max_step=3"], "Did you mean trainer.max_steps"),
        (["+variant=coder", "lerning_rate=3"], "Did you mean optim.learning_rate"),
        (["+variant=coder", "merge=svd"], "Did you mean svd_average"),
        (["+variant=coder", "+trainer.extra=1"], "unknown setting 'trainer.extra'"),
        (["+variant=coder", "trainer.max_steps=[1"], "cannot read"),
        (["+variant=coder", "data.paht=x"], r"Did you mean data\.path"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_a_command_line_that_cannot_be_meant_is_refused_with_a_hint(words, hint):
    with pytest.raises(ConfigError, match=hint):
        check_overrides(words)


@pytest.mark.parametrize(
    "words",
    [
        ["+variant=coder"],
        ["+variant=coder,math", "-m"],
        ["+variant=coder", "merge=monosoup", "merge.rank=0.1", "base=hf", "base.path=x", "--cfg", "job"],
        ["+variant=chat", "data=jsonl", "data.path=x.jsonl", "hydra.verbose=true"],
    ],
    ids=" ".join,
)
def test_what_makes_sense_passes(words):
    check_overrides(words)


@pytest.mark.parametrize("variant", GROUPS["variant"])
@pytest.mark.parametrize("scale", GROUPS["scale"])
def test_every_variant_composes_at_every_scale(variant, scale):
    config = RunConfig.model_validate(composed(f"+variant={variant}", f"scale={scale}"))
    assert config.variant.name == variant
    assert config.output_dir == f"outputs/{variant}"


@pytest.mark.parametrize(
    "choice",
    [
        f"{group}={name}"
        for group, names in GROUPS.items()
        if group not in ("variant", "scale")
        for name in names
    ],
)
def test_every_config_file_builds(choice):
    needs = ["data.path=x"] if choice.startswith("data=") and choice != "data=corpus" else []
    needs += ["base.path=x"] if choice == "base=hf" else []
    RunConfig.model_validate(composed("+variant=coder", choice, *needs))


def test_full_scale_merges_every_thousand_optimizer_steps():
    config = RunConfig.model_validate(composed("+variant=coder", "scale=full", "merge=monosoup"))
    assert config.merge.every_n_steps == 1000
    assert config.validate_every_n_steps == 1000
    assert config.checkpoint_every_n_steps == 1000


def test_the_command_line_wins_over_variant_and_scale():
    config = RunConfig.model_validate(
        composed("+variant=coder", "scale=full", "merge.every_n_steps=7", "variant.sample_prompt=hi")
    )
    assert config.merge.every_n_steps == 7
    assert config.variant.sample_prompt == "hi"


def test_there_are_fourteen_variants():
    assert len(GROUPS["variant"]) == 14


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_steps=abc", r"trainer\.max_steps='abc': Input should be a valid integer"),
        ("trainer.max_steps=0", r"trainer\.max_steps=0: Input should be greater than 0"),
        ("optim.learning_rate=-1", r"optim\.learning_rate=-1"),
        ("merge.accept=maybe", "'always' or 'if_not_worse'"),
        ("base=hf", "needs base.path"),
        ("export.code=waves", "'auto', 'signs' or 'directions'"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(override, message):
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(composed("+variant=coder", override))
    with pytest.raises(ConfigError, match=message):
        raise explain(caught.value)


def test_the_schema_knows_every_key_of_the_files_and_no_other():
    keys = set(schema_keys(RunConfig))
    assert {"merge.every_n_steps", "tuning.lora.rank", "logger.wandb.mode", "data.path"} <= keys
    for key in _flatten(composed("+variant=coder")):
        assert key in keys, key


def _flatten(section: dict, prefix: str = ""):
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        (
            ("export.aware=true", "tuning.method=lora", "merge=none"),
            "tuning.method=lora",
            "tuning.method=full",
        ),
        (("export.aware=true", "export.planes=2"), "found 2", "export.planes=1"),
        (("export.aware=true", "export.low_rank=2"), "found 2", "export.low_rank=0"),
        (("export.bits_per_weight=1.5", "export.planes=2"), "both say how many bits", "one of them"),
        (("export.bits_per_weight=1.5", "export.aware=true"), "works on one plane", "one of them"),
        (
            ("export.bits_per_weight=1.5", "trainer.strategy=ddp"),
            "found full and ddp",
            "trainer.strategy=auto",
        ),
        (("export.code=directions", "export.planes=2"), "export.planes=2", "export.planes=1"),
        (("export.code=directions", "export.low_rank=2"), "export.low_rank=2", "export.low_rank=0"),
        (("export.code=directions", "export.aware=true"), "export.aware=true", "export.aware=false"),
        (("export.code=directions", "export.distill_steps=5"), "distill_steps=5", "export.distill_steps=0"),
        (("export.code=directions", "export.scale=matrix"), "export.scale=matrix", "export.code=signs"),
        (("export.code=directions", "export.along_weight=1"), "along_weight=1.0", "export.code=signs"),
        (("export.aware=true", "export.distill_steps=5"), "export.distill_steps=5", "one of them"),
        (("export.aware=true", "trainer.strategy=fsdp2"), "trainer.strategy=fsdp2", "auto or ddp"),
        (("export.distill_steps=5", "trainer.strategy=ddp"), "trainer.strategy=ddp", "trainer.strategy=auto"),
        (("tuning.method=lora", "merge=svd_average"), "merge=svd_average", "merge=mean"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else None,
)
def test_settings_that_make_no_sense_together_are_refused_with_the_remedy(words, named, remedy):
    with pytest.raises(ConfigError) as refused:
        check_sense(RunConfig.model_validate(composed("+variant=coder", *words)))
    assert named in str(refused.value)
    assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ((), "directions"),
        (("export.bits_per_weight=0.5",), "directions"),
        (("export.bits_per_weight=1.25",), "signs"),
        (("export.planes=2",), "signs"),
        (("export.scale=matrix",), "signs"),
        (("export.along_weight=1",), "signs"),
        (("export.low_rank=4",), "signs"),
        (("export.aware=true",), "signs"),
        (("export.distill_steps=3",), "signs"),
        (("export.code=directions", "export.bits_per_weight=2"), "directions"),
        (("export.code=signs",), "signs"),
    ],
)
def test_the_code_is_the_best_one_that_can_do_what_was_asked(words, code):
    config = RunConfig.model_validate(composed("+variant=coder", *words))
    check_sense(config)
    assert config.export.used_code == code


def test_the_command_line_pushes_scales_as_far_as_a_run_does():
    """Written in both places: the schema must not import torch."""
    assert RunConfig.model_validate(composed("+variant=coder")).export.along_weight == ALONG_WEIGHT


def test_one_bit_training_alone_is_accepted():
    for words in (
        ("export.aware=true",),
        ("export.aware=true", "trainer.strategy=ddp"),
        ("export.distill_steps=5",),
        ("export.code=directions",),
        ("export.code=directions", "export.bits_per_weight=2.5", "trainer.strategy=ddp"),
    ):
        check_sense(RunConfig.model_validate(composed("+variant=coder", *words)))
