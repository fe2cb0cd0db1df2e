"""report.html: self-contained, escaped, small, and complete."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from zen_train.errors import OutputError
from zen_train.report import Curves, Losses, Sample, TensorRow, TrainPoint, render_html, write_html
from zen_train.report.page import flat_settings

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Collects tags and text, and insists that every element is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all_text(self):
        return " ".join(" ".join(self.text).split())


def test_page_shows_the_headline_figures(results):
    text = Page(render_html(results)).all_text()
    for shown in (
        "93.9 %",
        "2.1438",
        "1.7391",
        "1.7127",
        "70.6 MB",
        "rolled back",
        "q_proj",
        "svd_average",
        "4 min 11 s",
    ):
        assert shown in text


def test_page_makes_no_request(results):
    text = render_html(results)
    page = Page(text)
    for _, attributes in page.tags:
        assert not {"src", "href", "srcset", "action", "data"} & attributes.keys()
    assert "url(" not in text
    assert "@import" not in text
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_only_our_own_script_may_run(results):
    text = render_html(results)
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


def test_text_from_outside_is_shown_and_never_run(results):
    hostile = replace(
        results,
        variant=HOSTILE,
        base=replace(results.base, name=HOSTILE),
        places=replace(results.places, run=HOSTILE),
        config={"nested": {"key": HOSTILE}, HOSTILE: 1},
        samples=(Sample(prompt=HOSTILE, base=HOSTILE, fine_tune=HOSTILE, delta=HOSTILE),),
        tensors=(TensorRow(name=HOSTILE, kind=HOSTILE, shape=(1, 2), stored_bytes=1, relative_error=0.5),),
        warnings=(HOSTILE,),
    )
    page = Page(render_html(hostile))
    assert sum(tag == "script" for tag, _ in page.tags) == 2  # the curve's data and our own
    assert not any(tag == "img" for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.all_text().count("alert('x')") >= 8
    assert "{{ 7*7 }}" in page.all_text()


def test_a_long_run_of_a_large_model_stays_small(make_run):
    text = render_html(make_run(layers=80, steps=10_000, merge_every=1000))
    Page(text)
    assert len(text.encode()) < 400_000


def test_a_run_with_nothing_measured_still_gives_a_page(results):
    bare = replace(
        results,
        losses=Losses(base=None, fine_tune=None, delta=None, tokens=0),
        curves=Curves(),
        tensors=(),
        samples=(),
        merge=None,
        config={},
        data=(),
        size=replace(results.size, by_kind=()),
        seconds=replace(
            results.seconds, train=None, merge=None, validate=None, export=None, evaluate=None, total=None
        ),
    )
    text = Page(render_html(bare)).all_text()
    assert "No finite loss was recorded" in text
    assert "the held-out loss of the base is missing" in text


def test_losses_that_are_not_finite_leave_a_gap_and_no_nan(results):
    points = tuple(TrainPoint(step=step, loss=float("nan") if step == 3 else 2.0) for step in range(1, 6))
    text = render_html(replace(results, curves=replace(results.curves, train=points)))
    assert not re.search(r"\bnan\b|Infinity", text, flags=re.IGNORECASE)


def test_settings_are_shown_as_they_are_typed():
    config = {"optim": {"betas": [0.9, 0.95], "empty": {}}, "resume": None, "name": "coder", "on": True}
    assert flat_settings(config) == [
        ("optim.betas", "[0.9, 0.95]"),
        ("optim.empty", "{}"),
        ("resume", "null"),
        ("name", "coder"),
        ("on", "true"),
    ]


def test_page_is_replaced_whole_and_a_bad_folder_is_named(results, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    write_html(results, path)
    assert path.read_text().startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OutputError, match="nowhere"):
        write_html(results, tmp_path / "nowhere" / "report.html")
