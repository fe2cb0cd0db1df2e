"""The same results as terminal text, picture and model card."""

import io
from dataclasses import replace

import pytest
import yaml
from rich.console import Console

from zen_train.report import (
    Curves,
    DataSource,
    Losses,
    Sample,
    model_card,
    render_terminal,
    units,
    write_picture,
)


def printed(results, *, width=80):
    out = io.StringIO()
    render_terminal(results, Console(file=out, width=width, color_system=None))
    return out.getvalue()


def test_terminal_summary_fits_80_columns_and_says_what_matters(results):
    text = printed(results)
    assert max(len(line) for line in text.splitlines()) <= 80
    for shown in ("93.9 %", "2.1438", "1.7391", "70.6 MB", "2 of 3 merges", "report.html", "delta apply"):
        assert shown in text


def test_terminal_never_reads_names_as_markup(results):
    text = printed(replace(results, variant="[red]x[/red]", warnings=("see [bold]this[/bold] [/nope]",)))
    assert "[red]x[/red]" in text
    assert "[/nope]" in text


def test_terminal_says_why_no_share_is_kept(results):
    text = printed(replace(results, losses=Losses(base=2.0, fine_tune=2.1, delta=2.05, tokens=5)))
    assert "did not gain" in text
    assert "keeps" not in text


def test_picture_is_a_png_of_a_fixed_size_and_moderate_weight(results, tmp_path):
    write_picture(results, tmp_path / "report.png")
    content = (tmp_path / "report.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    assert (int.from_bytes(content[16:20]), int.from_bytes(content[20:24])) == (1500, 600)
    assert 10_000 < len(content) < 300_000


def test_picture_of_an_empty_run_with_dollar_signs_in_its_name_is_drawn(results, tmp_path):
    bare = replace(results, variant="$\\frac{$", curves=Curves(), tensors=())
    write_picture(bare, tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 1000


def front_matter(card):
    _, head, body = card.split("---\n", 2)
    return yaml.safe_load(head), body


def test_card_names_base_licence_and_tags_in_hub_form(results):
    head, body = front_matter(model_card(results))
    assert head["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert head["library_name"] == "zen_train"
    assert head["license"] == "apache-2.0"
    assert head["language"] == ["en"]
    assert "coder" in head["tags"]
    for shown in (
        "93.9 %",
        "1.7391",
        "python -m zen_train.delta apply",
        "Python standard library",
        "PSF-2.0",
    ):
        assert shown in body


def test_card_of_an_unlisted_licence_says_other_and_its_name(results):
    head, _ = front_matter(model_card(replace(results, base=replace(results.base, licence="Custom: yes"))))
    assert head["license"] == "other"
    assert head["license_name"] == "Custom: yes"


def test_card_keeps_hostile_text_inside_its_cells_and_fences(results):
    odd = "a: {b}\n# c | d <script> ``` `````"
    head, body = front_matter(
        model_card(
            replace(
                results,
                variant=odd,
                data=(DataSource(name=odd, licence="MIT"),),
                samples=(Sample(prompt=odd, base=odd, fine_tune=odd, delta=odd),),
            )
        )
    )
    assert odd in head["tags"]
    row = next(line for line in body.splitlines() if line.endswith("| MIT |"))
    assert row.replace("\\|", "").count("|") == 4
    assert "\n``````text\n" + odd + "\n``````\n" in body
    assert "\\<script" in body.split("## Sample")[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (13_900_000, "13.9 MB"),
        (269_030_016, "269 MB"),
        (9.61e9, "9.61 GB"),
    ],
)
def test_bytes_read_as_on_a_disk_label(value, text):
    assert units.bytes_text(int(value)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.04 s"),
        (3.14, "3.1 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (251.0, "4 min 11 s"),
        (7260, "2 h 1 min"),
    ],
)
def test_seconds_read_as_people_say_them(seconds, text):
    assert units.seconds_text(seconds) == text


def test_counts_and_ratios_are_short():
    assert [units.count_text(n) for n in (950, 61_440, 134_515_008, 70_553_706_496)] == [
        "950", "61.4k", "134.5M", "70.6B",
    ]  # fmt: skip
    assert units.ratio_text(14.42) == "14.4×"
    assert units.ratio_text(None) == units.DASH
