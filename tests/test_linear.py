"""Packed products give the numbers of plain ones, with or without oneDNN's operator."""

from __future__ import annotations

import pytest
import torch

from fasteagle_lite import linear
from fasteagle_lite.linear import Linear, pack


@pytest.fixture(params=[False, True], ids=["no bias", "bias"])
def layer(request: pytest.FixtureRequest) -> Linear:
    torch.manual_seed(0)
    return Linear(48, 80, bias=request.param).requires_grad_(False)


@pytest.mark.parametrize("works", [True, False], ids=["onednn", "fallback"])
def test_packing_changes_no_number(layer: Linear, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not works:
        monkeypatch.setattr(linear, "_onednn_works", lambda: False)
    inputs = [torch.randn(1, rows, 48) for rows in range(1, 65)]
    before = [layer(x) for x in inputs]
    layer.pack()
    assert (layer._packed is not None) == (works and linear._onednn_works())
    for x, y in zip(inputs, before, strict=True):
        assert torch.allclose(layer(x), y, atol=1e-5)


def test_a_missing_operator_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", missing)
    assert linear._onednn_works.__wrapped__() is False


def test_an_operator_that_miscalculates_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not linear._onednn_works():
        pytest.skip("this build of PyTorch has no prepacked linear")
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda x, *_: torch.zeros(3, 48))
    assert linear._onednn_works.__wrapped__() is False


def test_other_dtypes_stay_plain() -> None:
    layer = Linear(48, 80).bfloat16()
    layer.pack()
    assert layer._packed is None


def test_the_weight_is_kept_on_request(layer: Linear) -> None:
    weight = layer.weight.clone()
    layer.pack(keep_weight=True)
    assert torch.equal(layer.weight, weight)


def test_pack_reaches_every_layer_below() -> None:
    if not linear._onednn_works():
        pytest.skip("this build of PyTorch has no prepacked linear")
    module = torch.nn.Sequential(Linear(8, 8), torch.nn.Sequential(Linear(8, 8)), torch.nn.Linear(8, 8))
    pack(module.requires_grad_(False))
    assert module[0]._packed is not None
    assert module[1][0]._packed is not None
    assert torch.is_tensor(module[2](torch.randn(1, 8)))
