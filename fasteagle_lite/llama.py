"""The layers of the Llama family, shared by the target model and by every neural drafter.

Shapes: B batch, T new rows, S visible keys, h hidden width, H query heads, K key/value heads, D head width.
References: Llama (arXiv 2302.13971), grouped-query attention (arXiv 2305.13245), RoPE (arXiv 2104.09864).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .linear import Linear

# Above this many rows the scores no longer fit the cache and PyTorch's fused attention wins over two plain products;
# its backward pass only later.
_FUSED_ATTENTION_ROWS = 64
_FUSED_TRAINING_ROWS = 256


@dataclass(frozen=True)
class LayerSpec:
    """Shape of one decoder layer.

    `inputs` is the width that attention reads: the hidden width, or twice that for an EAGLE-3 layer, which reads the
    token embedding beside the hidden state.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float = 1e-5
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Rope(nn.Module):
    """Rotary position embedding: a table of cosines and sines, read by position.

    `inverse_frequencies` has shape (D/2,); `scale` multiplies both tables (transformers' attention factor).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, inverse_frequencies: Tensor, positions: int, scale: float = 1.0):
        super().__init__()
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies.float())
        angles = torch.cat([angles, angles], dim=-1)  # (positions, D)
        self.register_buffer("cos", angles.cos() * scale, persistent=False)
        self.register_buffer("sin", angles.sin() * scale, persistent=False)

    @staticmethod
    def default(head_dim: int, theta: float, positions: int) -> Rope:
        return Rope(theta ** -(torch.arange(0, head_dim, 2).float() / head_dim), positions)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tables for `positions` (T,), shaped (T, 1, D) to broadcast over heads."""
        return self.cos[positions, None], self.sin[positions, None]


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x (B, T, heads, D) by the angles of its rows' positions (half-split layout, as in transformers)."""
    cos, sin = rope
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-right, left], dim=-1) * sin.to(x.dtype)


class KVCache:
    """Preallocated keys and values of all layers, of which the first `length` rows are committed.

    Rows behind `length` are scratch: a tree writes its nodes there, and `keep` moves the accepted ones down.
    """

    def __init__(self, layers: int, batch: int, spec: LayerSpec, capacity: int, like: Tensor):
        self.data = like.new_zeros((layers, 2, batch, spec.kv_heads, capacity, spec.head_dim))
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.data.shape[-2]

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, T, K, D) at rows `start`..; return all keys and values up to there, each (B, K, S, D)."""
        stop = start + k.shape[1]
        keys, values = self.data[layer]
        keys[:, :, start:stop] = k.transpose(1, 2)
        values[:, :, start:stop] = v.transpose(1, 2)
        return keys[:, :, :stop], values[:, :, :stop]

    def keep(self, rows: list[int]) -> None:
        """Commit scratch rows (ascending offsets from `length`), in this order, and forget the others."""
        base, count = self.length, len(rows)
        if rows != list(range(count)):  # a path along the first nodes already lies where it belongs
            source = torch.tensor([base + row for row in rows], device=self.data.device)
            self.data[..., base : base + count, :] = self.data.index_select(-2, source)
        self.length = base + count

    def fork(self) -> KVCache:
        """An independent copy with the same committed rows."""
        twin = object.__new__(KVCache)
        twin.data = torch.zeros_like(self.data)
        twin.data[..., : self.length, :] = self.data[..., : self.length, :]
        twin.length = self.length
        return twin


def attention_bias(mask: Tensor | None, rows: int, keys: int, like: Tensor) -> Tensor | None:
    """Additive bias (rows, keys) in like's dtype: 0 where a row sees a key, -inf where not; None if all see all.

    `mask` (rows, M) speaks of the last M keys only; everything before them is committed and seen by every row.
    Without a mask the rows follow each other causally.
    """
    if mask is None:
        if rows == 1:
            return None
        mask = torch.ones(rows, rows, dtype=torch.bool, device=like.device).tril()
    bias = like.new_zeros((rows, keys))
    bias[:, keys - mask.shape[1] :].masked_fill_(~mask, float("-inf"))
    return bias


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Grouped-query attention: q (B, T, H, D), k and v (B, K, S, D), bias (T, S) -> (B, T, H*D)."""
    batch, rows, heads, dim = q.shape
    groups = heads // k.shape[1]
    if q.is_cuda or rows > (_FUSED_TRAINING_ROWS if q.requires_grad else _FUSED_ATTENTION_ROWS):
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=bias, enable_gqa=groups > 1)
        return out.transpose(1, 2).reshape(batch, rows, heads * dim)
    # Query heads of one group share their keys: stack them as rows and multiply once, without repeating the cache.
    q = q.view(batch, rows, -1, groups, dim).permute(0, 2, 3, 1, 4)  # (B, K, G, T, D)
    scores = q.reshape(batch, -1, groups * rows, dim) @ k.transpose(-1, -2) * dim**-0.5
    if bias is not None:
        scores = (scores.view(batch, -1, groups, rows, k.shape[2]) + bias).view(scores.shape)
    out = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v  # (B, K, G*T, D)
    return out.view(batch, -1, groups, rows, dim).permute(0, 3, 1, 2, 4).reshape(batch, rows, heads * dim)


class Attention(nn.Module):
    """Grouped-query self-attention in three steps, so that training-time test can put its own attention between."""

    def __init__(self, spec: LayerSpec, inputs: int):
        super().__init__()
        self.heads, self.kv_heads, self.dim = spec.heads, spec.kv_heads, spec.head_dim
        self.qkv = Linear(inputs, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, bias=spec.qkv_bias)
        self.output = Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.output_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.eps) if spec.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(spec.head_dim, spec.eps) if spec.qk_norm else nn.Identity()

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, inputs) -> turned queries (B, T, H, D), turned keys and values (B, T, K, D)."""
        batch, rows, _ = x.shape
        q, k, v = self.qkv(x).split([self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim], -1)
        q = self.q_norm(q.view(batch, rows, self.heads, self.dim))
        k = self.k_norm(k.view(batch, rows, self.kv_heads, self.dim))
        return rotate(q, rope), rotate(k, rope), v.view(batch, rows, self.kv_heads, self.dim)


class SwiGLU(nn.Module):
    def __init__(self, spec: LayerSpec):
        super().__init__()
        self.gate_up = Linear(spec.hidden, 2 * spec.ffn, bias=spec.mlp_bias)
        self.down = Linear(spec.ffn, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


@dataclass
class Rows:
    """What the rows of one forward share in every layer: their rotary angles, who sees whom, where they are stored."""

    rope: tuple[Tensor, Tensor]
    bias: Tensor | None
    cache: KVCache | None = None
    start: int = 0


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, spec: LayerSpec):
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden, spec.eps)
        self.attention = Attention(spec, spec.hidden)
        self.mlp_norm = RMSNorm(spec.hidden, spec.eps)
        self.mlp = SwiGLU(spec)

    def forward(self, x: Tensor, rows: Rows, layer: int = 0) -> Tensor:
        x = x + attention_step(self.attention, self.attention_norm(x), rows, layer)
        return x + self.mlp(self.mlp_norm(x))


def attention_step(attention: Attention, x: Tensor, rows: Rows, layer: int) -> Tensor:
    """Project, store in the cache if there is one, attend, project back: (B, T, inputs) -> (B, T, h)."""
    q, k, v = attention.project(x, rows.rope)
    if rows.cache is None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    else:
        k, v = rows.cache.write(layer, rows.start, k, v)
    return attention.output(attend(q, k, v, rows.bias))
