"""The lossless verifier, one for all drafters: walk the tree along the target's own draws."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .sampling import Sampling, draw
from .tree import DraftTree


@dataclass(frozen=True)
class Verdict:
    """path: accepted nodes below the root, in order; bonus: the target's token behind the last of them."""

    path: tuple[int, ...]
    bonus: int


def walk(tree: DraftTree, logits: Tensor, sampling: Sampling, position: int) -> Verdict:
    """Draw from the target at the root; while the drawn token is a child, step to it; the first that is none is the bonus.

    `logits` (nodes, vocab) are the target's at every node, `position` the root's absolute position.  Every emitted token
    is a draw from the target's distribution given the tokens before it, so the law of the output is the target's,
    whatever the tree (for given candidates this equals EAGLE's accept-and-renormalise loop).
    """
    choices = logits.argmax(-1).tolist() if sampling.greedy else None
    path: list[int] = []
    node = 0
    while True:
        token = choices[node] if choices is not None else draw(logits[node], sampling, position + len(path) + 1)
        child = tree.children.get((node, token))
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child
