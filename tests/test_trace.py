"""Records: there and back through JSON, their sums, and files that are none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fasteagle_lite.errors import UserError
from fasteagle_lite.trace import Round, Trace, mean_accepted_length

FIRST = Round(
    index=0,
    tokens=(5, 6, 7, 8),
    parents=(-1, 0, 0, 2),
    logprobs=(0.0, -0.25, -1.5, -0.125),
    node_text=("a", "b", "ü", "\ufffd"),
    passes=1,
    accepted=(2, 3),
    bonus=9,
    bonus_text="😀",
    committed=(7, 8, 9),
    text=("ü", "", "😀"),
    draft_seconds=0.25,
    verify_seconds=1.0,
    rest_seconds=0.125,
)
LAST = replace(FIRST, index=1, accepted=(1,), committed=(6,), text=("b",))  # ended in an accepted token
TRACE = Trace(
    lane="cascade:best_first:8",
    prompt="Grüße 😀\n",
    prompt_tokens=(1, 2),
    rounds=(FIRST, LAST),
    prefill_seconds=0.5,
    finish="eos",
    settings={"max_new_tokens": 9, "tree": {"kind": "best_first"}},
    environment={"device": "cpu"},
)


def test_sums() -> None:
    assert TRACE.tokens == (7, 8, 9, 6)
    assert TRACE.text == "ü😀b"
    assert TRACE.seconds == 2.75
    assert TRACE.tokens_per_second == pytest.approx(4 / 2.75)
    assert TRACE.tau == mean_accepted_length(TRACE.rounds) == 2.0


def test_origins() -> None:
    assert FIRST.origins == ("draft", "draft", "bonus")
    assert LAST.origins == ("draft",)
    assert replace(FIRST, accepted=(), committed=(9,), text=("😀",)).origins == ("bonus",)


def test_an_empty_run() -> None:
    empty = replace(TRACE, rounds=())
    assert (empty.tau, empty.tokens_per_second, empty.text, empty.tokens) == (0.0, 0.0, "", ())


def test_json_there_and_back(tmp_path: Path) -> None:
    assert Trace.from_json(TRACE.to_json()) == TRACE
    TRACE.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == TRACE
    assert "😀" in (tmp_path / "trace.json").read_text(encoding="utf-8")


def test_another_version_is_named() -> None:
    data = json.loads(TRACE.to_json()) | {"format": 99}
    with pytest.raises(UserError, match="another version"):
        Trace.from_json(json.dumps(data))


def spoilt(**changes: object) -> str:
    return json.dumps(json.loads(TRACE.to_json()) | changes)


BAD = {
    "empty": "",
    "no json": "{",
    "a number": "5",
    "a list": "[]",
    "null": "null",
    "no rounds": json.dumps({"format": 1, "prompt_tokens": []}),
    "no prompt tokens": json.dumps({"format": 1, "rounds": []}),
    "rounds of numbers": spoilt(rounds=[1]),
    "rounds a number": spoilt(rounds=3),
    "an empty round": spoilt(rounds=[{}]),
    "an unknown field": spoilt(surprise=1),
    "prompt tokens a number": spoilt(prompt_tokens=1),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_bad_files_are_explained(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(UserError, match="trace"):
        Trace.load(tmp_path / "bad.json")


def test_unreadable_files_are_explained(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "missing.json", tmp_path, tmp_path / "binary.json"):
        with pytest.raises(UserError, match="cannot be read"):
            Trace.load(file)
