"""Ablations on the tiny model: what a run changes, what is recorded, and that results are kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from fasteagle_lite.drafters.cascade import Cascade, CascadeConfig
from fasteagle_lite.errors import UserError
from fasteagle_lite.llama import Rope, Rows, attention_bias
from fasteagle_lite.training import ablate as module
from fasteagle_lite.training.data import Corpus, Features
from fasteagle_lite.training.trainer import TrainConfig


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setenv("FASTEAGLE_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 12, size=24)
    tokens = rng.integers(0, tiny.VOCAB, size=int(lengths.sum()))
    np.savez(tmp_path / "c.npz", tokens=tokens, length=lengths, start=np.full(24, 3))
    return Corpus.load([tmp_path / "c.npz"], tiny.VOCAB)


@pytest.mark.parametrize("name", module.RUNS)
def test_every_ablation_is_a_valid_configuration(name: str) -> None:
    changed = TrainConfig("cascade", **module.RUNS[name])
    assert (changed == TrainConfig("cascade")) == (name == "baseline")


def test_results_are_recorded_and_kept(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny.talking_target()
    features = Features(corpus, target)
    monkeypatch.setattr(module, "NEW_TOKENS", 6)
    monkeypatch.setattr(module, "RUNS", {"baseline": {"ffn": 8}, "no cascade": {"ffn": 8, "parallel": True}})
    out = tmp_path / "new" / "ablations.json"
    for names in (["baseline"], ["baseline", "no cascade"]):
        module.ablate(target, corpus, features, names, 60, out, command="it")
    assert capsys.readouterr().err.count("already") == 1
    results = json.loads(out.read_text())
    assert list(results["runs"]) == ["baseline", "no cascade"]
    for run in results["runs"].values():
        assert run["visits"] >= 60
        assert len(run["agreement"]) == 4
        assert 1 <= run["tau"] <= 5
    assert not list(out.parent.glob("*.pt"))
    with pytest.raises(UserError, match="No ablation 'x'"):
        module.ablate(target, corpus, features, ["x"], 60, out, command="it")


def test_trees_are_compared_over_one_drafter(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.talking_target()
    monkeypatch.setattr(module, "NEW_TOKENS", 4)
    monkeypatch.setattr(module, "PROMPTS", 2)
    module.compare_trees(tiny.drafter_model("cascade", target), target, corpus, tmp_path / "a.json", command="it")
    trees = json.loads((tmp_path / "a.json").read_text())["trees"]
    assert len(trees) == len(module.TREES) + 3
    assert trees["best_first:8 without Markov head"]["markov"] is False


def states(config: CascadeConfig, change: int) -> list[torch.Tensor]:
    """Layer states on fixed inputs, after the weights of layer `change` have been disturbed (-1: none)."""
    torch.manual_seed(0)
    model = Cascade(config, torch.arange(config.vocabulary))
    taps, embeddings = torch.randn(1, 5, 3 * config.hidden), torch.randn(1, 5, config.hidden)
    if change >= 0:
        torch.nn.init.normal_(model.layers[change].mlp.down.weight)
    rope = Rope.default(config.head_dim, 10000.0, 8)(torch.arange(5))
    with torch.inference_mode():
        return model(taps, embeddings, Rows(rope, attention_bias(None, 5, 5, taps)))


def test_parallel_layers_read_the_first_and_cascaded_ones_the_one_before() -> None:
    sizes = CascadeConfig(hidden=16, heads=2, kv_heads=1, head_dim=8, vocabulary=20, layers=4, ffn=8)
    for parallel, reached in ((True, [False, True, False, False]), (False, [False, True, True, True])):
        config = CascadeConfig(**{**vars(sizes), "parallel": parallel})
        changed = [not torch.equal(a, b) for a, b in zip(states(config, -1), states(config, 1), strict=True)]
        assert changed == reached
