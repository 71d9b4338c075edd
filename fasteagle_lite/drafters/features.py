"""What neural drafters share: fused target features, the reduced draft vocabulary, and the frozen head's rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..linear import Linear
from ..llama import RMSNorm


def unit_taps(taps: Tensor) -> Tensor:
    """Scale each of the three taps in (..., 3h) to unit root mean square, in fp32.

    The residual stream grows tenfold with depth, and a sequence's first position is hundreds of times larger than the
    others; without this the projection would listen to those alone (and fp16 caches overflow).
    """
    x = taps.float().unflatten(-1, (3, -1))
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).flatten(-2)


class Fusion(nn.Module):
    """Fused feature g = FC(concat(low, mid, high)): unit taps (..., 3h) -> (..., h), each tap with its own gain."""

    def __init__(self, hidden: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3 * hidden))
        self.project = Linear(3 * hidden, hidden)

    def forward(self, taps: Tensor) -> Tensor:
        return self.project(taps * self.gain)


class DraftHead(nn.Module):
    """Logits over the draft vocabulary from the target's own head rows, frozen (EAGLE-1) or copied and trained (EAGLE-3).

    `vocabulary` (V,) holds the target ids of the draft tokens, ascending.
    """

    vocabulary: Tensor

    def __init__(self, vocabulary: Tensor, hidden: int, own: bool):
        super().__init__()
        self.register_buffer("vocabulary", vocabulary.long())
        self.linear = Linear(hidden, len(vocabulary))
        self.own = own
        self.linear.requires_grad_(own)

    def copy_from(self, head: Linear) -> None:
        with torch.no_grad():
            self.linear.weight.copy_(head.weight[self.vocabulary])

    def logits(self, x: Tensor, among: Tensor | None = None) -> Tensor:
        """(..., h) -> (..., V), or only for the draft indices `among` (sampled-vocabulary training)."""
        return self.linear(x) if among is None else F.linear(x, self.linear.weight[among])


def new_norm(hidden: int) -> RMSNorm:
    return RMSNorm(hidden, 1e-5)
