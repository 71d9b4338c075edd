"""Drawing the next token: temperature, top-k, top-p, and noise that depends on nothing but (seed, position, token).

Gumbel-max: argmax(log p + g) with independent Gumbel noise g is a draw from p.  Because g is keyed by the absolute
position, every lane draws the same token from the same distribution, whatever tree it verified it in: "identical to plain
decoding" can be checked token by token also when sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.  temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"The temperature is {self.temperature}; it must be 0 (greedy) or above.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p is {self.top_p}; it must be above 0 and at most 1.")
        if self.top_k < 0:
            raise UserError(f"top-k is {self.top_k}; it must be 0 (off) or above.")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"The seed is {self.seed}; it must lie between 0 and 2^63 - 1.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities (vocab,) in fp64 after temperature, then top-k, then top-p; excluded tokens are -inf.

    top-p keeps the smallest set of most probable tokens whose probability reaches it, at least one.
    """
    logprobs = torch.log_softmax(logits.double() / sampling.temperature, dim=-1)
    if 0 < sampling.top_k < len(logprobs):
        kept = logprobs.topk(sampling.top_k).indices
        logprobs = torch.full_like(logprobs, -torch.inf).index_copy(0, kept, logprobs[kept])
        logprobs = torch.log_softmax(logprobs, dim=-1)
    if sampling.top_p < 1:
        ordered, order = logprobs.sort(descending=True, stable=True)
        probs = ordered.exp()
        beyond = probs.cumsum(0) - probs >= sampling.top_p  # reached before this token
        logprobs = logprobs.index_fill(0, order[beyond], -torch.inf)
        logprobs = torch.log_softmax(logprobs, dim=-1)
    return logprobs


def gumbel(seed: int, position: int, tokens: Tensor) -> Tensor:
    """Gumbel noise in fp64 for `tokens` at an absolute position: a counter-based hash, the same on every device.

    SplitMix64 (Steele, Lea and Flood, 2014) is applied to the seed, then with the position, then with the token id.
    """
    key = torch.tensor([seed], dtype=torch.int64, device=tokens.device)
    key = _splitmix(_splitmix(key) + position)
    bits = _splitmix(key + tokens.long() * _GOLDEN)
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52  # in (0, 1), never 0 or 1
    return -torch.log(-torch.log(uniform))


def draw(logits: Tensor, sampling: Sampling, position: int) -> int:
    """The token at absolute `position`, drawn from logits (vocab,)."""
    if sampling.greedy:
        return int(logits.argmax())
    logprobs = warp(logits, sampling)
    kept = (logprobs > -torch.inf).nonzero()[:, 0]
    return int(kept[(logprobs[kept] + gumbel(sampling.seed, position, kept)).argmax()])


def _signed(value: int) -> int:
    """The 64-bit pattern `value` as torch's int64."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> by) & (2 ** (64 - by) - 1)


def _splitmix(x: Tensor) -> Tensor:
    """SplitMix64's output function on int64 (products wrap around)."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)
