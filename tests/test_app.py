"""The page without a browser: its handlers as functions, and its server as a client sees it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import tiny_app
from gradio_client import Client
from gradio_client.exceptions import AppError

import app
from fasteagle_lite import ui
from fasteagle_lite.engine import LaneSpec
from fasteagle_lite.errors import UserError
from fasteagle_lite.ui.order import Order
from fasteagle_lite.ui.race_tab import FRAMES_PER_SECOND, Handlers, offered
from fasteagle_lite.ui.result import Result, difference

FIELDS: dict[str, Any] = {
    "prompt": "Why is the sky blue?",
    "lanes": ["autoregressive", "cascade", "lookup"],
    "max_new_tokens": 24,
    "temperature": 0,
    "top_p": 1,
    "top_k": 0,
    "seed": 0,
    "cascade_tree": "best_first",
    "autoregressive_tree": "dynamic",
    "budget": 8,
}
BAD = [
    ({"prompt": ""}, "The prompt is empty"),
    ({"prompt": " \n"}, "The prompt is empty"),
    ({"prompt": None}, "The prompt is empty"),
    ({"prompt": "x" * 10_000}, "Shorten the prompt"),
    ({"max_new_tokens": 0}, "at least 1"),
    ({"max_new_tokens": 100_000}, "exceed the model's context"),
    ({"max_new_tokens": 2.5}, "whole number"),
    ({"max_new_tokens": None}, "The number of new tokens is missing"),
    ({"temperature": -1}, "The temperature is -1"),
    ({"temperature": None}, "The temperature is missing"),
    ({"temperature": math.nan}, "The temperature is missing"),
    ({"top_p": 0}, "top-p is 0"),
    ({"top_p": 1.5}, "top-p is 1.5"),
    ({"top_p": None}, "Top-p is missing"),
    ({"top_k": -1}, "top-k is -1"),
    ({"seed": -1}, "The seed is -1"),
    ({"seed": "seven"}, "The seed is missing"),
    ({"budget": 0}, "budget is 0"),
    ({"budget": 1000}, "at most 256"),
    ({"budget": None}, "The node budget is missing"),
    ({"cascade_tree": "oak"}, "Unknown tree 'oak'"),
    ({"lanes": ["medusa"]}, "Unknown drafter 'medusa'"),
]


@pytest.fixture(scope="module")
def engine() -> tiny_app.SlowEngine:
    return tiny_app.engine()


@pytest.fixture(scope="module")
def server(engine: tiny_app.SlowEngine) -> Iterator[str]:
    demo = ui.launch(engine, prevent_thread_lock=True, quiet=True)
    yield demo.local_url
    demo.close()


@pytest.fixture
def client(server: str) -> Client:
    return Client(server, verbose=False)


def frames(engine: tiny_app.SlowEngine, shown: str = "cascade", **changes: Any) -> list[tuple[Any, ...]]:
    return list(Handlers(engine).run(shown, *(FIELDS | changes).values()))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1, "top_p": 0.9, "top_k": 40, "seed": 7}])
def test_a_race_ends_with_identical_lanes(engine, sampling):
    status, board, tree, result, slider = frames(engine, **sampling)[-1]
    assert "Every lane gave identical tokens" in status
    assert board.count("✓ identical to plain") == 3 and 'data-state="running"' not in board
    assert board.index("Plain decoding") < board.index("EAGLE-style") < board.index("FastEagle") < board.index("lookup")
    assert "<svg" in tree and not result.running and slider.value == result.fullest
    assert [len(trace.tokens) for trace in result.traces] == [24] * 4


def test_plain_decoding_alone_is_a_race_too(engine):
    status, board, *_ = frames(engine, lanes=None)[-1]
    assert "Finished" in status and board.count("<article") == 1


def test_frames_are_whole_and_few():
    begun = time.monotonic()
    shown = frames(tiny_app.engine(pause=0.005), max_new_tokens=48)
    assert 3 < len(shown) <= 3 + FRAMES_PER_SECOND * (time.monotonic() - begun)
    lengths = [[len(t.tokens) for t in result.traces] for _, _, _, result, _ in shown[1:]]
    assert lengths[-1] == [48] * 4  # one record, and the page keeps it
    assert all(board.count("<article") == 4 for _, board, *_ in shown[1:])


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_input_is_explained(engine, changes, message):
    status, board, tree, result, _ = frames(engine, **changes)[-1]
    assert 'role="alert"' in status and message in status.replace("&#x27;", "'")
    assert "Press Run" in board and "svg" not in tree
    assert Handlers(engine).settle(result)[0] == {"__type__": "update"}, "the notice stays"


def test_half_a_surrogate_pair_is_no_crash(engine):
    assert "Finished" in frames(engine, prompt="\ud83e?", max_new_tokens=2)[-1][0]


def test_drafters_without_a_checkpoint_are_not_offered():
    lone = tiny_app.engine(drafters=("cascade",))
    assert offered(lone) == ["none", "cascade", "lookup"]
    assert "No autoregressive drafter is loaded" in frames(lone)[-1][0]
    assert "EAGLE-style" not in str(
        [b.get_config() for b in ui.build(lone).blocks.values() if b.get_config().get("visible")]
    )


def test_a_closed_page_runs_no_more_rounds():
    slow = tiny_app.engine(pause=0.01)
    race = Handlers(slow).run("cascade", *FIELDS.values())
    for _ in range(3):
        next(race)
    race.close()
    rounds = len(slow.begun)
    time.sleep(0.1)
    assert len(slow.begun) == rounds > 0


def test_stop_keeps_what_was_there():
    handlers = Handlers(tiny_app.engine(pause=0.01))
    race = handlers.run("cascade", *FIELDS.values())
    result = [next(race) for _ in range(3)][-1][3]
    race.close()
    status, board, tree, _, _ = handlers.settle(result)
    assert (
        "Stopped" in status and 'data-state="running"' not in board and "identical so far" in board and "<svg" in tree
    )
    assert all(update == {"__type__": "update"} for update in handlers.settle(result)), "a settled page stays"
    assert all(update == {"__type__": "update"} for update in handlers.settle(None))


def test_the_tree_can_be_stepped_through_and_its_lane_chosen(engine):
    handlers, result = Handlers(engine), frames(engine)[-1][3]
    assert "Round 1<" in handlers.show_round(result, 1) and "Round 3<" in handlers.show_round(result, 3)
    tree, slider = handlers.show_lane(result, "none")
    assert "nothing drafted" in tree and slider.maximum == 24
    alone = frames(engine, lanes=[])[-1][3]
    assert "took no part" in handlers.show_lane(alone, "cascade")[0]


def test_a_lane_that_differs_is_found_and_said(engine):
    result: Result = frames(engine)[-1][3]
    plain, other = result.traces[0], result.traces[2]
    last = other.rounds[-1]
    wrong = replace(last, committed=(*last.committed[:-1], (last.committed[-1] + 1) % 256))
    result.traces = (plain, result.traces[1], replace(other, rounds=(*other.rounds[:-1], wrong)), result.traces[3])
    assert difference(plain, result.traces[2]) == 23
    assert "1 of 3 lanes differ" in result.summary()
    assert "✕ differs from plain at token 24" in result.lanes() and result.lanes().count("✓ identical to plain") == 2
    assert [lane["first_difference"] for lane in result.figures()["lanes"]] == [None, None, 23, None]


def test_a_lane_that_is_merely_behind_does_not_differ(engine):
    plain, _, other, _ = frames(engine)[-1][3].traces
    behind = replace(other, rounds=other.rounds[:3], finish="stopped")
    assert difference(plain, behind) is None and difference(behind, plain) is None
    cut_short = replace(other, rounds=other.rounds[:3], finish="length")
    assert difference(plain, cut_short) == len(cut_short.tokens)


def test_lanes_come_in_one_order():
    order = Order.of(**FIELDS | {"lanes": ["lookup", "cascade", "cascade", "none"]})
    assert [spec.drafter for spec in order.specs] == ["none", "cascade", "lookup"]


def test_compare_answers_with_plain_figures(client):
    figures = client.predict("Why?", ["cascade", "lookup"], 16, api_name="/compare")
    assert [lane["lane"] for lane in figures["lanes"]] == [
        str(LaneSpec.of(name)) for name in ("none", "cascade", "lookup")
    ]
    assert all(lane["identical"] and lane["tokens"] == 16 for lane in figures["lanes"])
    assert figures["lanes"][0]["speedup"] == 1.0 and figures["environment"]["target"] == "tiny"


def test_compare_refuses_bad_input_with_one_sentence_and_serves_on(client):
    with pytest.raises(AppError, match="The prompt is empty"):
        client.predict("", ["cascade"], api_name="/compare")
    with pytest.raises(AppError, match="it must be 0"):
        client.predict("Why?", ["cascade"], 8, -1, api_name="/compare")
    assert client.predict("Why?", [], 2, api_name="/compare")["lanes"][0]["tokens"] == 2


def values(**changes: Any) -> list[Any]:
    return ["cascade", *(FIELDS | changes).values()]


def test_the_page_streams_and_its_trees_arrive_in_the_right_order(client):
    status, board, tree, _ = client.predict(
        *values(cascade_tree="chain", autoregressive_tree="chain"), api_name="/race"
    )
    assert "Finished" in status and "<svg" in tree
    assert board.count("chain tree, up to 8 nodes") == 3
    status, *_ = client.predict(*values(prompt=" "), api_name="/race")
    assert "The prompt is empty" in status


def test_two_visitors_get_their_own_results(server):
    prompts, results = ["Tell me about rain.", "Count to ten!"], {}

    def visit(prompt: str) -> None:
        results[prompt] = Client(server, verbose=False).predict(prompt, ["cascade"], 24, api_name="/compare")

    visitors = [threading.Thread(target=visit, args=(prompt,)) for prompt in prompts]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join(60)
    texts = [results[prompt]["lanes"][0]["text"] for prompt in prompts]
    assert [results[prompt]["prompt"] for prompt in prompts] == prompts and texts[0] != texts[1]
    for prompt, text in zip(prompts, texts, strict=True):
        assert Client(server, verbose=False).predict(prompt, [], 24, api_name="/compare")["lanes"][0]["text"] == text


def test_app_loads_warms_up_and_launches(monkeypatch, engine):
    launched = []
    monkeypatch.setattr(app.Engine, "load", lambda: engine)
    monkeypatch.setattr(app, "launch", launched.append)
    before = len(engine.begun)
    assert app.main() == 0 and launched == [engine] and len(engine.begun) > before


def test_app_explains_what_is_missing(monkeypatch, capsys):
    def fail() -> None:
        raise UserError("The target cannot be found.")

    monkeypatch.setattr(app.Engine, "load", fail)
    assert app.main() == 2
    assert capsys.readouterr().err == "fasteagle_lite: The target cannot be found.\n"
