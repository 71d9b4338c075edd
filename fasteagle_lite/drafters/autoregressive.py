"""EAGLE-3 style (arXiv 2503.01840): one layer, run once for every depth of the draft, on its own last state.

The tree is EAGLE-2's dynamic one (arXiv 2406.16858): expand the best nodes of each depth, then keep the best of all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..costs import Costs
from ..llama import Attention, LayerSpec, Rows, SwiGLU, attention_step
from ..target import Target
from ..tree import DraftTree, TreeBuilder, TreeConfig
from .features import DraftHead, Fusion, new_norm
from .neural import NeuralDrafter


@dataclass(frozen=True)
class AutoregressiveConfig:
    """Size of the drafter.  `own_head`: train a head of its own (EAGLE-3) instead of reading the target's (EAGLE-1)."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    ffn: int = 1536
    own_head: bool = False

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(self.hidden, self.heads, self.kv_heads, self.head_dim, self.ffn)


class Autoregressive(nn.Module):
    """The drafter's weights: attention reads [embedding, hidden], the residual stream carries the hidden alone."""

    kind = "autoregressive"

    def __init__(self, config: AutoregressiveConfig, vocabulary: Tensor):
        super().__init__()
        self.config = config
        self.fusion = Fusion(config.hidden)
        self.embedding_norm, self.hidden_norm = new_norm(config.hidden), new_norm(config.hidden)
        self.attention = Attention(config.spec, 2 * config.hidden)
        self.mlp_norm, self.mlp = new_norm(config.hidden), SwiGLU(config.spec)
        self.norm = new_norm(config.hidden)
        self.head = DraftHead(vocabulary, config.hidden, config.own_head)

    def inputs(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """What attention reads: (B, T, h) twice -> (B, T, 2h)."""
        return torch.cat([self.embedding_norm(embeddings), self.hidden_norm(hidden)], dim=-1)

    def forward(self, hidden: Tensor, embeddings: Tensor, rows: Rows) -> Tensor:
        """One step: hidden (B, T, h), the fused feature or the last step's state, -> the next state (B, T, h)."""
        hidden = hidden + attention_step(self.attention, self.inputs(hidden, embeddings), rows, 0)
        return hidden + self.mlp(self.mlp_norm(hidden))

    def logits(self, hidden: Tensor, among: Tensor | None = None) -> Tensor:
        return self.head.logits(self.norm(hidden), among)


class AutoregressiveDrafter(NeuralDrafter):
    """A lane that drafts step by step: EAGLE-2's dynamic tree, or a chain (the same with one child a node)."""

    name = "autoregressive"
    TREES = ("dynamic", "chain")

    def __init__(self, model: Autoregressive, target: Target, tree: TreeConfig, costs: Costs | None = None):
        super().__init__(target, model.config.spec, 1, model.head, tree, costs)
        self.model = model

    @torch.inference_mode()
    def draft_from(self, taps: Tensor, embeddings: Tensor, rows: Rows, room: int) -> DraftTree:
        states = self.model(self.model.fusion(taps), embeddings, rows)[:, -1:]  # (1, 1, h)
        self.cache.length += taps.shape[1]

        width = 1 if self.tree.kind == "chain" else min(self.tree.top_k, len(self.vocabulary))
        depth = min(room, self.tree.depth, self.tree.budget - 1)
        candidates, sums = TreeBuilder(self.root), [0.0]  # everything ever generated; log-probability of each path
        frontier, passes = [0], 1
        seen: dict[int, list[int]] = {0: []}  # node -> scratch rows of its ancestors and itself
        scratch = 0
        for d in range(1, depth + 1):
            top = torch.log_softmax(self.model.logits(states)[0].float(), dim=-1).topk(width)
            fresh = len(candidates.tokens)
            for parent, ids, logprobs in zip(frontier, top.indices.tolist(), top.values.tolist(), strict=True):
                for i, logprob in zip(ids, logprobs, strict=True):
                    candidates.add(parent, self.vocabulary[i], logprob)
                    sums.append(sums[parent] + logprob)
            if d == depth:
                break
            # A path only gets less probable: below a node that the final tree would drop, nothing needs expanding.
            best, expected = self._worthwhile(sums, passes)
            kept = [n for n in best if n >= fresh]
            expanded = kept[:width]
            # The next level should gather of its parents' probability what this one has gathered of its own parents'.
            gain = _mass(sums, expanded) * _mass(sums, kept) / _mass(sums, frontier)
            if not expanded or not self.step_pays(gain, len(best) + 1, expected, passes):
                break
            states_of = {parent: row for row, parent in enumerate(frontier)}
            hidden = states[:, [states_of[candidates.parents[n]] for n in expanded]]
            mask = torch.zeros(len(expanded), scratch + len(expanded), dtype=torch.bool)
            for row, n in enumerate(expanded):
                seen[n] = [*seen[candidates.parents[n]], scratch + row]
                mask[row, seen[n]] = True
            place = self.rows(len(expanded), self.cache.length + scratch, torch.full((len(expanded),), d - 1), mask)
            states = self.model(hidden, self.embed([candidates.tokens[n] for n in expanded]), place)
            scratch, frontier, passes = scratch + len(expanded), expanded, passes + 1

        final, place_of = TreeBuilder(self.root), {0: 0}
        for n in sorted(self._worthwhile(sums, passes)[0]):
            place_of[n] = final.add(place_of[candidates.parents[n]], candidates.tokens[n], candidates.logprobs[n])
        return final.done(passes)

    def _worthwhile(self, sums: list[float], passes: int) -> tuple[list[int], float]:
        """The nodes to verify, best first, as far as they pay; and the tokens expected of a round with them."""
        pays, expected = self.pays(passes), 1.0
        best = _best(sums, self.tree.budget - 1)
        for count, n in enumerate(best):
            if not pays(math.exp(sums[n]), count + 1, expected):
                return best[:count], expected
            expected += math.exp(sums[n])
        return best, expected


def _mass(sums: list[float], nodes: list[int]) -> float:
    """How probable it is that one of the nodes, none above another, is reached."""
    return sum(math.exp(sums[n]) for n in nodes)


def _best(sums: list[float], count: int) -> list[int]:
    """The `count` nodes with the most probable paths, without the root; on ties parents stay before their children."""
    return sorted(range(1, len(sums)), key=lambda n: (-sums[n], n))[:count]
