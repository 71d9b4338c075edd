"""The seam between drafting and verification: a drafter proposes trees and is told what was committed."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ..tree import DraftTree


class Drafter(ABC):
    """One lane's drafter.  It owns its caches, shares weights with other lanes, and never decides acceptance.

    Tokens are x_0 .. x_t; the last one has not been through the target.  `taps` (rows, 3h) are the target's features:
    those of x_0 .. x_{t-1} at the start, then those of every position that a round has committed.
    """

    name: str

    @abstractmethod
    def start(self, tokens: list[int], taps: Tensor, capacity: int) -> None:
        """Forget everything; begin behind `tokens` (t + 1), `taps` (t, 3h), with at most `capacity` tokens to come."""

    @abstractmethod
    def draft(self, room: int) -> DraftTree:
        """A tree whose root is the last committed token, at most `room` deep."""

    @abstractmethod
    def commit(self, tokens: list[int], taps: Tensor) -> None:
        """Append what a round has committed: tokens x_{t+1}.. and the features (rows, 3h) of x_t.., as many."""


class NoDrafter(Drafter):
    """Plain decoding: a tree of one node."""

    name = "none"

    def start(self, tokens: list[int], taps: Tensor, capacity: int) -> None:
        self.last = tokens[-1]

    def draft(self, room: int) -> DraftTree:
        return DraftTree((self.last,))

    def commit(self, tokens: list[int], taps: Tensor) -> None:
        self.last = tokens[-1]
