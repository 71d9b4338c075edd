"""The benchmark's figures, checked by hand on made-up traces; its tasks; and a run on a tiny model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from test_trace import FIRST

from fasteagle_lite.bench import (
    Task,
    calibration,
    measure,
    overall,
    read_tasks,
    summarise,
    summarise_peer,
    table,
)
from fasteagle_lite.engine import Engine, LaneSpec
from fasteagle_lite.errors import UserError
from fasteagle_lite.sampling import Sampling
from fasteagle_lite.trace import Round, Trace, first_difference


def trace(*rounds: tuple[list[int], float, float, float]) -> Trace:
    """A trace of rounds given as (committed tokens, draft, verify, rest seconds)."""
    made = [
        Round(
            **(
                vars(FIRST)
                | {"index": i, "committed": tuple(committed), "passes": 2}
                | {"draft_seconds": draft, "verify_seconds": check, "rest_seconds": rest}
            )
        )
        for i, (committed, draft, check, rest) in enumerate(rounds)
    ]
    return Trace("lane", "prompt", (1,), tuple(made))


# Plain decoding: 4 tokens in 4 s, then 2 tokens in 3 s: 6 tokens in 7 s.
PLAIN = [trace(*[([i], 0.0, 0.75, 0.25) for i in range(4)]), trace(([7], 0.0, 1.0, 0.5), ([8], 0.0, 1.0, 0.5))]
# The lane: the same 4 tokens in 2 rounds and 2.5 s, then 2 tokens, one of them another, in one round and 1 s.
LANE = [trace(([0, 1, 2], 0.25, 0.5, 0.25), ([3], 0.25, 1.0, 0.25)), trace(([7, 9], 0.125, 0.75, 0.125))]


def test_one_lane_by_hand() -> None:
    figures = summarise(LANE, PLAIN)
    assert figures.pop("calibration") == calibration([r for trace in LANE for r in trace.rounds])
    assert figures == {
        "prompts": 2,
        "tokens": 6,
        "rounds": 3,
        "tokens_per_second": round(6 / 3.5, 2),
        "speedup": 2.0,  # 7/6 s a token against 3.5/6
        "tau": 2.0,
        "identical": 0.5,
        "draft_ms": round(625 / 3, 2),
        "verify_ms": 750.0,
        "rest_ms": round(625 / 3, 2),
        "overhead": round(0.25 / 0.75, 4),  # medians
        "passes": 2.0,
        "nodes": float(len(FIRST.tokens)),
    }
    assert summarise(PLAIN, PLAIN)["speedup"] == 1.0
    assert summarise(PLAIN, PLAIN)["identical"] == 1.0


def test_calibration_by_hand() -> None:
    """Root 0 with children 1 (p 0.72, accepted) and 2 (p 0.21); 3 under 1 (p 0.5, rejected), 4 under 2: never asked."""
    made = Round(
        **(
            vars(FIRST)
            | {"tokens": (5, 6, 7, 8, 9), "parents": (-1, 0, 0, 1, 2), "accepted": (1,), "committed": (6, 4)}
            | {"logprobs": tuple(math.log(p) for p in (1.0, 0.72, 0.21, 0.5, 0.9))}
        )
    )
    bins = calibration([made, made])
    assert set(bins) == {"1", "2"}
    assert bins["1"][7] == [2, 1.44, 2]
    assert bins["1"][2] == [2, 0.42, 0]
    assert bins["2"][5] == [2, 1.0, 0]
    assert sum(row[0] for rows in bins.values() for row in rows) == 6


def test_the_speedup_is_of_time_per_token() -> None:
    """A lane that was stopped early is not faster for it."""
    half = [trace(([0], 0.0, 0.75, 0.25), ([1], 0.0, 0.75, 0.25))]
    assert summarise(half, PLAIN[:1])["speedup"] == 1.0


def test_a_peer_by_hand() -> None:
    # 4 tokens at 0.5 s and 2 tokens at 2 s: 6 s for 6 tokens, against plain decoding's 7 s.
    assert summarise_peer([((0, 1, 2, 3), 0.5), ((7, 9), 2.0)], PLAIN) == {
        "tokens_per_second": 1.0,
        "speedup": round(7 / 6, 3),
        "identical": 0.5,
    }


def test_all_tasks_by_hand() -> None:
    cell = summarise(LANE, PLAIN)
    results = {
        "lanes": ["x"],
        "tasks": {
            "a": {"x": cell | {"speedup": 2.0, "tau": 3.0, "prompts": 1, "identical": 1.0, "overhead": 0.1}},
            "b": {"x": cell | {"speedup": 8.0, "tau": 2.0, "prompts": 3, "identical": 0.0, "overhead": 0.4}},
        },
    }
    assert overall(results) == {"x": {"tau": 2.5, "speedup": pytest.approx(4.0), "identical": 0.25, "overhead": 0.4}}
    rows = table(results).splitlines()
    assert len(rows) == 2 + 2 + 1
    assert len({row.count("|") for row in rows}) == 1
    assert "4.00x" in rows[-1]
    assert "25%" in rows[-1]


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2, 3], [1, 2], 2), ([1], [1, 2], 1), ([4], [5], 0)],
)
def test_first_difference(one: list[int], other: list[int], at: int | None) -> None:
    assert first_difference(trace((one, 0, 1, 0)), trace((other, 0, 1, 0))) == at


def questions(file: Path, prompts: list[Any]) -> Path:
    file.write_text("\n\n".join(json.dumps({"question_id": i, "turns": [p, "more"]}) for i, p in enumerate(prompts)))
    return file


def test_tasks_are_read_from_files_and_folders(tmp_path: Path) -> None:
    questions(tmp_path / "b.jsonl", ["one", "zwei ü", "three"])
    questions(tmp_path / "a.jsonl", ["eins"])
    assert read_tasks([tmp_path], None) == [Task("a", ("eins",)), Task("b", ("one", "zwei ü", "three"))]
    assert read_tasks([tmp_path / "b.jsonl"], 2) == [Task("b", ("one", "zwei ü"))]


BAD_TASKS = {
    "no json": "{",
    "no turns": '{"question": "a"}',
    "no prompts in turns": '{"turns": []}',
    "turns a number": '{"turns": 5}',
    "a list": "[1]",
    "a prompt that is a number": '{"turns": [5]}',
    "empty": "\n \n",
}


@pytest.mark.parametrize("content", BAD_TASKS.values(), ids=BAD_TASKS.keys())
def test_bad_tasks_are_explained(content: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"bad\.jsonl"):
        read_tasks([tmp_path / "bad.jsonl"], None)


def test_missing_tasks_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.jsonl cannot be read"):
        read_tasks([tmp_path / "missing.jsonl"], None)
    with pytest.raises(UserError, match=r"No \.jsonl files"):
        read_tasks([tmp_path], None)
    with pytest.raises(UserError, match="--limit is 0"):
        read_tasks([tmp_path], 0)


def test_a_run(target_folder: Path, checkpoints: Path, tmp_path: Path) -> None:
    engine = Engine.load(str(target_folder), checkpoints=checkpoints)
    specs = [LaneSpec.parse(text) for text in ("cascade", "lookup", "autoregressive:chain:4")]
    tasks = [Task("first", ("Hi", "Who?")), Task("second", ("Why?",))]
    out = tmp_path / "results.json"
    results = measure(engine, tasks, specs, 12, Sampling(1.0, seed=2), command="a command", out=out)
    assert json.loads(out.read_text()) == results
    assert results["lanes"] == [
        "none",
        str(LaneSpec.of("cascade")),
        str(LaneSpec.of("lookup")),
        "autoregressive:chain:4",
    ]
    assert results["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 2}
    assert (results["command"], results["max_new_tokens"]) == ("a command", 12)
    assert results["environment"]["target"] == str(target_folder)
    assert {task: cells["none"]["prompts"] for task, cells in results["tasks"].items()} == {"first": 2, "second": 1}
    assert all(cell["identical"] == 1.0 for cells in results["tasks"].values() for cell in cells.values())
    assert results["tasks"]["first"]["none"]["tau"] == 1.0


def test_peers_run_on_the_same_prompts(target_folder: Path, checkpoints: Path) -> None:
    engine = Engine.load(str(target_folder), checkpoints=checkpoints)
    results = measure(engine, [Task("t", ("Hi", "Who?"))], [], 12, Sampling(), peers=True)
    assert results["peers"]["t"]["identical"] == 1.0
    assert results["peers"]["t"]["tokens_per_second"] > 0
    assert "transformers generate" in table(results)


def test_an_unwritable_result_is_noticed_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny

    (tmp_path / "file").touch()
    engine = Engine(tiny.talking_target())
    monkeypatch.setattr(Engine, "run", lambda *_: pytest.fail("work was done"))
    with pytest.raises(UserError, match="could not be written"):
        measure(engine, [Task("t", ("Hi",))], [], 8, Sampling(), out=tmp_path / "file" / "results.json")
