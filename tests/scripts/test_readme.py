"""The generated parts of README.md and their picture, from figures made up here."""

from __future__ import annotations

import json

import fidelity_picture
import pytest
import readme
import readme_fidelity
import readme_tables
from bench_merging import Method, Run, interval, roughness
from PIL import Image


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """`recorded(bench, rows)` stands in for scripts/results/BENCH.jsonl."""

    def write(bench, rows):
        lines = [json.dumps({"unit": "", "against": None, "spread": None, **row}) for row in rows]
        (tmp_path / f"{bench}.jsonl").write_text("\n".join(lines))
        readme_tables.lines_of.cache_clear()

    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    yield write
    readme_tables.lines_of.cache_clear()


def test_the_last_line_of_a_case_counts_in_the_table_of_merging(recorded):
    def rule(name, loss, kept):
        runs = {"against": "9 runs"}
        return [
            {
                "case": f"{name}: loss over none",
                "value": loss,
                "spread": [loss - 0.001, loss + 0.001],
                **runs,
            },
            {"case": f"{name}: roughness over none", "value": 1.1, "spread": [0.9, 1.25], **runs},
            {"case": f"{name}: merges kept", "value": kept, "unit": "of 54", **runs},
        ]

    recorded(
        "merging",
        [*rule("mean", 9.0, 1), *rule("mean", -0.0004, 12), *rule("mean always constant", 0.003, 54)],
    )
    assert readme.merging().splitlines()[2:] == [
        "| `mean` | if not worse | decays | -0.4 (-1.4 to +0.6) | 1.10 (0.90 to 1.25) | 12 of 54 | 9 |",
        "| `mean` | always | constant | +3.0 (+2.0 to +4.0) | 1.10 (0.90 to 1.25) | 54 of 54 | 9 |",
    ]


def test_each_way_of_merging_has_a_name_that_the_table_reads_back(recorded):
    methods = [
        Method("mean", always=always, schedule=schedule)
        for schedule in ("cosine", "constant")
        for always in (False, True)
    ]
    figures = {"value": 1.0, "spread": [1.0, 1.0], "against": "9 runs"}
    whats = ("loss over none", "roughness over none", "merges kept")
    recorded("merging", [{"case": f"{method}: {what}", **figures} for method in methods for what in whats])
    assert [row.split(" | ")[1:3] for row in readme.merging().splitlines()[2:]] == [
        [gate, rate] for rate in ("decays", "constant") for gate in ("if not worse", "always")
    ]


def test_the_picture_of_codes_shows_what_was_measured(recorded, tmp_path):
    def code(method, bits, lost):
        return [
            {"case": f"math/{method} bits", "value": bits},
            {"case": f"math/{method} KL", "value": lost},
            {"case": f"math/{method} kept", "value": 99.0, "spread": [98.0, 100.0]},
        ]

    pictures = []
    for lost in (0.001, 0.004):
        rows = [row for each in ("matrix", "delta_come_gptq") for row in code(each, 1.0, 0.01)]
        recorded("fidelity", [*rows, *code("directions", 0.99, lost)])
        fidelity_picture.picture(tmp_path / "picture.png")
        with Image.open(tmp_path / "picture.png") as image:
            pictures.append((image.size, image.convert("L").tobytes()))
    assert pictures[0][0][0] > 400
    assert pictures[0][1] != pictures[1][1]


def test_more_training_reaches_the_whole_gain_where_the_line_between_two_points_does(recorded):
    def kept(name, **shares):
        return [{"case": f"{name}/aware{more} kept", "value": share} for more, share in shares.items()]

    def at(first, last, middle=None):
        return {"": first, "_1.3": last, **({} if middle is None else {"_1.15": middle})}

    all_three = kept("math", **at(90.0, 95.0, 94.0)) + kept("legal", **at(98.0, 104.0, 102.0))
    ends, start = kept("chat", **at(97.0, 101.0)), kept("coder", **{"": 100.0})  # coder: not in the table
    recorded("fidelity", all_three)
    assert (
        readme_fidelity.over_time().splitlines()[-1]
        == "| mean | aware | 94.0 |  | 98.0 | 99.5 | not by 1.3 x |"
    )
    recorded("fidelity", [*all_three, *ends, *start])
    assert readme_fidelity.over_time().splitlines()[2:] == [
        "| chat | aware | 97.0 |  |  | 101.0 | 1.23 x |",
        "| legal | aware | 98.0 |  | 102.0 | 104.0 | 1.07 x |",
        "| math | aware | 90.0 |  | 94.0 | 95.0 | not by 1.3 x |",
        "| mean | aware | 95.0 |  |  | 100.0 | 1.30 x |",
    ]
    assert readme_fidelity.crossing({1.0: 100.0, 1.3: 90.0}, 100.0) == "1 x"


def test_the_training_time_of_a_method_is_the_median_over_its_variants(recorded):
    def row(name, time):
        figures = {
            "base loss": 3.0,
            "full 0.0001 loss": 2.0,
            "aware kept": 99.0,
            "aware bits": 1.05,
            "aware time": time,
        }
        return [
            {"case": f"{name}/{case}", "value": value, "spread": [98.0, 100.0]}
            for case, value in figures.items()
        ]

    recorded("fidelity", [*row("chat", 1.5), *row("legal", 1.03), *row("math", 1.02)])
    assert readme_fidelity.kept_of_all().splitlines()[-1].split(" | ")[0] == "| training time, median"
    assert readme_fidelity.kept_of_all().splitlines()[-1].split(" | ")[-2:] == ["1.03 x", " |"]


def test_a_straight_curve_is_smooth_and_a_zigzag_is_not():
    """Second differences of 1, 2, 1, 2: all +-2. What lies before the first merge does not count."""

    def run(losses):
        return Run(
            [(5, 99.0), *((20 + 5 * step, loss) for step, loss in enumerate(losses))], kept=0, merges=0
        )

    assert roughness(run([4.0, 3.0, 2.0, 1.0])) == 0.0
    assert roughness(run([1.0, 2.0, 1.0, 2.0])) == 2.0


def test_the_interval_of_a_mean_holds_it_and_shrinks_with_more_runs():
    mean, (low, high) = interval([1.0, 2.0, 3.0])
    more_mean, (more_low, more_high) = interval([1.0, 2.0, 3.0] * 16)
    assert mean == more_mean == 2.0
    assert low < more_low < 2.0 < more_high < high
