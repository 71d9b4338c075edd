"""What a round costs on this device, and so how large a tree is worth verifying.

Decoding is a renewal process: a round yields 1 + sum(p) tokens in expectation, p being the path probabilities of the
verified nodes, and takes draft + verify seconds.  The best tree is the one with the highest expected rate.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from .decode import clock
from .target import Target

if TYPE_CHECKING:
    from .drafters.neural import NeuralDrafter  # which imports this module

PATIENCE = 16  # most rounds to decode plainly before drafting is tried again
_MEMORY = 0.8  # of the running means, for each round that has drafted
_ROWS_ON_CPU, _ROWS_ELSEWHERE = 16, 64  # most rows worth measuring
_REPETITIONS = 5


@dataclass(frozen=True)
class Costs:
    """Seconds on this device.

    verify[n - 1]: a target pass over n rows, convex in n (see `convex`).  draft: a drafter's first pass in a round, with
    all that belongs to it.  step: each further pass.
    """

    verify: tuple[float, ...]
    draft: float = 0.0
    step: float = 0.0

    @property
    def most(self) -> int:
        """The largest tree whose cost is known."""
        return len(self.verify)

    def spent(self, passes: int) -> float:
        """Seconds of drafting with so many passes."""
        return self.draft + (passes - 1) * self.step

    def node_pays(self, probability: float, size: int, expected: float, passes: int) -> bool:
        """Whether one more node, reached with `probability`, raises the rate of a tree with `size` nodes.

        `expected` tokens come out of a round without it.  As costs are convex and nodes are offered most probable
        first, once one does not pay no later one does.
        """
        if size >= self.most:
            return False
        now = self.verify[size - 1]
        return probability * (self.spent(passes) + now) > expected * (self.verify[size] - now)

    def step_pays(self, gain: float, size: int, expected: float, passes: int) -> bool:
        """Whether a further pass, whose nodes would add `gain` expected tokens, raises the rate."""
        return gain * (self.spent(passes) + self.verify[min(size, self.most) - 1]) > expected * self.step


class Pace:
    """Decides before each round whether to draft at all: not while drafting has lately been slower than plain decoding.

    After a round that made the running rate fall below plain decoding's, it rests for 2 rounds, then 4, 8, 16, and
    tries again; so even where no draft is ever accepted a lane loses a failed draft in 17 rounds.
    """

    def __init__(self, costs: Costs):
        self.costs = costs
        self.tokens, self.seconds = 2.0, 2 * costs.verify[0] / 1.2  # a hopeful start
        self.pause = self.rest = 0

    def drafts(self) -> bool:
        """Called once a round."""
        if self.rest:
            self.rest -= 1
            return False
        return True

    def record(self, tokens: int, size: int, passes: int) -> None:
        """A round that had drafted with so many passes verified `size` nodes and committed `tokens`."""
        seconds = self.costs.spent(passes) + self.costs.verify[min(size, self.costs.most) - 1]
        self.tokens = _MEMORY * self.tokens + (1 - _MEMORY) * tokens
        self.seconds = _MEMORY * self.seconds + (1 - _MEMORY) * seconds
        paid = self.tokens * self.costs.verify[0] > self.seconds
        self.pause = 0 if paid else min(PATIENCE, max(2, 2 * self.pause))
        self.rest = self.pause


def measure_verify(target: Target, context: int = 256) -> tuple[float, ...]:
    """Median seconds of a target pass over 1, 2, ... rows behind `context` cached ones, made convex."""
    most = _ROWS_ON_CPU if target.device.type == "cpu" else _ROWS_ELSEWHERE
    cache = target.new_cache(context + most)
    cache.length = context
    sizes = sorted({1, 2, 3, 4, 6, 8, *range(8, most + 1, 4)})
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(_REPETITIONS + 1):
        for size in sizes:
            begun = clock(target.device)
            target(torch.zeros(1, size, dtype=torch.long, device=target.device), cache)
            seconds[size].append(clock(target.device) - begun)
    return convex({size: statistics.median(times[1:]) for size, times in seconds.items()})  # the first one warms up


def measure_draft(target: Target, drafter: NeuralDrafter) -> tuple[float, float]:
    """Median seconds of a draft's first pass and of each further one, right after a target pass, as in a race."""
    context, rounds = 64, 2 * _REPETITIONS
    taps = target.embedding.weight.new_ones((context, 3 * target.spec.hidden))
    cache, rows = target.new_cache(context), torch.zeros(1, drafter.tree.budget, dtype=torch.long, device=target.device)
    drafter.start([0] * (context + 1), taps, capacity=2 * (rounds + 1))
    seconds: dict[int, list[float]] = {}
    for room in [1, drafter.tree.depth] * _REPETITIONS:
        target(rows, cache)  # leaves none of the drafter's weights in the processor's cache
        begun = clock(target.device)
        tree = drafter.draft(room)
        seconds.setdefault(tree.passes, []).append(clock(target.device) - begun)
        drafter.commit([0, 0], taps[:2])
    medians = {passes: statistics.median(times) for passes, times in seconds.items()}
    few, many = min(medians), max(medians)
    step = max(0.0, medians[many] - medians[few]) / max(1, many - few)
    return max(0.0, medians[few] - (few - 1) * step), step


def convex(measured: dict[int, float]) -> tuple[float, ...]:
    """The largest convex, nondecreasing function below measured seconds by size, at 1, 2, ... up to the largest size.

    Timings jitter; a tree that stops at the first node that does not pay needs costs without bumps.
    """
    hull: list[tuple[int, float]] = []
    least = math.inf
    for size, seconds in sorted(measured.items(), reverse=True):
        least = min(least, seconds)  # fewer rows never cost more
        while len(hull) > 1 and _slope(hull[-1], hull[-2]) < _slope((size, least), hull[-1]):
            hull.pop()
        hull.append((size, least))
    hull.reverse()
    sizes, least_seconds = zip(*hull, strict=True)
    return tuple(np.interp(range(1, sizes[-1] + 1), sizes, least_seconds).tolist())


def _slope(left: tuple[int, float], right: tuple[int, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])
