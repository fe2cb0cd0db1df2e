"""What is found under a root, what it is called, and what happens as folders come, change and go."""

import json
import os
import shutil
import threading

import pytest

from zen_train.serve.errors import (
    BadRequestError,
    ConflictError,
    UnknownModelError,
    VariantUnusableError,
)
from zen_train.serve.store import Catalogue, open_delta
from zen_train.serve.store import catalogue as catalogue_module


@pytest.fixture
def catalogue(made, root):
    """Of two variants: coder as an artifact's folder, math as training leaves it."""
    made.put("coder", root / "coder")
    made.put("math", root / "math" / "delta")
    return Catalogue(root, base=made.base, base_label="tiny")


def reasons(catalogue):
    return [broken.reason for broken in catalogue.broken]


def truncate(folder):
    path = folder / "delta.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def test_artifacts_are_found_and_named(catalogue, made, root):
    assert list(catalogue.variants) == ["zen4-coder", "zen4-math"]
    coder = catalogue.variants["zen4-coder"]
    assert coder.name == "zen4-coder"
    assert coder.content_hash == made.hash("coder")
    assert coder.folder == (root / "coder").resolve()
    parts = open_delta(coder.folder).tensor_report()
    assert coder.size_bytes == sum(row.size_bytes for row in parts)
    assert coder.created_unix_s == int((root / "coder" / "delta_config.json").stat().st_mtime)
    assert catalogue.broken == ()


def test_a_root_that_is_an_artifact_is_the_one_variant(made, root):
    made.put("coder", root)
    assert list(Catalogue(root).variants) == ["zen4-coder"]


def test_what_is_no_artifact_is_passed_over(catalogue, root):
    (root / "run-without-export" / "checkpoints").mkdir(parents=True)
    (root / "notes.txt").write_text("hello")
    shutil.copytree(root / "coder", root / ".coder.x7.partial")
    catalogue.rescan()
    assert list(catalogue.variants) == ["zen4-coder", "zen4-math"]
    assert catalogue.broken == ()


def test_a_root_that_does_not_exist_yet_holds_nothing_until_it_does(made, root):
    catalogue = Catalogue(root / "later")
    assert dict(catalogue.variants) == {}
    assert catalogue.broken == ()
    made.put("coder", root / "later" / "coder")
    assert [variant.name for variant in catalogue.rescan().added] == ["zen4-coder"]


def test_the_prefix_is_configurable_and_never_doubled(made, root):
    made.put("coder", root / "a")
    made.put("prefixed", root / "b")
    assert list(Catalogue(root).variants) == ["zen4-coder", "zen4-writer"]
    assert list(Catalogue(root, prefix="my-").variants) == ["my-coder", "my-zen4-writer"]
    assert list(Catalogue(root, prefix="").variants) == ["coder", "zen4-writer"]


def test_two_artifacts_of_one_name_are_both_named_and_neither_is_served(made, root):
    made.put("coder", root / "first")
    made.put("coder-again", root / "second" / "delta")
    made.put("math", root / "math")
    catalogue = Catalogue(root)
    assert list(catalogue.variants) == ["zen4-math"]
    assert len(catalogue.broken) == 2
    for reason in reasons(catalogue):
        assert str(root / "first") in reason
        assert str(root / "second" / "delta") in reason
        assert "none of them is served" in reason
    with pytest.raises(VariantUnusableError, match="all have the name 'zen4-coder'"):
        catalogue.get("zen4-coder")
    catalogue.add("zen4-coder", "first")
    assert catalogue.variants["zen4-coder"].content_hash == made.hash("coder")
    assert catalogue.broken == (), "somebody said which"


def test_a_second_artifact_of_a_served_name_does_not_stop_the_first(catalogue, made, root):
    made.put("coder-again", root / "newer")
    changes = catalogue.rescan()
    assert (changes.added, changes.replaced, changes.removed) == ((), (), ())
    assert catalogue.variants["zen4-coder"].folder == (root / "coder").resolve()
    assert [broken.folder for broken in changes.broken] == [root / "newer"]


def test_a_name_that_cannot_be_served_is_reported(made, root):
    made.put("odd", root / "odd")
    catalogue = Catalogue(root)
    assert dict(catalogue.variants) == {}
    assert "'zen4-my model'" in reasons(catalogue)[0]


def test_a_variant_with_the_name_of_the_base_is_reported(made, root):
    made.put("coder", root / "coder")
    catalogue = Catalogue(root, reserved=["zen4-coder"])
    assert dict(catalogue.variants) == {}
    assert "the name of the base" in reasons(catalogue)[0]
    with pytest.raises(ConflictError, match="name of the base"):
        catalogue.add("zen4-coder", "coder")


def drop_an_entry(folder):
    path = folder / "delta_config.json"
    document = json.loads(path.read_text())
    document["tensors"].popitem()
    path.write_text(json.dumps(document))


