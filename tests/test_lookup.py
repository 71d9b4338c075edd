"""Max-Gram against brute force."""

from __future__ import annotations

import random

import pytest
import torch

from fasteagle_lite.drafters.lookup import LookupDrafter
from fasteagle_lite.tree import TreeConfig

NO_TAPS = torch.zeros(0, 3)


def brute_force(tokens: list[int], longest: int) -> list[int]:
    """What followed the earliest occurrence of the longest suffix that occurred before."""
    for n in range(min(longest, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n :]
    return []


@pytest.mark.parametrize("longest", [1, 3, 16])
@pytest.mark.parametrize("seed", range(30))
def test_lookup_is_brute_force(seed: int, longest: int) -> None:
    rng = random.Random(seed)
    letters = rng.choice([2, 3, 6])
    tokens = [rng.randrange(letters) for _ in range(rng.randrange(1, 40))]
    drafter = LookupDrafter(TreeConfig("chain", budget=200, depth=200), longest)
    drafter.start(tokens, NO_TAPS, 50)
    for _ in range(12):
        tree = drafter.draft(room=100)
        assert list(tree.tokens) == [tokens[-1], *brute_force(tokens, longest)]
        assert tree.parents == tuple(range(-1, len(tree) - 1))
        assert tree.passes == 0
        more = [rng.randrange(letters) for _ in range(rng.randrange(1, 5))]
        drafter.commit(more, NO_TAPS)
        tokens += more


@pytest.mark.parametrize(
    ("config", "room", "drafted"),
    [
        (TreeConfig("chain", budget=4, depth=9), 9, 3),
        (TreeConfig("chain", budget=9, depth=2), 9, 2),
        (TreeConfig("chain", budget=9, depth=9), 1, 1),
        (TreeConfig("chain", budget=9, depth=9), 0, 0),
        (TreeConfig("chain", budget=1, depth=9), 9, 0),
    ],
)
def test_the_draft_ends_at_budget_depth_and_room(config: TreeConfig, room: int, drafted: int) -> None:
    drafter = LookupDrafter(config)
    drafter.start([1, 2, 3, 4, 5, 6, 7, 1], NO_TAPS, 50)
    assert drafter.draft(room).tokens == (1, 2, 3, 4, 5, 6, 7)[: drafted + 1]


def test_nothing_matches_nothing_is_drafted() -> None:
    drafter = LookupDrafter(TreeConfig("chain"))
    drafter.start([1, 2, 3], NO_TAPS, 50)
    assert drafter.draft(9).tokens == (3,)


def test_start_forgets() -> None:
    drafter = LookupDrafter(TreeConfig("chain"))
    drafter.start([1, 2, 3, 1], NO_TAPS, 50)
    drafter.start([4, 1], NO_TAPS, 50)
    assert drafter.draft(9).tokens == (1,)
