"""What a neural drafter's lane keeps between rounds: its cache, and committed rows it has not run yet."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from ..costs import Costs, Pace
from ..llama import KVCache, LayerSpec, Rope, Rows, attention_bias
from ..target import Target
from ..tree import DraftTree, Pays, TreeConfig
from .base import Drafter
from .features import DraftHead, unit_taps


class NeuralDrafter(Drafter):
    """Row j of a drafter pairs the target's feature f_j with the token x_{j+1}; only committed rows stay cached.

    `commit` merely queues rows.  The next `draft` runs them: the same forward brings the cache up to date and, in its
    last row, drafts; so the prompt is paid for in the first draft, and the last round drafts nothing in vain.
    """

    def __init__(
        self,
        target: Target,
        spec: LayerSpec,
        layers: int,
        head: DraftHead,
        tree: TreeConfig,
        costs: Costs | None,
    ):
        if tree.adaptive and costs is None:
            raise ValueError("an adaptive tree needs costs")
        self.costs = costs if tree.adaptive else None
        self.target, self.spec, self.layers, self.tree = target, spec, layers, tree
        self.vocabulary: list[int] = head.vocabulary.tolist()
        self.rope: Rope = target.rope

    def start(self, tokens: list[int], taps: Tensor, capacity: int) -> None:
        # Behind the committed rows a drafter may keep one row for every node it ever expands in a round.
        scratch = self.tree.top_k * self.tree.depth
        self.cache = KVCache(self.layers, 1, self.spec, len(tokens) + capacity + scratch, self.target.embedding.weight)
        self.root = tokens[0]
        self.pending_tokens: list[int] = []
        self.pending_taps = taps[:0]
        self.pace = Pace(self.costs) if self.costs else None
        self.drafted: DraftTree | None = None  # the tree that the next commit is about
        self.commit(tokens[1:], taps)

    def commit(self, tokens: list[int], taps: Tensor) -> None:
        if self.pace and self.drafted and self.drafted.passes:
            self.pace.record(len(tokens), len(self.drafted), self.drafted.passes)
        self.pending_tokens += tokens
        self.pending_taps = torch.cat([self.pending_taps, taps])
        self.root = tokens[-1] if tokens else self.root

    def draft(self, room: int) -> DraftTree:
        rests = self.pace is not None and room > 0 and not self.pace.drafts()
        pending = None if rests else self.take_pending(room)
        self.drafted = DraftTree((self.root,)) if pending is None else self.draft_from(*pending, room)
        return self.drafted

    @abstractmethod
    def draft_from(self, taps: Tensor, embeddings: Tensor, rows: Rows, room: int) -> DraftTree:
        """Run the queued rows (see `take_pending`) and draft behind them."""

    def pays(self, passes: int) -> Pays:
        """Whether a node is worth its cost, after so many passes; always, unless the tree is adaptive."""
        costs = self.costs
        return lambda p, size, expected: costs is None or costs.node_pays(p, size, expected, passes)

    def step_pays(self, gain: float, size: int, expected: float, passes: int) -> bool:
        """Whether another pass is worth its cost, likewise."""
        return self.costs is None or self.costs.step_pays(gain, size, expected, passes)

    def take_pending(self, room: int) -> tuple[Tensor, Tensor, Rows] | None:
        """The queued rows: unit taps (1, T, 3h), embeddings (1, T, h), and where they go.

        None, and the queue waits, where no tree could grow: no room, a budget of one node, or (before the first round
        of a one-token prompt) no feature to draft from.
        """
        count = len(self.pending_tokens)
        if not count or not room or self.tree.budget == 1:
            return None
        taps, embeddings = (
            unit_taps(self.pending_taps).to(self.pending_taps.dtype)[None],
            self.embed(self.pending_tokens),
        )
        self.pending_tokens, self.pending_taps = [], self.pending_taps[:0]
        return taps, embeddings, self.rows(count, self.cache.length, torch.arange(count), None)

    def embed(self, tokens: list[int]) -> Tensor:
        """Target embeddings (1, T, h)."""
        return F.embedding(torch.tensor([tokens], device=self.target.device), self.target.embedding.weight)

    def rows(self, count: int, start: int, steps: Tensor, mask: Tensor | None) -> Rows:
        """`count` new rows stored from `start` on, `steps` (T,) positions behind the committed ones."""
        weight = self.target.embedding.weight
        return Rows(
            rope=self.rope((self.cache.length + steps).to(weight.device)),
            bias=attention_bias(None if mask is None else mask.to(weight.device), count, start + count, weight),
            cache=self.cache,
            start=start,
        )
