"""The law of the output, whatever the trees: exact enumeration against many draws through `walk`.

The target is a table of logits for every context over four tokens.  Rounds follow each other as in `decode`: walk a tree,
commit, draft the next one.  The joint distribution of two or three tokens is known exactly; chi-square compares.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from fasteagle_lite import sampling as sampling_module
from fasteagle_lite import verify
from fasteagle_lite.sampling import Sampling, draw, gumbel
from fasteagle_lite.tree import DraftTree
from fasteagle_lite.verify import Verdict, walk

VOCAB, LONGEST, MOST = 4, 3, 100_000
Context = tuple[int, ...]
TABLE: dict[Context, list[float]] = {
    context: (np.random.default_rng([9, *context]).normal(size=VOCAB) * 1.5).tolist()
    for length in range(LONGEST)
    for context in itertools.product(range(VOCAB), repeat=length)
}
SETTINGS = {
    "whole": Sampling(1.0),
    "hot": Sampling(1.7),
    "cold": Sampling(0.6),
    "top-p": Sampling(0.9, top_p=0.8),
    "top-k": Sampling(1.2, top_k=2),
    "all": Sampling(1.3, top_p=0.85, top_k=3),
}


# ---- 100,000 draws in seconds: noise in one product, and each distribution warped once -------------------------------


def splitmix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@pytest.fixture(scope="module")
def noise() -> Tensor:
    """The package's noise of every seed, position and token, (MOST, LONGEST + 1, VOCAB)."""
    seeds, positions, tokens = (np.arange(n, dtype=np.uint64) for n in (MOST, LONGEST + 1, VOCAB))
    keys = splitmix(splitmix(seeds)[:, None] + positions)[..., None]
    bits = splitmix(keys + tokens * np.uint64(0x9E3779B97F4A7C15))
    table = torch.from_numpy(-np.log(-np.log(((bits >> np.uint64(12)).astype(float) + 0.5) / 2**52)))
    for seed, position in itertools.product((0, 1, 777, MOST - 1), range(LONGEST + 1)):
        assert torch.allclose(table[seed, position], gumbel(seed, position, torch.arange(VOCAB)), atol=1e-10)
    return table


