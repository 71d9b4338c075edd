"""Trees: masks and depths against brute force, and what each shape promises."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import tiny

from fasteagle_lite.errors import UserError
from fasteagle_lite.tree import MAX_BUDGET, DraftTree, TreeConfig, grow

SHAPES = ("chain", "backbone", "best_first")


def marginals(rng: np.random.Generator, depth: int, width: int) -> list[list[tuple[int, float]]]:
    """For each depth `width` tokens with log-probabilities, best first; tokens differ between depths."""
    tables = []
    for d in range(depth):
        logprobs = np.sort(np.log(rng.dirichlet(np.ones(width))))[::-1]
        tables.append([(100 * (d + 1) + i, float(p)) for i, p in enumerate(logprobs)])
    return tables


def expand_of(tables: list[list[tuple[int, float]]]) -> Callable[[int, int], list[tuple[int, float]]]:
    return lambda depth, parent: tables[depth - 1]


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Tokens from below the root down to each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


@pytest.mark.parametrize("seed", range(20))
def test_mask_depths_and_children_by_brute_force(seed: int) -> None:
    tree = tiny.random_tree(np.random.default_rng(seed), 3, 9, 50, [], 0.0)
    mask = tree.mask()
    for node in range(len(tree)):
        ancestors, at = {node}, node
        while tree.parents[at] >= 0:
            at = tree.parents[at]
            ancestors.add(at)
        assert set(mask[node].nonzero()[:, 0].tolist()) == ancestors
        assert tree.depths[node] == len(ancestors) - 1
    assert len(tree.children) == len(tree) - 1
    for (parent, token), child in tree.children.items():
        assert (tree.parents[child], tree.tokens[child]) == (parent, token)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("seed", range(10))
def test_every_shape_keeps_to_its_limits(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    budget, top_k, depth, reach = (int(rng.integers(1, 12)) for _ in range(4))
    tables = marginals(rng, reach, 6)
    tree = grow(TreeConfig(kind, budget, top_k, depth), 7, expand_of(tables), reach, passes=3)
    assert tree.tokens[0] == 7
    assert tree.passes == 3
    assert len(tree) <= budget
    assert max(tree.depths) <= min(depth, reach)
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert max((tree.parents[1:].count(node) for node in range(len(tree))), default=0) <= top_k
    known = [dict(table) for table in tables]
    for node in range(1, len(tree)):
        assert tree.logprobs[node] == known[tree.depths[node] - 1][tree.tokens[node]]
    assert len(tree.children) == len(tree) - 1  # no two siblings have the same token


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(("budget", "reach"), [(1, 4), (9, 0)])
def test_without_room_there_is_only_the_root(kind: str, budget: int, reach: int) -> None:
    tables = marginals(np.random.default_rng(0), 4, 6)
    assert grow(TreeConfig(kind, budget), 7, expand_of(tables), reach, passes=1).tokens == (7,)


def test_a_chain_takes_the_best_of_each_depth() -> None:
    tables = marginals(np.random.default_rng(0), 4, 6)
    tree = grow(TreeConfig("chain", 4), 7, expand_of(tables), 4, passes=1)
    assert tree.tokens == (7, 100, 200, 300)
    assert tree.parents == (-1, 0, 1, 2)


def test_expansion_is_told_the_parent_token() -> None:
    asked = []

    def expand(depth: int, parent: int) -> list[tuple[int, float]]:
        asked.append((depth, parent))
        return [(10 * depth + parent, -0.1), (10 * depth + parent + 1, -2.0)]

    for kind in SHAPES:
        asked.clear()
        tree = grow(TreeConfig(kind, 6, 2, 3), 1, expand, 3, passes=1)
        for node, parent in enumerate(tree.parents[1:], start=1):
            assert (tree.depths[node], tree.tokens[parent]) in asked
            assert tree.tokens[node] in {t for t, _ in expand(tree.depths[node], tree.tokens[parent])}


@pytest.mark.parametrize("budget", [2, 3, 8, 9, 17, 40])
def test_the_backbone_has_the_same_shape_whatever_the_probabilities(budget: int) -> None:
    shapes = {
        grow(
            TreeConfig("backbone", budget, 4, 8),
            7,
            expand_of(marginals(np.random.default_rng(seed), 4, 6)),
            4,
            passes=1,
        ).parents
        for seed in range(10)
    }
    assert len(shapes) == 1


def test_the_backbone_hangs_candidates_under_the_best_of_the_depth_above() -> None:
    tree = grow(TreeConfig("backbone", 9, 3, 8), 7, expand_of(marginals(np.random.default_rng(0), 3, 6)), 3, passes=1)
    assert paths(tree) == [
        (100,), (101,), (102,), (100, 200), (100, 201), (100, 202), (100, 200, 300), (100, 200, 301)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_best_first_takes_the_most_probable_paths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    depth, width, top_k, budget = (
        int(rng.integers(1, 5)),
        int(rng.integers(1, 5)),
        int(rng.integers(1, 5)),
        int(rng.integers(2, 20)),
    )
    tables = marginals(rng, depth, width)
    tree = grow(TreeConfig("best_first", budget, top_k, depth), 7, expand_of(tables), depth, passes=1)
    every = [path for d in range(1, depth + 1) for path in itertools.product(*(table[:top_k] for table in tables[:d]))]
    every.sort(key=lambda path: -sum(p for _, p in path))
    wanted = [tuple(token for token, _ in path) for path in every[: budget - 1]]
    assert set(paths(tree)) == set(wanted)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "bush"},
        {"budget": 0},
        {"budget": -3},
        {"budget": MAX_BUDGET + 1},
        {"top_k": 0},
        {"depth": 0},
    ],
    ids=str,
)
def test_wrong_settings_are_explained(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match=str(next(iter(wrong.values())))):
        TreeConfig(**wrong)
