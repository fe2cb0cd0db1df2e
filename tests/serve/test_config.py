"""The server's command line: what makes sense passes, what cannot be meant is refused with what was meant."""

import pytest

from zen_train.errors import ConfigError
from zen_train.overrides import schema_keys
from zen_train.serve.config import ServeConfig, read_config, settings


def read(*words, **environment):
    return read_config(words, environment=environment)


def test_no_word_at_all_serves_the_embedded_base_and_what_training_left():
    config = read()
    assert (config.base.name, config.variants, config.host, config.port) == (
        "smollm2",
        "outputs",
        "127.0.0.1",
        8000,
    )
    assert config.api_keys == []


def test_sections_are_set_by_dotted_keys():
    config = read(
        "engine.slots=3",
        "engine.host_bytes=0",
        "router.starvation_s=1.5",
        "limits.max_choices=2",
        "router.cache.auto_pins=0",
        "pin=[a,b]",
    )
    assert config.engine.slots == 3
    assert config.engine.host_bytes == 0
    assert config.router.starvation_s == 1.5
    assert config.limits.max_choices == 2
    assert config.router.cache.auto_pins == 0
    assert config.pin == ["a", "b"]


@pytest.mark.parametrize("name", ["it's here", "a b", "plain", "../x"])
def test_a_folder_as_base_is_taken_as_it_lies(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = read(f"base=./{name}")
    assert (config.base.kind, config.base.path) == ("hf", f"./{name}")


def test_an_existing_folder_needs_no_slash(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert read("base=model").base.path == "model"


def test_a_base_that_says_how_it_is_trained_can_be_served():
    assert read("base=zen4_70b").base.name == "zen4_70b"


def test_keys_come_from_the_environment_and_are_never_shown():
    config = read(ZEN_SERVE_API_KEYS="one, two,,", ZEN_SERVE_ADMIN_KEYS="root")
    assert [key.get_secret_value() for key in config.api_keys] == ["one", "two"]
    assert [key.get_secret_value() for key in config.admin_keys] == ["root"]
    assert "root" not in repr(config)
    assert read("api_keys=hunter2").api_keys[0].get_secret_value() == "hunter2"
    with pytest.raises(ConfigError) as caught:
        read("api_keys=[[hunter2]]")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("prt=1", "Did you mean port"),
        ("slots=1", "Did you mean engine.slots"),
        ("engine.slot=1", "Did you mean engine.slots"),
        ("base=smollm", "Did you mean smollm2"),
        ("base=hf", "needs base.path"),
        ("port", "write key=value"),
        ("port=abc", "port='abc'"),
        ("port=70000", "port=70000"),
        ("drain_s=0", "drain_s=0"),
        ("drain_s=.inf", "drain_s"),
        ("engine.slots=0", "engine.slots=0"),
        ("engine.host_bytes=-1", "engine.host_bytes=-1"),
        ("engine.host_bytes=8GB", "engine.host_bytes='8GB'"),
        ("engine.hostbytes=1", "Did you mean engine.host_bytes"),
        ("engine.device=tpu", "allowed: cpu"),
        ("base_name='two words'", "base_name"),
        ("variants=[1", "quote special characters"),
        ("router.cache.minimum_residency_s=9", "starvation_s"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_hint(word, hint):
    with pytest.raises(ConfigError, match=hint):
        read(word)


def test_help_lists_every_setting_with_its_default():
    listed = [name for name, _, _ in settings()]
    sections = {
        key
        for key in schema_keys(ServeConfig)
        if any(other.startswith(f"{key}.") for other in schema_keys(ServeConfig))
    }
    assert set(listed) == {
        key for key in schema_keys(ServeConfig) if not key.startswith("base.")
    } - sections | {"base"}
    assert all(
        meaning or name in ("host",) or name.startswith(("engine.", "router.", "limits."))
        for name, _, meaning in settings()
    )
