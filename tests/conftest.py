"""One thread, a cache folder of each test's own, and the models that several files share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from fasteagle_lite.drafters.checkpoint import Model
from fasteagle_lite.engine import Engine
from fasteagle_lite.target import Target

torch.set_num_threads(1)  # tiny products gain nothing from more, and the machine may be busy


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a person's cache and settings out of the tests (and the tests out of those), except where they are meant."""
    if not {"real", "browser"} & {mark.name for mark in request.node.iter_markers()}:
        monkeypatch.setenv("FASTEAGLE_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("FASTEAGLE_TARGET", raising=False)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same numbers in every run, in whatever order the tests come."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def model() -> Any:
    """transformers' side of the tiny model without a tokenizer."""
    return tiny.hf_model()


@pytest.fixture(scope="session")
def target(model: Any) -> Target:
    return Target.from_model(model, name="tiny", fingerprint="f" * 64)


@pytest.fixture(scope="session")
def models(target: Target) -> dict[str, Model]:
    """Both neural drafters, with random weights."""
    return {name: tiny.drafter_model(name, target) for name in ("cascade", "autoregressive")}


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def checkpoints(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both drafters for `target_folder`."""
    loaded = Target.from_folder(target_folder, name="tiny")
    return tiny.save_drafters(loaded, target_folder, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def real_engine() -> Engine:
    """The default target and the drafters in assets/."""
    os.environ.pop("FASTEAGLE_TARGET", None)
    return Engine.load()
