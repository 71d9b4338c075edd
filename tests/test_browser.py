"""The page in a real Chromium: what a visitor sees, on a tiny engine."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import tiny_app

from fasteagle_lite import ui

pytestmark = pytest.mark.browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 60_000  # ms that a race may take on a busy machine
STOP_WITHIN = 3.0  # seconds; about one is normal, a machine with all cores busy needs more
HOSTILE = {
    "script": "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "template": "${alert(1)} `${alert(2)}`",
    "moustache": "{{x}} {{constructor.constructor('alert(1)')()}}",
    "emoji": "🦅🐌👩‍👩‍👧 naïve",
    "arabic": "لماذا السماء زرقاء؟",
}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        if os.environ.get("CI"):
            pytest.fail("CI must run the browser tests, but there is no Chromium on the PATH.")
        pytest.skip("no Chromium on the PATH")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def engine() -> tiny_app.SlowEngine:
    return tiny_app.engine()


@pytest.fixture(scope="module")
def url(engine: tiny_app.SlowEngine) -> Iterator[str]:
    demo = ui.launch(engine, prevent_thread_lock=True, quiet=True)
    yield demo.local_url
    demo.close()


class Visitor:
    """A tab, and everything that went wrong in it."""

    def __init__(self, browser: Any, url: str, **options: Any):
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        self.context.set_default_timeout(PATIENCE)
        self.page, self.trouble = self.context.new_page(), []
        host = urlsplit(url).netloc
        self.page.on("console", lambda m: self.trouble.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.trouble.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda r: self.trouble.append(r.url) if _is_foreign(r.url, host) else None)
        self.page.goto(url)
        self.page.wait_for_selector("#fe-run")

    def ask(self, prompt: str | None = None) -> None:
        if prompt is not None:
            self.page.fill("#fe-prompt textarea", prompt)
        self.page.click("#fe-run")

    def status(self, text: str) -> str:
        """Wait for a status that contains this; returns the whole one."""
        place = self.page.locator("#fe-status p", has_text=text)
        place.wait_for()
        return place.inner_text()

    def idle(self) -> None:
        self.page.wait_for_selector("#fe-run:not([disabled])")

    def set(self, label: str, value: str) -> None:
        if not self.page.get_by_label("New tokens").is_visible():
            self.page.get_by_role("button", name="Settings").first.click()
            self.page.wait_for_timeout(500)  # fields that have just appeared take their defaults a moment later
        field = self.page.get_by_label(label).first
        field.fill(value)
        field.blur()

    def lane_texts(self) -> list[str]:
        return self.page.locator("#fe-board .fe-text p").all_inner_texts()


def _is_foreign(address: str, host: str) -> bool:
    parts = urlsplit(address)
    return parts.scheme not in ("data", "blob") and parts.netloc != host


@pytest.fixture
def visit(browser: Any, url: str) -> Iterator[Any]:
    visitors = []

    def open_tab(query: str = "", at: str = url, **options: Any) -> Visitor:
        visitors.append(Visitor(browser, at + query, **options))
        return visitors[-1]

    yield open_tab
    for visitor in visitors:
        visitor.context.close()
    assert [visitor.trouble for visitor in visitors] == [[] for _ in visitors]


def test_a_run_finishes_with_check_marks_figures_and_a_tree(visit):
    tab = visit()
    assert "Press Run" in tab.page.inner_text("#fe-board")
    tab.ask()
    assert "identical tokens" in tab.status("Finished")
    tab.idle()
    assert tab.page.locator("#fe-board article").count() == 3
    assert tab.page.locator("#fe-board .fe-same", has_text="✓ identical to plain").count() == 2
    assert all(re.search(r"\d\.\d\d×", card) for card in tab.page.locator("#fe-board article").all_inner_texts())
    assert len(set(tab.lane_texts())) == 1 and tab.lane_texts()[0]
    assert tab.page.locator("#fe-tree svg .fe-root").count() == 1
    assert tab.page.locator("#fe-tree svg .fe-bonus").count() == 1
    assert tab.page.is_disabled("#fe-stop")


def test_the_finished_race_can_be_stepped_through(visit):
    tab = visit()
    tab.ask()
    tab.status("Finished")
    tab.idle()
    rounds = tab.page.get_by_label("number input for Round")
    rounds.fill("2")
    rounds.press("Enter")
    tab.page.locator("#fe-tree .fe-round", has_text="Round 2 ").wait_for()
    tab.page.get_by_label("EAGLE-style autoregressive").last.check()
    tab.page.locator("#fe-tree .fe-round:not(:has-text('Round 2 '))").wait_for()
    tab.page.get_by_label("Prompt lookup").last.check()
    tab.page.locator("#fe-tree", has_text="Prompt lookup took no part").wait_for()


@pytest.mark.parametrize("key", ["Enter", "Control+Enter"])
def test_the_keyboard_runs_a_race(visit, key):
    tab = visit()
    tab.set("New tokens", "8")
    tab.page.fill("#fe-prompt textarea", "Hello")
    tab.page.press("#fe-prompt textarea", key)
    tab.status("Finished")


def test_an_example_fills_the_box(visit):
    tab = visit()
    tab.page.get_by_role("button", name="Planets").click()
    tab.page.wait_for_function("document.querySelector('#fe-prompt textarea').value.includes('planets')")


def quiet_after(engine: tiny_app.SlowEngine, since: float) -> float:
    """Wait until no round has begun for a second; returns how long after `since` the last one began."""
    while time.monotonic() - engine.begun[-1] < 1.0 and time.monotonic() - since < 30:
        time.sleep(0.05)
    return engine.begun[-1] - since


@pytest.fixture
def slow() -> Iterator[tuple[tiny_app.SlowEngine, str]]:
    """A server on which a race of 96 tokens takes more than 25 seconds."""
    engine = tiny_app.engine(pause=0.1)
    demo = ui.launch(engine, prevent_thread_lock=True, quiet=True)
    yield engine, demo.local_url
    demo.close()


def test_stop_frees_the_machine(visit, slow):
    engine, url = slow
    tab = visit(at=url)
    tab.ask()
    tab.page.locator("#fe-board .fe-text span").first.wait_for()  # there is text to keep
    pressed = time.monotonic()
    tab.page.click("#fe-stop")
    tab.status("Stopped")
    tab.idle()
    assert quiet_after(engine, pressed) < STOP_WITHIN
    assert tab.page.locator("#fe-board .fe-running").count() == 0 and tab.lane_texts()[0]
    tab.set("New tokens", "4")
    tab.ask()
    tab.status("Finished")


def test_a_closed_tab_frees_the_machine(visit, slow):
    engine, url = slow
    tab = visit(at=url)
    tab.ask()
    tab.page.locator("#fe-board .fe-running").first.wait_for()
    closed = time.monotonic()
    tab.page.close()
    assert quiet_after(engine, closed) < STOP_WITHIN


def test_a_second_visitor_waits_sees_it_and_gets_their_own_result(visit, slow):
    _, url = slow
    first, second = visit(at=url), visit(at=url)
    first.ask("Tell me about rain.")
    first.page.locator("#fe-board .fe-running").first.wait_for()
    second.set("New tokens", "6")
    second.ask("Count to ten!")
    second.page.locator("#fe-run[disabled]").wait_for()
    second.page.locator("#fe-status", has_text="queue").wait_for(state="attached")
    assert second.page.locator("#fe-board article").count() == 0
    first.page.click("#fe-stop")
    second.status("Finished")
    mine, theirs = second.lane_texts(), first.lane_texts()
    assert len(set(mine)) == 1 and not theirs[0].startswith(mine[0])


@pytest.mark.parametrize("prompt", HOSTILE.values(), ids=HOSTILE)
def test_hostile_prompts_stay_text(visit, prompt):
    tab = visit()
    tab.set("New tokens", "8")
    tab.ask(prompt)
    tab.status("Finished")
    tab.idle()
    assert tab.page.input_value("#fe-prompt textarea") == prompt


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_output_stays_text(browser, text):
    """The model may write anything: here every token of every lane reads as this text."""
    engine = tiny_app.engine()
    engine.target.tokenizer.decode = lambda tokens, **_: text * len(tokens)
    demo = ui.launch(engine, prevent_thread_lock=True, quiet=True)
    try:
        tab = Visitor(browser, demo.local_url)
        tab.set("New tokens", "5")
        tab.ask()
        tab.status("Finished")
        tab.idle()
        assert tab.lane_texts() == [text * 5] * 3
        assert "script" not in {tag.lower() for tag in tab.page.eval_on_selector_all(
            "#fe-board *, #fe-tree *", "all => all.map(e => e.tagName)")}  # fmt: skip
        assert tab.page.locator("#fe-tree img, #fe-board img").count() == 0
        assert tab.trouble == []
        tab.context.close()
    finally:
        demo.close()


def test_bad_input_is_explained_and_the_page_goes_on(visit):
    tab = visit()

    def refused(message: str) -> None:
        tab.status(message)
        tab.idle()
        assert message in tab.page.inner_text("#fe-status [role=alert]"), "the notice stays"

    tab.ask("")
    refused("The prompt is empty")
    tab.ask("x" * 10_000)
    refused("Shorten the prompt")
    tab.set("Temperature", "-1")
    tab.ask("Hello")
    refused("The temperature is -1")
    tab.set("Temperature", "")
    tab.ask()
    refused("The temperature is missing")
    tab.set("Temperature", "0")
    tab.set("New tokens", "4")
    tab.ask()
    tab.status("Finished")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 375])
def test_every_size_and_scheme_fits_and_is_readable(visit, scheme, width):
    tab = visit(f"?__theme={scheme}", viewport={"width": width, "height": 800})
    tab.set("New tokens", "24")
    tab.ask()
    tab.status("Finished")
    tab.idle()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    lefts = {round(card.bounding_box()["x"]) for card in tab.page.locator("#fe-board article").all()}
    assert len(lefts) == (3 if width > 1000 else 1)
    dark = sum(int(c) for c in re.findall(r"\d+", _style(tab, "body", "backgroundColor"))[:3]) < 3 * 128
    assert dark == (scheme == "dark")
    for selector, style in (("#fe-board .fe-text p", "color"), ("#fe-tree svg .fe-root text", "fill")):
        light_text = sum(int(c) for c in re.findall(r"\d+", _style(tab, selector, style))[:3]) > 3 * 128
        assert light_text == dark, f"{selector} is invisible in {scheme}"
    assert _style(tab, "#fe-tree svg .fe-bonus rect", "fill") != "rgb(0, 0, 0)"


def _style(tab: Visitor, selector: str, name: str) -> str:
    return tab.page.locator(selector).first.evaluate(f"e => getComputedStyle(e).{name}")
