"""The race: its handlers, and the part of the page that they serve."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from ..drafters.autoregressive import AutoregressiveDrafter
from ..drafters.cascade import CascadeDrafter
from ..engine import DEFAULT_TREES, TITLES, Engine
from ..errors import UserError
from .order import LANES, Order
from .result import Result

# Everything that runs the model shares this place in the queue: lanes that are timed must never contend.
MODEL = "model"
FRAMES_PER_SECOND = 12
PAGE_SHARE = 0.25  # of a race's wall time at most; so a very long output is drawn less often, not run more slowly

EXAMPLES = {
    "Blue sky": "Why is the sky blue?",
    "Python": "Write a Python function that checks whether a string is a palindrome.",
    "Planets": "List the planets of the solar system, one a line.",
    "Story": "Tell a short story about an eagle who teaches a snail to fly.",
    "Repeat": "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
}
TREE_NAMES = {
    "best_first": "best-first (DDTree)",
    "backbone": "backbone (FastEagle)",
    "dynamic": "dynamic (EAGLE-2)",
    "chain": "chain",
}
EMPTY = """
<div class="fe-empty"><h3>Press Run, and watch the same answer being written several times.</h3><ol>
<li><b>Draft</b> A small drafter guesses the next few tokens, as a tree of alternatives.</li>
<li><b>Verify</b> The language model checks the whole tree in a single pass.</li>
<li><b>Keep</b> What it agrees with is kept, and it adds one <i>bonus</i> token of its own. Nothing else enters the text.</li>
</ol></div>"""
EMPTY_TREE = (
    '<p class="fe-empty-tree">The tree of every round will be drawn here: what was guessed, and what was kept.</p>'
)


def offered(engine: Engine) -> list[str]:
    """The lanes that can run: neural drafters need a checkpoint."""
    return [name for name in LANES if name in ("none", "lookup") or name in engine.models]


class Handlers:
    """What the page calls.  Holds the shared engine only; a visitor's result travels through `gr.State`."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def run(self, shown: str, *fields: Any) -> Iterator[tuple[Any, ...]]:
        """Run a race, yielding the whole state of the page: status, lanes, tree, result, round slider."""
        try:
            order = Order.of(*fields)
            lanes = [spec.drafter for spec in order.specs]
            result = Result(order, shown if shown in lanes else lanes[-1])
            yield _note("Reading the prompt…"), gr.skip(), gr.skip(), result, gr.Slider(visible=False)
            contest = order.contest(self.engine)
        except UserError as error:
            yield notice(str(error)), EMPTY, EMPTY_TREE, None, gr.Slider(visible=False)
            return
        due = 0.0
        for _ in contest:
            begun = time.monotonic()
            if begun < due:
                continue
            result.traces = contest.traces()
            yield _note("Racing…"), result.lanes(), result.tree(), result, gr.skip()
            cost = time.monotonic() - begun  # the page is rendered and sent before the generator goes on
            due = begun + max(1 / FRAMES_PER_SECOND, cost / PAGE_SHARE)
        result.traces, result.running = contest.traces(), False
        yield _finished(result)

    def settle(self, result: Result | None) -> tuple[Any, ...]:
        """The page behind a race, however it ended; one that was stopped, or broke, is shown as it was left."""
        if result is None or not result.running:
            return (gr.skip(),) * 5
        result.running = False
        if not result.traces:
            return _note("Stopped."), gr.skip(), gr.skip(), gr.skip(), gr.skip()
        return _finished(result)

    def show_lane(self, result: Result | None, lane: str) -> tuple[Any, Any]:
        """Draw another lane's tree: tree, round slider."""
        if result is None:
            return gr.skip(), gr.skip()
        result.shown = lane
        if result.running:
            return result.tree() or _absent(lane), gr.skip()
        return _fullest_tree(result), _slider(result)

    def show_round(self, result: Result | None, number: float) -> Any:
        return gr.skip() if result is None or result.running else result.tree(int(number))

    def compare(
        self,
        prompt: str,
        lanes: list[str],
        max_new_tokens: int = 96,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        cascade_tree: str = "best_first",
        autoregressive_tree: str = "dynamic",
        budget: int = DEFAULT_TREES["cascade"].budget,
    ) -> dict[str, Any]:
        """Race `lanes` (of autoregressive, cascade, lookup) against plain decoding; returns figures and texts."""
        try:
            order = Order.of(
                prompt,
                lanes,
                max_new_tokens,
                temperature,
                top_p,
                top_k,
                seed,
                cascade_tree,
                autoregressive_tree,
                budget,
            )
            contest = order.contest(self.engine)
        except UserError as error:
            raise gr.Error(str(error), print_exception=False) from None
        for _ in contest:
            pass
        return Result(order, "none", contest.traces(), running=False).figures()


def notice(message: str) -> str:
    """Bad input, explained."""
    return f'<p class="fe-notice" role="alert">{escape(message)}</p>'


def _note(message: str) -> str:
    return f'<p class="fe-status" role="status">{escape(message)}</p>'


