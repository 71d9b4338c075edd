"""The shared layers: cache rows, attention bias, both ways to attend, rotary tables."""

from __future__ import annotations

import pytest
import torch

from fasteagle_lite.llama import DecoderLayer, KVCache, LayerSpec, RMSNorm, Rope, Rows, attend, attention_bias, rotate

SPEC = LayerSpec(hidden=24, heads=6, kv_heads=2, head_dim=4, ffn=16)


def filled(committed: int, scratch: int) -> KVCache:
    cache = KVCache(2, 1, SPEC, committed + scratch, like=torch.empty(0))
    cache.data.normal_()
    cache.length = committed
    return cache


@pytest.mark.parametrize("seed", range(20))
def test_keep_moves_the_rows_it_is_told(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    committed, scratch = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
    cache = filled(committed, scratch)
    rows = [row for row in range(scratch) if torch.rand((), generator=generator) < 0.5]
    before = cache.data.clone()
    cache.keep(rows)
    assert cache.length == committed + len(rows)
    for place, row in enumerate([*range(committed), *(committed + row for row in rows)]):
        assert torch.equal(cache.data[..., place, :], before[..., row, :])


def test_a_fork_is_independent() -> None:
    cache = filled(3, 4)
    twin, before = cache.fork(), cache.data.clone()
    assert twin.length == 3
    assert twin.capacity == cache.capacity
    assert torch.equal(twin.data[..., :3, :], cache.data[..., :3, :])
    twin.data.fill_(7.0)
    twin.keep([0, 1])
    assert cache.length == 3
    assert torch.equal(cache.data, before)


def test_write_returns_everything_up_to_there() -> None:
    cache = filled(3, 4)
    k, v = torch.randn(1, 2, 2, 4), torch.randn(1, 2, 2, 4)
    before = cache.data[1].clone()
    keys, values = cache.write(1, 3, k, v)
    assert torch.equal(keys, torch.cat([before[0][:, :, :3], k.transpose(1, 2)], 2))
    assert torch.equal(values, torch.cat([before[1][:, :, :3], v.transpose(1, 2)], 2))


def test_bias_of_a_mask_lets_committed_keys_through() -> None:
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    bias = attention_bias(mask, 5, 10, torch.empty(0))
    for row in range(5):
        for key in range(10):
            assert bias[row, key] == (0.0 if key < 3 or mask[row, key - 3] else -torch.inf)


def test_bias_without_a_mask_is_causal() -> None:
    bias = attention_bias(None, 3, 5, torch.empty(0))
    assert (bias == 0).tolist() == [
        [True, True, True, False, False],
        [True, True, True, True, False],
        [True, True, True, True, True],
    ]
    assert attention_bias(None, 1, 5, torch.empty(0)) is None


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Head by head: query head h reads key head h // groups."""
    heads = []
    for h in range(q.shape[2]):
        g = h // (q.shape[2] // k.shape[1])
        scores = q[:, :, h] @ k[:, g].transpose(-1, -2) / q.shape[-1] ** 0.5
        heads.append(torch.softmax(scores if bias is None else scores + bias, -1) @ v[:, g])
    return torch.cat(heads, -1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("rows", [1, 7, 64, 65])
def test_attend_is_plain_attention(rows: int, heads: int, kv_heads: int, masked: bool) -> None:
    keys = rows + 5
    torch.manual_seed(rows)
    q, k, v = torch.randn(2, rows, heads, 4), torch.randn(2, kv_heads, keys, 4), torch.randn(2, kv_heads, keys, 4)
    bias = attention_bias(torch.ones(rows, rows).tril().bool(), rows, keys, q) if masked else None
    assert torch.allclose(attend(q, k, v, bias), naive_attention(q, k, v, bias), atol=1e-5)


def test_both_ways_to_attend_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 9, 6, 4), torch.randn(1, 2, 20, 4), torch.randn(1, 2, 20, 4)
    bias = attention_bias(None, 9, 20, q)
    small = attend(q, k, v, bias)
    monkeypatch.setattr("fasteagle_lite.llama._FUSED_ATTENTION_ROWS", 0)
    assert torch.allclose(small, attend(q, k, v, bias), atol=1e-5)


def test_rotation_depends_on_distance_only() -> None:
    rope = Rope.default(8, 1e4, 64)
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def product(at_q: int, at_k: int) -> float:
        return float((rotate(q, rope(torch.tensor([at_q]))) * rotate(k, rope(torch.tensor([at_k])))).sum())

    assert product(9, 4) == pytest.approx(product(45, 40), abs=1e-5)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)
    assert float(rotate(q, rope(torch.tensor([17]))).norm()) == pytest.approx(float(q.norm()), abs=1e-5)


def test_norm_is_computed_in_full_precision() -> None:
    x = torch.randn(3, 8) * 1000  # the squares would overflow fp16
    norm = RMSNorm(8, 1e-5)
    assert torch.allclose(norm.half()(x.half()).float(), x / x.square().mean(-1, keepdim=True).sqrt(), atol=2e-3)


def test_a_layer_with_a_cache_is_the_layer_without() -> None:
    torch.manual_seed(0)
    layer, rope, x = DecoderLayer(SPEC), Rope.default(4, 1e4, 16), torch.randn(1, 10, 24)
    whole = layer(x, Rows(rope(torch.arange(10)), attention_bias(None, 10, 10, x)))
    cache = KVCache(1, 1, SPEC, 10, like=x)
    with torch.no_grad():
        for start, stop in ((0, 6), (6, 7), (7, 10)):
            rows = Rows(
                rope(torch.arange(start, stop)), attention_bias(None, stop - start, stop, x), cache=cache, start=start
            )
            assert torch.allclose(layer(x[:, start:stop], rows), whole[:, start:stop], atol=1e-5)
