"""Costs: the stopping rule against brute force, the pace against plain decoding, and what is measured."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tiny

from fasteagle_lite.costs import PATIENCE, Costs, Pace, convex, measure_verify
from fasteagle_lite.tree import TreeConfig, grow

VERIFY = convex({1: 1.0, 2: 1.01, 4: 1.05, 8: 1.2, 16: 1.7})


def rate(costs: Costs, probabilities: list[float], size: int, passes: int) -> float:
    return (1 + sum(probabilities[: size - 1])) / (costs.spent(passes) + costs.verify[size - 1])


@pytest.mark.parametrize("seed", range(50))
def test_growing_stops_at_the_best_rate(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = Costs(VERIFY, draft=float(rng.uniform(0, 0.4)), step=float(rng.uniform(0, 0.2)))
    probabilities = sorted(rng.beta(0.3, 3, size=20).tolist(), reverse=True)
    passes, size, expected = int(rng.integers(1, 4)), 1, 1.0
    while costs.node_pays(probabilities[size - 1], size, expected, passes):
        expected += probabilities[size - 1]
        size += 1
    best = max(rate(costs, probabilities, n, passes) for n in range(1, costs.most + 1))
    assert rate(costs, probabilities, size, passes) == pytest.approx(best)


def test_a_larger_share_of_the_round_spent_on_drafting_makes_larger_trees() -> None:
    def size(draft: float) -> int:
        costs, n, expected = Costs(VERIFY, draft=draft), 1, 1.0
        while costs.node_pays(0.3 * 0.6**n, n, expected, 1):
            n, expected = n + 1, expected + 0.3 * 0.6**n
        return n

    assert size(0.0) < size(0.5) < size(5.0)


@pytest.mark.parametrize("seed", range(50))
def test_convex_lies_below_touches_and_is_the_largest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = sorted(rng.choice(np.arange(2, 30), size=6, replace=False).tolist())
    measured = {int(n): float(rng.uniform(1, 2)) for n in [1, *sizes]}
    values = convex(measured)
    least = {n: min(s for m, s in measured.items() if m >= n) for n in measured}
    slopes = np.diff(values)
    assert len(values) == sizes[-1]
    assert (slopes >= -1e-12).all()
    assert (np.diff(slopes) >= -1e-9).all()
    # The largest convex function below some points is at every place the least of all chords over it.
    for n in range(1, sizes[-1] + 1):
        chords = [least[n]] if n in least else []
        for a, b in itertools.combinations(sorted(least), 2):
            if a <= n <= b:
                chords.append(least[a] + (n - a) / (b - a) * (least[b] - least[a]))
        assert values[n - 1] == pytest.approx(min(chords))


@pytest.mark.parametrize("kind", ["chain", "best_first"])
def test_a_tree_without_worthwhile_nodes_is_the_root_alone(kind: str) -> None:
    def expand(depth: int, parent: int) -> list[tuple[int, float]]:
        return [(depth, math.log(1e-6))]

    tree = grow(TreeConfig(kind, adaptive=True), 7, expand, 4, 1, lambda p, size, expected: p > 0.01)
    assert (tree.tokens, tree.passes) == ((7,), 1)


def test_a_lane_that_never_accepts_loses_less_than_three_percent() -> None:
    costs = Costs(VERIFY, draft=0.2)
    pace, seconds, rounds = Pace(costs), 0.0, 400
    for _ in range(rounds):
        if pace.drafts():
            pace.record(tokens=1, size=6, passes=1)
            seconds += costs.spent(1) + costs.verify[5]
        else:
            seconds += costs.verify[0]
    assert seconds / (rounds * costs.verify[0]) < 1.03
    assert pace.pause == PATIENCE


def test_a_lane_that_pays_never_rests() -> None:
    pace = Pace(Costs(VERIFY, draft=0.2))
    for _ in range(100):
        assert pace.drafts()
        pace.record(tokens=2, size=6, passes=1)


def test_drafting_resumes_when_it_pays_again() -> None:
    pace = Pace(Costs(VERIFY, draft=0.2))
    for _ in range(200):
        if pace.drafts():
            pace.record(tokens=1, size=6, passes=1)
    drafted = 0
    for _ in range(200):
        if pace.drafts():
            drafted += 1
            pace.record(tokens=4, size=6, passes=1)
    assert drafted > 150


def test_measured_costs_can_steer_a_tree() -> None:
    verify = measure_verify(tiny.talking_target(), context=8)
    assert len(verify) == 16
    assert min(verify) > 0
    assert (np.diff(verify) >= 0).all()