def add_an_entry(folder):
    path = folder / "delta_config.json"
    document = json.loads(path.read_text())
    entry = next(entry for entry in document["tensors"].values() if entry["kind"] == "sign")
    document["tensors"]["model.layers.99.mlp.up_proj.weight"] = entry
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "truncated"),
        (drop_an_entry, "has no entry; coverage must be 100 %"),
        (add_an_entry, "left-over"),
        (lambda folder: (folder / "delta_config.json").unlink(), "no delta_config.json"),
        (lambda folder: (folder / "delta_config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "weights.bin").write_bytes(b""), "pickle"),
    ],
    ids=["truncated", "misses-a-module", "matches-no-module", "no-config", "half-a-config", "pickle"],
)
def test_a_broken_artifact_has_its_reason_and_hides_no_other(catalogue, made, root, damage, reason):
    """huggingface/text-generation-inference#2505, vllm#34186: an error, and never the base."""
    damage(root / "coder")
    changes = catalogue.rescan()
    assert list(catalogue.variants) == ["zen4-math"]
    assert [variant.name for variant in changes.removed] == ["zen4-coder"]
    assert reason in reasons(catalogue)[0]
    with pytest.raises(VariantUnusableError, match=reason):
        catalogue.get("zen4-coder")
    made.put("coder", root / "coder")
    assert [variant.name for variant in catalogue.rescan().added] == ["zen4-coder"]
    assert catalogue.broken == ()


def test_an_artifact_that_changes_nothing_is_never_served_as_the_base(made, root):
    """huggingface/text-generation-inference#2505, vllm#34186"""
    made.put("unchanged", root / "lazy")
    catalogue = Catalogue(root)
    assert dict(catalogue.variants) == {}
    assert "changes no tensor" in reasons(catalogue)[0]


def test_an_artifact_of_another_base_is_reported_with_both_bases(catalogue, made, root):
    made.put("foreign", root / "foreign")
    catalogue.rescan()
    assert list(catalogue.variants) == ["zen4-coder", "zen4-math"]
    assert "made from other-base" in reasons(catalogue)[0]
    assert "tiny (fingerprint" in reasons(catalogue)[0]
    assert "tensors hold other values" in reasons(catalogue)[0]
    assert "zen4-foreign" in Catalogue(root).variants, "without a base to compare, any will do"


def test_an_unknown_name_is_not_found_and_near_ones_are_offered(catalogue):
    """huggingface/text-generation-inference#2505, vllm#34186"""
    with pytest.raises(UnknownModelError, match="did you mean zen4-coder") as raised:
        catalogue.get("zen4-codr")
    assert raised.value.status == 404
    for name in ("", "../zen4-coder", "zen4-coder\0", "ｚen4-coder", "x" * 100_000):
        with pytest.raises(UnknownModelError) as raised:
            catalogue.get(name)
        assert len(str(raised.value)) < 1000


def test_what_the_engine_refuses_is_broken_and_its_size_is_the_engines(made, root):
    made.put("coder", root / "coder")
    made.put("math", root / "math")

    def size_of(folder):
        if folder.name == "math":
            raise VariantUnusableError("embed.dense: stored whole; export it with embedding=sign")
        return 12345

    catalogue = Catalogue(root, size_of=size_of)
    assert catalogue.variants["zen4-coder"].size_bytes == 12345
    assert list(catalogue.variants) == ["zen4-coder"]
    assert "export it with embedding=sign" in reasons(catalogue)[0]


def test_a_rescan_tells_what_was_added_replaced_and_removed(catalogue, made, root):
    """vllm#42125, #30931: new weights under the same name have another content hash."""
    before = catalogue.variants
    made.put("coder-again", root / "coder")
    made.put("prefixed", root / "writer")
    shutil.rmtree(root / "math")
    changes = catalogue.rescan()
    assert [variant.name for variant in changes.added] == ["zen4-writer"]
    assert [variant.name for variant in changes.removed] == ["zen4-math"]
    ((old, new),) = changes.replaced
    assert (old.name, new.name) == ("zen4-coder", "zen4-coder")
    assert (old.content_hash, new.content_hash) == (made.hash("coder"), made.hash("coder-again"))
    assert set(before) == {"zen4-coder", "zen4-math"}, "what was handed out never changes"


def test_a_rescan_opens_only_what_changed(catalogue, made, root, monkeypatch):
    """vllm#33791"""
    opened = []
    monkeypatch.setattr(
        catalogue_module, "open_delta", lambda folder: opened.append(folder.name) or open_delta(folder)
    )
    for _ in range(3):
        catalogue.rescan()
    assert opened == []
    made.put("coder-again", root / "coder")
    catalogue.rescan()
    catalogue.rescan()
    assert opened == ["coder"]


def test_a_folder_that_was_replaced_meanwhile_is_told_by_its_hash(catalogue, made, root):
    """vllm#42125, #30931"""
    coder = catalogue.variants["zen4-coder"]
    assert open_delta(coder.folder, coder.content_hash).config.variant == "coder"
    made.put("coder-again", root / "coder")
    with pytest.raises(
        VariantUnusableError, match=f"expected {coder.content_hash[:16]}.*ask for the variant again"
    ):
        open_delta(coder.folder, coder.content_hash)