@pytest.fixture
def fast(noise: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draws, looked up instead of computed again."""
    warp, known = sampling_module.warp, {}

    def known_warp(logits: Tensor, sampling: Sampling) -> Tensor:
        key = (logits.data_ptr(), sampling.temperature, sampling.top_p, sampling.top_k)
        if key not in known:
            known[key] = (warp(logits, sampling), logits)  # keeps `logits`, so that its address stays its own
        return known[key][0]

    monkeypatch.setattr(sampling_module, "warp", known_warp)
    monkeypatch.setattr(sampling_module, "gumbel", lambda seed, position, tokens: noise[seed, position][tokens])


# ---- drafters: (committed, room, plain output with this seed, seed) -> tree ------------------------------------------

Make = Callable[[Context, int, Context, int], DraftTree]


def node_contexts(committed: Context, tree: DraftTree) -> list[Context]:
    found = [committed]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found


def full(committed: Context, room: int, *_: Any) -> DraftTree:
    """Every possible continuation: all draws of a round come from the tree but the last."""
    tokens, parents, level = [9], [-1], [0]
    for _depth in range(room):
        below = []
        for node, token in itertools.product(level, range(VOCAB)):
            below.append(len(tokens))
            tokens.append(token)
            parents.append(node)
        level = below
    return DraftTree(tuple(tokens), tuple(parents))


_pool: dict[tuple[Context, int, int], DraftTree] = {}


def random(committed: Context, room: int, plain: Context, seed: int) -> DraftTree:
    """One of seven random branching trees a context, whichever the seed says."""
    key = (committed, room, seed % 7)
    if key not in _pool:
        rng = np.random.default_rng([seed % 7, room, *committed])
        _pool[key] = tiny.random_tree(rng, 9, room, VOCAB, [], 0.0)
    return _pool[key]


def constant(committed: Context, room: int, *_: Any) -> DraftTree:
    return tiny.chain([9, *[2] * room])


def right(committed: Context, room: int, plain: Context, seed: int) -> DraftTree:
    """Knows what is going to be drawn."""
    return tiny.chain([9, *plain[len(committed) : len(committed) + room]])


def wrong(committed: Context, room: int, plain: Context, seed: int) -> DraftTree:
    """Drafts everything but what is going to be drawn."""
    if not room:
        return DraftTree((9,))
    others = [t for t in range(VOCAB) if t != plain[len(committed)]]
    return DraftTree((9, *others), (-1, *[0] * len(others)))


def likeliest(committed: Context, room: int, *_: Any) -> DraftTree:
    """The two most probable tokens at each depth below the most probable one: what a good drafter does."""
    tokens, parents, node, context = [9], [-1], 0, committed
    for _depth in range(room):
        first, second = np.argsort(TABLE[context])[::-1][:2].tolist()
        tokens += [second, first]
        parents += [node, node]
        node, context = len(tokens) - 1, (*context, first)
    return DraftTree(tuple(tokens), tuple(parents))


MAKERS: dict[str, Make] = {f.__name__: f for f in (full, random, constant, right, wrong, likeliest)}

# ---- rounds and their law --------------------------------------------------------------------------------------------


class Rounds:
    """Emits sequences of `length` tokens behind a one-token prompt."""

    def __init__(self, make: Make, length: int, walker: Callable[..., Verdict] = walk):
        self.make, self.length, self.walker = make, length, walker
        self.logits: dict[tuple[Context, DraftTree], Tensor] = {}

    def emit(self, sampling: Sampling) -> Context:
        plain: list[int] = []
        if self.make in (right, wrong):
            for position in range(1, self.length + 1):
                plain.append(draw(self.at(tuple(plain), DraftTree((9,)))[0], sampling, position))
        committed: Context = ()
        while len(committed) < self.length:
            tree = self.make(committed, self.length - len(committed) - 1, tuple(plain), sampling.seed)
            # The root is the prompt's token or the last committed one: as many tokens lie before it as are committed.
            verdict = self.walker(tree, self.at(committed, tree), sampling, len(committed))
            committed += (*(tree.tokens[n] for n in verdict.path), verdict.bonus)
        return committed

    def at(self, committed: Context, tree: DraftTree) -> Tensor:
        """The target's logits at every node."""
        key = (committed, tree)
        if key not in self.logits:
            self.logits[key] = torch.tensor([TABLE[c] for c in node_contexts(committed, tree)])
        return self.logits[key]


def joint(sampling: Sampling, length: int) -> dict[Context, float]:
    """The exact probability of every output."""
    law = {}
    for output in itertools.product(range(VOCAB), repeat=length):
        steps = [tiny.warp_reference(TABLE[output[:i]], sampling)[output[i]] for i in range(length)]
        law[output] = float(np.prod(steps))
    return law


def law_p(rounds: Rounds, sampling: Sampling, seeds: range) -> float:
    """p-value of the emitted sequences under the target's own law."""
    law = joint(sampling, rounds.length)
    counts = dict.fromkeys(law, 0)
    settings = (sampling.temperature, sampling.top_p, sampling.top_k)
    for seed in seeds:
        counts[rounds.emit(Sampling(*settings, seed=seed))] += 1
    return tiny.chi_square_p(np.array(list(counts.values())), np.array(list(law.values())))


@pytest.mark.parametrize(("name", "length"), [("full", 2), ("random", 3)])
def test_the_law_in_100_000_draws(name: str, length: int, fast: None) -> None:
    assert law_p(Rounds(MAKERS[name], length), Sampling(0.8, top_p=0.95), range(MOST)) > 1e-4


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MAKERS)
def test_the_law_of_three_tokens(name: str, setting: str, fast: None) -> None:
    assert law_p(Rounds(MAKERS[name], 3), SETTINGS[setting], range(4000)) > 1e-4


@pytest.mark.parametrize("name", MAKERS)
def test_every_output_is_the_plain_output_of_its_seed(name: str) -> None:
    plain = Rounds(lambda *_: DraftTree((9,)), 3)
    for seed in range(100):
        sampling = Sampling(1.1, seed=seed)
        assert Rounds(MAKERS[name], 3).emit(sampling) == plain.emit(sampling)


# ---- what the law catches ---------------------------------------------------------------------------------------------


def one_noise_for_all(tree: DraftTree, logits: Tensor, sampling: Sampling, position: int) -> Verdict:
    """A verifier whose noise forgets the position."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "draw", lambda logits, sampling, _: draw(logits, sampling, 1))
        return walk(tree, logits, sampling, position)


@pytest.mark.parametrize("mutant", [tiny.first_child_accepted, one_noise_for_all, tiny.bonus_from_the_root])
def test_the_law_catches_a_broken_verifier(mutant: Callable[..., Verdict], fast: None) -> None:
    check = partial(law_p, sampling=SETTINGS["whole"], seeds=range(3000))
    assert check(Rounds(likeliest, 3)) > 1e-4
    assert check(Rounds(likeliest, 3, mutant)) < 1e-6


# ---- by hand ----------------------------------------------------------------------------------------------------------


def test_a_walk_by_hand() -> None:
    #        0 --- 1 (5) --- 3 (7)
    #          `-- 2 (6) --- 4 (7) --- 5 (8)
    tree = DraftTree((4, 5, 6, 7, 7, 8), (-1, 0, 0, 1, 2, 4))
    logits = torch.full((6, 10), -1.0)
    for node, choice in enumerate([6, 0, 7, 0, 2, 0]):
        logits[node, choice] = 1.0
    assert walk(tree, logits, Sampling(), 0) == Verdict((2, 4), 2)
    logits[4, 8] = 5.0
    logits[5, 9] = 5.0
    assert walk(tree, logits, Sampling(), 0) == Verdict((2, 4, 5), 9)
    logits[0, 3] = 5.0
    assert walk(tree, logits, Sampling(), 0) == Verdict((), 3)
