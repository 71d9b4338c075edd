"""Max-Gram (CS Drafting, arXiv 2312.11462; also prompt lookup): copy what followed the longest earlier match."""

from __future__ import annotations

from torch import Tensor

from ..tree import DraftTree, TreeConfig
from .base import Drafter


class LookupDrafter(Drafter):
    """Finds the longest suffix of the text (up to `longest` tokens) that occurred before, and drafts its continuation.

    Of several occurrences the earliest is taken.  No model, no features: a chain, or nothing where nothing matches.
    """

    name = "lookup"
    TREES = ("chain",)

    def __init__(self, tree: TreeConfig, longest: int = 16):
        self.tree, self.longest = tree, longest

    def start(self, tokens: list[int], taps: Tensor, capacity: int) -> None:
        self.tokens: list[int] = []
        self.first_end: dict[tuple[int, ...], int] = {}  # n-gram -> index just behind its earliest occurrence
        self.commit(tokens, taps)

    def commit(self, tokens: list[int], taps: Tensor) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for n in range(1, min(self.longest, end) + 1):
                self.first_end.setdefault(tuple(self.tokens[end - n :]), end)

    def draft(self, room: int) -> DraftTree:
        end = len(self.tokens)
        for n in range(min(self.longest, end - 1), 0, -1):
            follow = self.first_end[tuple(self.tokens[end - n :])]
            if follow < end:
                copied = self.tokens[follow : follow + min(room, self.tree.budget - 1, self.tree.depth)]
                nodes = (self.tokens[-1], *copied)
                return DraftTree(nodes, tuple(range(-1, len(copied))), (0.0,) * len(nodes))
        return DraftTree((self.tokens[-1],))