def test_files_that_vanish_are_a_clear_error_and_others_live_on(catalogue, root):
    """vllm#11727"""
    coder, math = catalogue.variants["zen4-coder"], catalogue.variants["zen4-math"]
    shutil.rmtree(root / "coder")
    with pytest.raises(VariantUnusableError, match=r"coder.*is not a folder"):
        open_delta(coder.folder, coder.content_hash)
    assert open_delta(math.folder, math.content_hash).content_hash == math.content_hash
    assert [variant.name for variant in catalogue.rescan().removed] == ["zen4-coder"]
    assert list(catalogue.variants) == ["zen4-math"]


def test_an_added_folder_is_served_under_the_given_name(catalogue, root):
    variant = catalogue.add("org/my-coder:v2", "coder")
    assert variant.name == "org/my-coder:v2"
    assert variant.content_hash == catalogue.variants["zen4-coder"].content_hash
    catalogue.rescan()
    assert "org/my-coder:v2" in catalogue.variants
    assert catalogue.add("absolute", root / "math" / "delta").folder == (root / "math" / "delta").resolve()


def test_adding_to_a_served_name_replaces_what_it_meant(catalogue, made, root):
    made.put("coder-again", root / "hidden" / "deeper" / "coder")
    assert catalogue.add("zen4-coder", "hidden/deeper/coder").content_hash == made.hash("coder-again")
    catalogue.rescan()
    assert catalogue.variants["zen4-coder"].content_hash == made.hash("coder-again")
    assert catalogue.broken == ()


def test_a_removed_name_stays_away_until_it_is_added_again(catalogue):
    catalogue.remove("zen4-coder")
    assert catalogue.rescan().added == ()
    assert list(catalogue.variants) == ["zen4-math"]
    with pytest.raises(UnknownModelError):
        catalogue.get("zen4-coder")
    with pytest.raises(UnknownModelError):
        catalogue.remove("zen4-coder")
    catalogue.add("zen4-coder", "coder")
    assert "zen4-coder" in catalogue.variants


def test_an_addition_that_is_refused_changes_nothing(catalogue, made, root):
    made.put("foreign", root / "deep" / "er" / "foreign")
    before = catalogue.variants
    for name, path, error, message in [
        ("x", "deep/er/foreign", VariantUnusableError, "another base"),
        ("x", "deep", VariantUnusableError, "no delta_config.json"),
        ("x", "absent", BadRequestError, "no folder under"),
        ("x", "../root/coder", BadRequestError, "holds '..'"),
        ("my coder", "coder", BadRequestError, "lora_name 'my coder' is not allowed"),
        ("zen4-cоder", "coder", BadRequestError, "ASCII"),
        ("", "coder", BadRequestError, "lora_name"),
        ("x" * 129, "coder", BadRequestError, "1 to 128"),
        ("a/../b", "coder", BadRequestError, "lora_name"),
    ]:
        with pytest.raises(error, match=message):
            catalogue.add(name, path)
    assert catalogue.variants == before
    assert catalogue.broken == ()


def test_an_added_folder_that_vanishes_is_broken_and_comes_back_when_it_does(catalogue, made, root):
    """vllm#11727"""
    made.put("prefixed", root / "deep" / "er" / "writer")
    catalogue.add("mine", "deep/er/writer")
    shutil.rmtree(root / "deep" / "er" / "writer")
    assert [variant.name for variant in catalogue.rescan().removed] == ["mine"]
    with pytest.raises(VariantUnusableError, match="No such file"):
        catalogue.get("mine")
    made.put("prefixed", root / "deep" / "er" / "writer")
    assert [variant.name for variant in catalogue.rescan().added] == ["mine"]


def test_a_link_out_of_the_root_is_not_followed(catalogue, made, root, tmp_path):
    made.put("prefixed", tmp_path / "outside" / "writer")
    (root / "writer").symlink_to(tmp_path / "outside" / "writer")
    catalogue.rescan()
    assert "zen4-writer" not in catalogue.variants
    assert "outside of" in reasons(catalogue)[0]
    with pytest.raises(BadRequestError, match="outside of"):
        catalogue.add("zen4-writer", "writer")


def test_a_root_that_is_a_link_is_one_root(catalogue, root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    linked = Catalogue(tmp_path / "link")
    assert list(linked.variants) == ["zen4-coder", "zen4-math"]
    assert linked.add("again", root / "coder").folder == (root / "coder").resolve()


def test_rescans_from_several_threads_agree(catalogue, made, root):
    made.put("prefixed", root / "writer")
    found = []

    def look():
        changes = catalogue.rescan()
        found.append((len(changes.added), sorted(catalogue.variants)))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(added for added, _ in found) == 1
    assert all(names == ["zen4-coder", "zen4-math", "zen4-writer"] for _, names in found)
