"""Drafter checkpoints: there and back, and every way in which a folder can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from fasteagle_lite.decode import decode, prefill
from fasteagle_lite.drafters import checkpoint
from fasteagle_lite.drafters.checkpoint import Model, load_checkpoint, new_model, save_checkpoint
from fasteagle_lite.errors import UserError
from fasteagle_lite.target import Target
from fasteagle_lite.tree import TreeConfig

KINDS = ("cascade", "autoregressive")


@pytest.fixture(params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path: Path, target: Target, models: dict[str, Model]) -> Path:
    """A checkpoint of either drafter."""
    save_checkpoint(models[request.param], target.name, target.fingerprint, tmp_path / "drafter", {"a": 1})
    return tmp_path / "drafter"


def test_what_is_loaded_was_saved(saved: Path, target: Target, models: dict[str, Model]) -> None:
    loaded = load_checkpoint(saved, target, for_training=True)
    before = models[loaded.kind]
    assert loaded.config == before.config
    assert loaded.state_dict().keys() == before.state_dict().keys()
    for name, weight in loaded.state_dict().items():
        assert torch.allclose(weight, before.state_dict()[name], atol=2e-3, rtol=1e-3)
    assert json.loads((saved / "provenance.json").read_text()) == {"a": 1}


def test_a_loaded_drafter_drafts_like_the_saved_one(saved: Path, target: Target, models: dict[str, Model]) -> None:
    loaded = load_checkpoint(saved, target)
    config = TreeConfig("chain", 5)
    trees = []
    for model in (models[loaded.kind], loaded):
        drafter = tiny.drafter(loaded.kind, {loaded.kind: model}, target, config)
        rounds = decode(target, drafter, prefill(target, [3, 5, 7], 20), max_new_tokens=20)
        trees.append([r.tokens for r in rounds])
    assert trees[0] == trees[1]
    assert not any(p.requires_grad for p in loaded.parameters())


def test_the_targets_head_is_not_in_the_checkpoint(saved: Path) -> None:
    names = {name for file in saved.glob("*.safetensors") for name in load_file(file)}
    assert "head.vocabulary" in names
    assert "head.linear.weight" not in names


def test_an_own_head_is(tmp_path: Path, target: Target) -> None:
    model = new_model("autoregressive", target, torch.arange(9), ffn=16, own_head=True)
    torch.nn.init.normal_(model.head.linear.weight)
    save_checkpoint(model, target.name, target.fingerprint, tmp_path / "drafter", {})
    loaded = load_checkpoint(tmp_path / "drafter", target, for_training=True)
    assert torch.allclose(loaded.head.linear.weight, model.head.linear.weight, atol=2e-3)


def test_shards_stay_small(
    tmp_path: Path, target: Target, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD", "8KB")
    save_checkpoint(models["cascade"], target.name, target.fingerprint, tmp_path / "drafter", {})
    shards = sorted((tmp_path / "drafter").glob("*.safetensors"))
    assert len(shards) > 2
    load_checkpoint(tmp_path / "drafter", target)
    shards[1].unlink()
    with pytest.raises(UserError, match=r"do not fit|missing"):
        load_checkpoint(tmp_path / "drafter", target)


def test_saving_again_replaces_weights_and_keeps_the_card(
    saved: Path, target: Target, models: dict[str, Model]
) -> None:
    (saved / "README.md").write_text("the card")
    (saved / "model-00001-of-00002.safetensors").write_bytes(b"an old shard")
    kind = json.loads((saved / "config.json").read_text())["drafter"]
    save_checkpoint(models[kind], target.name, target.fingerprint, saved, {"a": 2})
    assert (saved / "README.md").read_text() == "the card"
    assert json.loads((saved / "provenance.json").read_text()) == {"a": 2}
    load_checkpoint(saved, target)
    assert [path.name for path in saved.parent.iterdir() if path != saved and path.name.startswith(".")] == []


@pytest.mark.parametrize("place", ["file/drafter", "file"])
def test_an_unwritable_place_is_explained(place: str, tmp_path: Path, target: Target, models: dict[str, Model]) -> None:
    (tmp_path / "file").write_text("here before")
    with pytest.raises(UserError, match="could not be written"):
        save_checkpoint(models["cascade"], target.name, target.fingerprint, tmp_path / place, {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "here before"


def test_an_interrupted_save_leaves_what_was_there(
    saved: Path, target: Target, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.save_torch_state_dict", fail)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(models["cascade"], target.name, target.fingerprint, saved, {})
    assert [path.name for path in saved.parent.iterdir() if path.name.startswith(".")] == []
    load_checkpoint(saved, target)


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def weights(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def truncate(folder: Path) -> None:
    file = weights(folder)
    file.write_bytes(file.read_bytes()[:-100])


def drop_a_weight(folder: Path) -> None:
    state = load_file(weights(folder))
    del state["fusion.gain"]
    save_file(state, weights(folder))


def misshape_a_weight(folder: Path) -> None:
    save_file(load_file(weights(folder)) | {"fusion.gain": torch.zeros(5)}, weights(folder))


def other_sizes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(folder, model=config["model"] | {"ffn": 24})


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "config no json": (lambda f: (f / "config.json").write_text("{"), "not a drafter configuration"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), "not a drafter configuration"),
    "unknown drafter": (lambda f: edit(f, drafter="oracle"), "not a drafter configuration"),
    "unknown size": (lambda f: edit(f, model={"depth": 3}), "not a drafter configuration"),
    "no target": (lambda f: edit(f, target={}), "not a drafter configuration"),
    "another target": (
        lambda f: edit(f, target={"name": "SomeOther-7B", "fingerprint": "0" * 64}),
        "trained for SomeOther-7B.*but the target is tiny",
    ),
    "truncated weights": (truncate, "truncated or no safetensors file"),
    "weights are text": (lambda f: weights(f).write_text("weights"), "truncated or no safetensors file"),
    "no weights": (lambda f: weights(f).unlink(), "missing or foreign"),
    "foreign weights": (lambda f: save_file({"a": torch.zeros(1)}, weights(f)), "missing or foreign"),
    "a weight is missing": (drop_a_weight, r"do not fit its config.json \(fusion.gain\)"),
    "a weight has another shape": (misshape_a_weight, r"do not fit its config.json \(fusion.gain\)"),
    "config has other sizes": (other_sizes, "do not fit its config.json"),
}


@pytest.mark.parametrize(("spoil", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_wrong_folders_are_explained(spoil: Callable[[Path], Any], sentence: str, saved: Path, target: Target) -> None:
    load_checkpoint(saved, target)
    spoil(saved)
    with pytest.raises(UserError, match=sentence):
        load_checkpoint(saved, target)


def test_a_missing_folder_is_explained(tmp_path: Path, target: Target) -> None:
    with pytest.raises(UserError, match="No drafter checkpoint"):
        load_checkpoint(tmp_path / "nothing", target)