def _finished(result: Result) -> tuple[Any, ...]:
    return _note(result.summary()), result.lanes(), _fullest_tree(result), result, _slider(result)


def _slider(result: Result) -> Any:
    count = len(result.rounds)
    return gr.Slider(maximum=max(count, 2), value=max(result.fullest, 1), visible=count > 1)


def _fullest_tree(result: Result) -> str:
    return result.tree(result.fullest) or _absent(result.shown)


def _absent(lane: str) -> str:
    return f'<p class="fe-empty-tree">{escape(TITLES[lane])} took no part in this race.</p>'


@dataclass(frozen=True)
class RaceTab:
    """What other tabs build on: the visitor's last `Result`, and the event that follows a race, however it ended."""

    result: gr.State
    settled: Any


def build_race(engine: Engine) -> RaceTab:
    """Lay out the race inside the current `gr.Tab` and connect it."""
    handlers, names = Handlers(engine), offered(engine)
    drafters = [name for name in names if name != "none"]
    with gr.Column(elem_id="fe-ask"):
        prompt = gr.Textbox(
            EXAMPLES["Blue sky"], label="Prompt", lines=1, max_lines=8, autofocus=True, elem_id="fe-prompt",
            placeholder="Ask something. Enter runs the race, Shift+Enter breaks the line.",
        )  # fmt: skip
        with gr.Row(elem_id="fe-actions"):
            with gr.Row(elem_id="fe-examples"):
                for name, text in EXAMPLES.items():
                    gr.Button(name, size="sm", min_width=40).click(None, None, prompt, js=f"() => {json.dumps(text)}")
            run = gr.Button("Run", variant="primary", elem_id="fe-run", min_width=120)
            stop = gr.Button("Stop", interactive=False, elem_id="fe-stop", min_width=90)
    with gr.Accordion("Settings", open=False, elem_id="fe-settings"):
        lanes = gr.CheckboxGroup(
            [(TITLES[name], name) for name in drafters],
            value=[name for name in drafters if name in engine.models] or drafters,
            label="Lanes beside plain decoding",
        )
        with gr.Row():
            tokens = gr.Number(96, label="New tokens", min_width=110)
            budget = gr.Number(DEFAULT_TREES["cascade"].budget, label="Nodes a round", min_width=110)
            temperature = gr.Number(0, label="Temperature (0: greedy)", step=0.1, min_width=110)
            top_p = gr.Number(1, label="Top-p", step=0.05, min_width=110)
            top_k = gr.Number(0, label="Top-k (0: off)", min_width=110)
            seed = gr.Number(0, label="Seed", min_width=110)
        with gr.Row():
            trees = [
                gr.Radio(
                    [(TREE_NAMES[kind], kind) for kind in drafter.TREES],
                    value=DEFAULT_TREES[drafter.name].kind,
                    label=f"Tree of the {TITLES[drafter.name]}",
                    visible=drafter.name in engine.models,
                )
                for drafter in (CascadeDrafter, AutoregressiveDrafter)
            ]
    status = gr.HTML(apply_default_css=False, elem_id="fe-status")
    board = gr.HTML(EMPTY, apply_default_css=False, elem_id="fe-board")
    with gr.Column(elem_id="fe-trees"):
        with gr.Row(elem_id="fe-tree-controls"):
            lane = gr.Radio(
                [(TITLES[name], name) for name in names],
                value="cascade" if "cascade" in names else drafters[0],
                label="Draft tree of",
            )
            step = gr.Slider(1, 2, value=1, step=1, label="Round", visible=False)
        tree = gr.HTML(EMPTY_TREE, apply_default_css=False, elem_id="fe-tree")

    result = gr.State(time_to_live=3600)
    page = [status, board, tree, result, step]
    hidden: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
    triggers = [run.click, prompt.submit]
    buttons = [run, stop]
    # Stands before the race: the browser serves the listeners of one event in this order.
    gr.on(triggers, lambda: _buttons(busy=True), None, buttons, **hidden)
    race = gr.on(
        triggers,
        handlers.run,
        [lane, prompt, lanes, tokens, temperature, top_p, top_k, seed, *trees, budget],
        page,
        show_progress="minimal",
        show_progress_on=status,
        trigger_mode="once",
        concurrency_id=MODEL,
        concurrency_limit=1,
        api_visibility="undocumented",
        api_name="race",
    )
    # Follows a finished race and a cancelled one, when no frame of it can arrive any more.
    settled = race.then(lambda r: (*handlers.settle(r), *_buttons(busy=False)), result, [*page, *buttons], **hidden)
    stop.click(None, cancels=[race])
    lane.input(handlers.show_lane, [result, lane], [tree, step], **hidden)
    step.input(handlers.show_round, [result, step], tree, trigger_mode="always_last", **hidden)
    gr.api(handlers.compare, api_name="compare", concurrency_id=MODEL, concurrency_limit=1)
    return RaceTab(result, settled)


def _buttons(busy: bool) -> tuple[Any, Any]:
    return gr.Button("Running…" if busy else "Run", interactive=not busy), gr.Button(interactive=busy)
