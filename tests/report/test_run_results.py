"""The record of a run: derived figures, and JSON both ways."""

import json
import math
from dataclasses import replace

import pytest

from zen_train.errors import OutputError
from zen_train.report import (
    ArtifactSize,
    KindSize,
    Losses,
    RunResults,
    TensorRow,
    model_card,
    read_metrics,
    write_metrics,
)


def test_share_kept_is_the_kept_part_of_the_gain():
    losses = Losses(base=2.0, fine_tune=1.0, delta=1.25, tokens=10)
    assert losses.share_kept == pytest.approx(0.75)
    assert losses.share_kept_reason is None


def test_a_delta_better_than_the_fine_tune_keeps_more_than_everything():
    assert Losses(base=2.0, fine_tune=1.0, delta=0.9, tokens=10).share_kept == pytest.approx(1.1)


@pytest.mark.parametrize("fine_tune", [2.0, 2.5])
def test_a_fine_tune_without_gain_has_no_share_and_says_why(fine_tune):
    losses = Losses(base=2.0, fine_tune=fine_tune, delta=2.2, tokens=10)
    assert losses.share_kept is None
    assert "did not gain" in losses.share_kept_reason
    assert "2.0000" in losses.share_kept_reason


def test_a_loss_that_is_not_finite_is_stored_as_none_and_named():
    losses = Losses(base=math.nan, fine_tune=1.0, delta=math.inf, tokens=10)
    assert losses.base is None
    assert losses.delta is None
    assert "base" in losses.share_kept_reason


def test_perplexity_is_the_exponential_and_never_overflows():
    losses = Losses(base=1000.0, fine_tune=math.log(5.0), delta=None, tokens=10)
    assert losses.perplexity("fine_tune") == pytest.approx(5.0)
    assert losses.perplexity("base") is None
    assert losses.perplexity("delta") is None


def test_an_empty_delta_has_no_ratio(results):
    """safetensors #278: a delta with zero changed tensors is valid."""
    empty = replace(results, size=ArtifactSize(stored_bytes=0, bf16_model_bytes=100), tensors=())
    assert empty.size.ratio is None
    assert empty.size.bits_per_compressed_weight is None
    assert empty.zeros_share() is None
    assert empty.all_warnings() == []


def test_bits_per_compressed_weight_counts_signs_and_scales_only(results):
    weights = sum(math.prod(row.shape) for row in results.tensors if row.kind == "sign")
    stored_bytes = sum(row.stored_bytes for row in results.tensors if row.kind == "sign")
    assert results.size.bits_per_compressed_weight == pytest.approx(8 * stored_bytes / weights)
    assert 1.0 < results.size.bits_per_compressed_weight < 1.2


def test_coded_directions_count_as_compressed_weights_and_are_named(results):
    kinds = (
        KindSize(kind="sign", tensors=1, weights=100, stored_bytes=13),
        KindSize(kind="directions", tensors=1, weights=300, stored_bytes=37),
        KindSize(kind="dense", tensors=1, weights=10, stored_bytes=40),
    )
    size = replace(results.size, by_kind=kinds)
    assert size.bits_per_compressed_weight == 1.0
    card = model_card(replace(results, size=size))
    assert "coded singular directions" in card
    assert "bitdelta" not in card.split("---")[1]
    assert "signs and scales" in model_card(results)


def test_many_zeros_among_the_one_bit_weights_are_warned_about(results):
    rows = (
        TensorRow(name="a", kind="sign", shape=(3, 100), stored_bytes=1, zeros=0.8),
        TensorRow(name="b", kind="sign", shape=(1, 100), stored_bytes=1, zeros=0.0),
        TensorRow(name="c", kind="dense", shape=(9, 999), stored_bytes=1, zeros=1.0),
    )
    changed = replace(results, tensors=rows)
    assert changed.zeros_share() == pytest.approx(0.6)
    assert "60%" in changed.all_warnings()[-1]
    assert results.all_warnings() == []


def test_metrics_file_gives_the_same_results_back(results, tmp_path):
    write_metrics(results, tmp_path / "metrics.json")
    assert read_metrics(tmp_path / "metrics.json") == results
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


def test_metrics_file_is_strict_json_even_with_nan_in_the_configuration(results, tmp_path):
    odd = replace(
        results,
        config={"rank": math.inf, "nested": {"values": [math.nan, 1.0]}},
        losses=Losses(base=math.nan, fine_tune=1.0, delta=1.0, tokens=1),
    )
    write_metrics(odd, tmp_path / "metrics.json")

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads((tmp_path / "metrics.json").read_text(), parse_constant=refuse)
    assert document["results"]["config"] == {"rank": None, "nested": {"values": [None, 1.0]}}
    assert document["headline"]["loss_base"] is None
    assert document["headline"]["share_kept_reason"]


def test_headline_agrees_with_the_results(results, tmp_path):
    write_metrics(results, tmp_path / "metrics.json")
    headline = json.loads((tmp_path / "metrics.json").read_text())["headline"]
    assert headline["share_kept"] == pytest.approx(results.losses.share_kept)
    assert headline["size_ratio"] == pytest.approx(results.size.ratio)


def test_an_unknown_key_is_refused_by_name(results):
    values = results.to_dict()
    values["looses"] = values.pop("losses")
    with pytest.raises(OutputError, match="looses"):
        RunResults.from_dict(values)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "metrics.json"),
        ("[]", "format"),
        ('{"format": "zen_train.metrics", "format_version": 99}', "99"),
    ],
)
def test_a_file_that_is_not_ours_is_refused(tmp_path, content, named):
    path = tmp_path / "metrics.json"
    path.write_text(content)
    with pytest.raises(OutputError, match=named):
        read_metrics(path)


def test_a_folder_that_does_not_exist_is_named_and_nothing_is_left(results, tmp_path):
    with pytest.raises(OutputError, match="missing"):
        write_metrics(results, tmp_path / "missing" / "metrics.json")
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_cannot_be_replaced_leaves_no_temporary_file(results, tmp_path):
    taken = tmp_path / "metrics.json"
    taken.mkdir()
    with pytest.raises(OutputError, match=r"metrics\.json"):
        write_metrics(results, taken)
    assert list(tmp_path.iterdir()) == [taken]


def test_a_parent_that_is_a_file_is_named(results, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file"):
        write_metrics(results, tmp_path / "file" / "metrics.json")
