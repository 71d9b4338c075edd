"""FastEagle (arXiv 2509.20416): a cascade of layers that drafts several positions in ONE forward pass.

Layer i's state, through its own norm and the target's frozen head, is the distribution of the i-th token ahead.  No
draft token is fed back: q_i is a marginal.  An optional low-rank Markov head (after DSpark, arXiv 2607.05147) corrects
position i's logits by the token drafted just before it, still without another pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..costs import Costs
from ..linear import Linear
from ..llama import DecoderLayer, LayerSpec, Rows
from ..target import Target
from ..tree import DraftTree, TreeConfig, grow
from .features import DraftHead, Fusion, new_norm
from .neural import NeuralDrafter


@dataclass(frozen=True)
class CascadeConfig:
    """Size of a cascade.

    layers: how many positions it drafts, one a layer.  markov_rank: 0 is the paper's.  trunk: layers before the first
    that drafts (the paper has none, so its first position gets one layer's thought).  parallel: an ablation, every
    later layer reads the first one's state instead of the state before its own.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    layers: int = 4
    ffn: int = 768
    markov_rank: int = 64
    trunk: int = 0
    parallel: bool = False

    @property
    def spec(self) -> LayerSpec:
        return LayerSpec(self.hidden, self.heads, self.kv_heads, self.head_dim, self.ffn)


class Cascade(nn.Module):
    """The drafter's weights."""

    kind = "cascade"

    def __init__(self, config: CascadeConfig, vocabulary: Tensor):
        super().__init__()
        self.config = config
        self.fusion = Fusion(config.hidden)
        self.embedding_norm, self.feature_norm = new_norm(config.hidden), new_norm(config.hidden)
        self.enter = Linear(2 * config.hidden, config.hidden)
        self.trunk = nn.ModuleList(DecoderLayer(config.spec) for _ in range(config.trunk))
        self.layers = nn.ModuleList(DecoderLayer(config.spec) for _ in range(config.layers))
        self.norms = nn.ModuleList(new_norm(config.hidden) for _ in range(config.layers))
        self.head = DraftHead(vocabulary, config.hidden, own=False)
        if config.markov_rank:
            # One row more than the vocabulary: an unknown previous token corrects nothing.
            self.markov_in = nn.Embedding(config.vocabulary + 1, config.markov_rank)
            self.markov_out = Linear(config.markov_rank, config.vocabulary)
            nn.init.normal_(self.markov_in.weight, std=0.1)
            nn.init.zeros_(self.markov_out.weight)

    def forward(self, taps: Tensor, embeddings: Tensor, rows: Rows) -> list[Tensor]:
        """Unit taps (B, T, 3h) and embeddings of the following tokens (B, T, h) -> N normed states (B, T, h)."""
        features = self.feature_norm(self.fusion(taps))
        x = self.enter(torch.cat([features, self.embedding_norm(embeddings)], dim=-1))
        for i, layer in enumerate(self.trunk):
            x = layer(x, rows, i)
        states: list[Tensor] = []
        for i, layer in enumerate(self.layers, start=len(self.trunk)):
            x = layer(states[0] if self.config.parallel and states else x, rows, i)
            states.append(x)
        return [norm(x) for norm, x in zip(self.norms, states, strict=True)]

    def markov(self, previous: Tensor, among: Tensor | None = None) -> Tensor:
        """Correction (..., V) of the logits behind the draft indices `previous` (...), or only of those in `among`."""
        u = self.markov_in(previous)
        return self.markov_out(u) if among is None else F.linear(u, self.markov_out.weight[among])


def with_trunk(model: Cascade, trunk: int) -> Cascade:
    """The same drafter with `trunk` trunk layers; the new ones pass their input on unchanged until they are trained."""
    grown = Cascade(replace(model.config, trunk=trunk), model.head.vocabulary)
    for name, weight in grown.trunk.named_parameters():
        if name.endswith(("output.weight", "down.weight")):
            nn.init.zeros_(weight)
    grown.load_state_dict(model.state_dict(), strict=False)
    return grown.to(model.enter.weight)


class CascadeDrafter(NeuralDrafter):
    """A lane that drafts with a cascade: chain, backbone or best-first trees over its marginals."""

    name = "cascade"
    TREES = ("best_first", "backbone", "chain")

    def __init__(
        self, model: Cascade, target: Target, tree: TreeConfig, costs: Costs | None = None, *, markov: bool = True
    ):
        """`markov` False leaves the Markov head out, if the model has one."""
        layers = model.config.trunk + model.config.layers
        super().__init__(target, model.config.spec, layers, model.head, tree, costs)
        self.model, self.markov = model, markov and model.config.markov_rank > 0
        self.index = {token: i for i, token in enumerate(self.vocabulary)}  # target token -> draft index

    @torch.inference_mode()
    def draft_from(self, taps: Tensor, embeddings: Tensor, rows: Rows, room: int) -> DraftTree:
        states = self.model(taps, embeddings, rows)
        self.cache.length += taps.shape[1]
        logits = self.model.head.logits(torch.cat([state[0, -1:] for state in states])).float()  # (N, V)
        top_k = min(self.tree.top_k, logits.shape[1])
        marginals = self._candidates(logits, top_k)

        def expand(depth: int, parent: int) -> list[tuple[int, float]]:
            # The token before depth 1 is committed: the first layer has read it, there is nothing to correct.
            if depth == 1 or not self.markov:
                return marginals[depth - 1]
            previous = torch.tensor([self.index[parent]], device=logits.device)
            return self._candidates(logits[depth - 1] + self.model.markov(previous), top_k)[0]

        return grow(self.tree, self.root, expand, min(room, len(states)), passes=1, pays=self.pays(1))

    def _candidates(self, logits: Tensor, top_k: int) -> list[list[tuple[int, float]]]:
        """Rows of draft logits (R, V) -> for each the top (target token, log-probability), best first."""
        top = torch.log_softmax(logits, dim=-1).topk(top_k)
        return [
            [(self.vocabulary[i], p) for i, p in zip(ids, ps, strict=True)]
            for ids, ps in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
