"""Draft trees and the shapes they can take.

A drafter states, for a depth and the token drafted just before it, which tokens it thinks come next (`Expand`); a
builder chooses which of them to verify.  Node 0 is always the last committed token, the root.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .errors import UserError

# expand(depth, parent token) -> [(token, log-probability), ...], most probable first.  Depth 1 follows the root.
Expand = Callable[[int, int], Sequence[tuple[int, float]]]
# pays(path probability, nodes so far, tokens expected so far) -> whether one more node is worth its cost
Pays = Callable[[float, int, float], bool]


@dataclass(frozen=True)
class DraftTree:
    """A tree of draft tokens; parents come before children.

    tokens[i] is node i's token, parents[i] its parent node (-1 for the root), logprobs[i] the drafter's log-probability
    of the token given its parent (0 for the root).  `passes` counts the neural forward passes that drafting took.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...] = (-1,)
    logprobs: tuple[float, ...] = (0.0,)
    passes: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> dict[tuple[int, int], int]:
        """(node, token) -> the child of that node with that token."""
        return {(p, t): i for i, (p, t) in enumerate(zip(self.parents, self.tokens, strict=True)) if p >= 0}

    def mask(self) -> Tensor:
        """(n, n) bool: row i sees column j where j is i itself or one of its ancestors."""
        rows = [[False] * len(self) for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                rows[node] = rows[parent].copy()
            rows[node][node] = True
        return torch.tensor(rows)


class TreeBuilder:
    """Collects nodes; the three shapes below grow one."""

    def __init__(self, root: int):
        self.tokens, self.parents, self.logprobs = [root], [-1], [0.0]

    def add(self, parent: int, token: int, logprob: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.logprobs.append(logprob)
        return len(self.tokens) - 1

    def done(self, passes: int) -> DraftTree:
        return DraftTree(tuple(self.tokens), tuple(self.parents), tuple(self.logprobs), passes)


@dataclass(frozen=True)
class TreeConfig:
    """Which tree a lane drafts.

    kind: `chain` (no branches), `backbone` (FastEagle's constrained tree), `best_first` (DDTree) or `dynamic`
    (EAGLE-2, autoregressive drafters only).  budget: nodes a round verifies, the root included (1 is plain decoding).
    top_k: most children a node may have.  depth: longest path below the root.  adaptive: the budget is only a limit, a
    round's tree stops growing where a node does not pay for its measured cost (`costs`).
    """

    kind: str = "best_first"
    budget: int = 8
    top_k: int = 4
    depth: int = 8
    adaptive: bool = False

    KINDS = ("chain", "backbone", "best_first", "dynamic")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise UserError(f"Unknown tree {self.kind!r}. Choose one of {', '.join(self.KINDS)}.")
        for name in ("budget", "top_k", "depth"):
            if getattr(self, name) < 1:
                raise UserError(f"The tree's {name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1.")
        if self.budget > MAX_BUDGET:
            raise UserError(f"The tree's budget is {self.budget}; it must be at most {MAX_BUDGET}.")
        if self.adaptive and self.kind == "backbone":
            raise UserError(
                "A backbone tree has the same shape in every round; choose another tree for an auto budget."
            )


MAX_BUDGET = 256


def grow(
    config: TreeConfig, root: int, expand: Expand, depth: int, passes: int, pays: Pays = lambda *_: True
) -> DraftTree:
    """Build the configured tree, no deeper than `depth` (what the drafter can reach and the output has room for).

    `pays` ends its growth at the first node that does not pay; a backbone's shape does not depend on it.
    """
    depth = min(depth, config.depth)
    shape = {"chain": _chain, "backbone": _backbone, "best_first": _best_first}[config.kind]
    builder = TreeBuilder(root)
    if depth > 0 and config.budget > 1:
        shape(builder, expand, config, depth, pays)
    return builder.done(passes)


def _chain(builder: TreeBuilder, expand: Expand, config: TreeConfig, depth: int, pays: Pays) -> None:
    """The most probable token after the most probable token."""
    node, logprob, expected = 0, 0.0, 1.0
    for d in range(1, min(depth, config.budget - 1) + 1):
        candidate = expand(d, builder.tokens[node])[0]
        logprob += candidate[1]
        if not pays(math.exp(logprob), d, expected):
            break
        node, expected = builder.add(node, *candidate), expected + math.exp(logprob)


def _backbone(builder: TreeBuilder, expand: Expand, config: TreeConfig, depth: int, pays: Pays) -> None:
    """FastEagle: at each depth the best tokens hang under the backbone node above; the best is the next backbone node.

    The budget is spread evenly over the depths, earlier ones first, so the shape is the same in every round.
    """
    nodes = config.budget - 1
    depth = min(depth, nodes)
    backbone = 0
    for d in range(1, depth + 1):
        width = min(config.top_k, nodes // depth + (d <= nodes % depth))
        added = [builder.add(backbone, *candidate) for candidate in expand(d, builder.tokens[backbone])[:width]]
        backbone = added[0]


def _best_first(builder: TreeBuilder, expand: Expand, config: TreeConfig, depth: int, pays: Pays) -> None:
    """DDTree: always add the node with the highest path probability; optimal for factorised marginals.

    A popped candidate (its parent's r-th child) makes way for its next sibling (r + 1) and for its own first child.
    """
    queue: list[tuple[float, int, int, int, Sequence[tuple[int, float]], float]] = []
    order = 0  # ties go to the candidate found first

    def push(parent: int, d: int, rank: int, children: Sequence[tuple[int, float]], above: float) -> None:
        nonlocal order
        if d <= depth and rank < min(config.top_k, len(children)):
            order += 1
            heapq.heappush(queue, (-(above + children[rank][1]), order, parent, rank, children, above))

    push(0, 1, 0, expand(1, builder.tokens[0]), 0.0)
    level, expected = [0], 1.0
    while queue and len(builder.tokens) < config.budget:
        negative, _, parent, rank, children, above = heapq.heappop(queue)
        if not pays(math.exp(-negative), len(builder.tokens), expected):
            break
        expected += math.exp(-negative)
        node = builder.add(parent, *children[rank])
        level.append(level[parent] + 1)
        push(parent, level[node], rank + 1, children, above)
        if level[node] < depth:
            push(node, level[node] + 1, 0, expand(level[node] + 1, builder.tokens[node]), -negative)
