"""The scheduler: always the lane that is furthest behind, and every round delivered."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from test_trace import FIRST

from fasteagle_lite.race import race
from fasteagle_lite.trace import Round


def lane(seconds: list[float]) -> Iterator[Round]:
    for index, s in enumerate(seconds):
        yield Round(**(vars(FIRST) | {"index": index, "draft_seconds": s, "verify_seconds": 0.0, "rest_seconds": 0.0}))


def test_order_by_hand() -> None:
    order = [(name, r.index) for name, r in race({"slow": lane([3.0, 3.0]), "fast": lane([1.0] * 4)})]
    assert order == [
        ("slow", 0), ("fast", 0), ("fast", 1), ("fast", 2), ("slow", 1), ("fast", 3)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_the_lane_furthest_behind_is_stepped(seed: int) -> None:
    rng = random.Random(seed)
    times = {name: [rng.choice([0.5, 1.0, 2.0]) for _ in range(rng.randrange(9))] for name in "abcd"}
    clocks, steps = dict.fromkeys(times, 0.0), dict.fromkeys(times, 0)
    for name, r in race({name: lane(seconds) for name, seconds in times.items()}):
        running = [n for n in times if steps[n] < len(times[n])]
        assert name == min(running, key=lambda n: clocks[n])  # of equals, the lane named first
        assert r.index == steps[name]
        steps[name] += 1
        clocks[name] += r.seconds
    assert steps == {name: len(seconds) for name, seconds in times.items()}


def test_no_round_is_computed_before_its_turn() -> None:
    begun = []

    def watched(name: str) -> Iterator[Round]:
        for r in lane([1.0, 1.0]):
            begun.append((name, r.index))
            yield r

    for seen, _ in enumerate(race({"a": watched("a"), "b": watched("b")}), start=1):
        assert len(begun) == seen


def test_no_lanes_no_rounds() -> None:
    assert list(race({})) == []
