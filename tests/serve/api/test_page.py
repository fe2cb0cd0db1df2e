"""The status page in a headless browser: it draws what is there, streams from two models, and runs nobody's markup."""

import shutil

import pytest

from tests.serve.api.stage import ScriptEngine, serving
from zen_train.serve.store import Broken
from zen_train.serve.types import HostStats

pytestmark = pytest.mark.browser

EVIL = "<img src=x onerror=window.hacked=1>"
ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    chromium = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))),
        None,
    )
    with api.sync_playwright() as playwright:
        try:
            running = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no Chromium to start (apt install chromium): {str(error).splitlines()[0]}")
        yield running
        running.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    engine = ScriptEngine(
        reply=lambda job: f"{job.variant_hash or 'base'} says <b>hello</b> & 🙂 " * 2, step_s=0.002
    )
    with serving(
        tmp_path_factory.mktemp("page"), engine=engine, names=("zen4-coder", "zen4-math", EVIL)
    ) as running:
        running.catalogue.broken = (Broken(folder=running.catalogue.root, reason=f"no such tensor {EVIL}"),)
        for _ in range(3):
            for name in ("zen4-coder", "tiny", EVIL):
                running.client().chat.completions.create(model=name, messages=ASK)
        running.http().post("/v1/pin", json={"model": "zen4-coder"})
        yield running


@pytest.fixture
def page(browser, stage):
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    opened = context.new_page()
    opened.problems = []
    opened.on(
        "console", lambda message: opened.problems.append(message.text) if message.type == "error" else None
    )
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.goto(stage.url + "/")
    opened.wait_for_selector("#models tbody tr:nth-child(4)")
    yield opened
    assert opened.problems == []
    context.close()


def test_it_shows_every_model_with_its_tier_and_times(page):
    rows = page.locator("#models tbody tr").all_inner_texts()
    coder = next(row for row in rows if row.startswith("zen4-coder"))
    assert "device, pinned" in coder
    assert "ms" in coder
    assert rows[0].startswith("tiny")
    assert "base" in rows[0]
    assert "disk" in next(row for row in rows if row.startswith("zen4-math"))
    assert page.locator("#state").inner_text() == "ready"
    assert "2.0 kB of 4.0 kB" in page.locator("#device-text").inner_text()
    assert page.locator("#device-bar").evaluate("bar => bar.style.width") == "50%"
    assert page.locator("#models svg polyline").count() >= 2


def test_it_shows_host_memory_where_there_is_a_host_tier(page, stage):
    assert page.locator("#host-meter").is_hidden()
    stage.engine.host = HostStats(
        budget_bytes=4000, resident={"hash-of-zen4-math": 1000}, hits=0, lookups=1, read_bytes=1000
    )
    page.wait_for_selector("#host-meter:not([hidden])")
    assert page.locator("#host-text").inner_text() == "1.0 kB of 4.0 kB"
    assert page.locator("#host-bar").evaluate("bar => bar.style.width") == "25%"
    row = page.locator("#models tbody tr", has_text="zen4-math")
    assert "host" in row.inner_text()
    stage.engine.host = None
    page.wait_for_selector("#host-meter", state="hidden")


def test_names_and_reasons_are_text_and_never_markup(page):
    assert page.locator("#models tbody th", has_text=EVIL).count() == 1
    assert EVIL in page.locator("#broken").inner_text()
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_the_browser_may_run_no_inline_script(page):
    page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 1';"
        " document.body.append(s); }"
    )
    assert page.evaluate("window.hacked") is None
    page.problems.clear()  # the browser says that it refused


def test_a_prompt_goes_to_the_variant_and_to_the_base_and_both_stream(page, stage):
    page.select_option("#variant", "zen4-coder")
    page.fill("#prompt", "tell me <i>all</i>")
    page.click("#send")
    page.wait_for_function("() => document.getElementById('send').disabled === false && "
                           "document.getElementById('left-facts').textContent.includes('first after')")  # fmt: skip
    assert (
        page.locator("#left").inner_text().strip()
        == ("hash-of-zen4-coder says <b>hello</b> & 🙂 " * 2).strip()
    )
    assert page.locator("#right").inner_text().startswith("base says <b>hello</b>")
    assert page.locator("#left-name").inner_text() == "zen4-coder"
    assert page.locator("#right-name").inner_text() == "tiny (base)"
    assert page.locator("#left b").count() == 0
    assert stage.engine.jobs_seen[-1].sampling.temperature == 0


def test_stop_ends_both_streams_and_frees_the_engine(page, stage):
    stage.engine.go.clear()
    page.fill("#prompt", "x")
    page.click("#send")
    stage.until(lambda: len(stage.engine.jobs) == 2, "two jobs")
    page.click("#cancel")
    stage.until(lambda: not stage.engine.jobs, "no job")
    stage.engine.go.set()
    page.wait_for_function("() => document.getElementById('left-facts').textContent === 'stopped'")
    assert page.locator("#send").is_enabled()


def test_an_error_is_told_beside_the_answer(page, stage):
    stage.engine.broken.add("hash-of-zen4-math")
    page.select_option("#variant", "zen4-math")
    page.fill("#prompt", "x")
    page.click("#send")
    page.wait_for_function("() => document.getElementById('left-facts').textContent.includes('digest')")
    page.wait_for_function("() => document.getElementById('right-facts').textContent.includes('tokens')")
    page.problems.clear()  # the browser notes every 503


@pytest.mark.parametrize(("width", "scheme"), [(375, "light"), (375, "dark"), (1200, "dark")])
def test_it_fits_a_phone_and_follows_the_colour_scheme(browser, stage, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(stage.url + "/")
    page.wait_for_selector("#models tbody tr")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(22, 23, 24)" if scheme == "dark" else "rgb(247, 247, 245)")
    context.close()


def test_it_asks_for_a_key_when_the_server_does(browser, tmp_path):
    with serving(tmp_path, api_keys=("secret",)) as stage:
        context = browser.new_context()
        page = context.new_page()
        page.goto(stage.url + "/")
        page.wait_for_selector("#key-form:not([hidden])")
        page.fill("#key", "secret")
        page.click("#key-form button")
        page.wait_for_selector("#models tbody tr")
        assert page.locator("#key-form").is_hidden()
        assert page.locator("#state").inner_text() == "ready"
        context.close()


def test_a_server_that_is_gone_is_said_so(browser, tmp_path):
    context = browser.new_context()
    page = context.new_page()
    with serving(tmp_path) as stage:
        page.goto(stage.url + "/")
        page.wait_for_selector("#models tbody tr")
    page.wait_for_function("() => document.getElementById('state').textContent === 'no connection'")
    context.close()
