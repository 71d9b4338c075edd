"""Drafter checkpoints: a folder with config.json and half-precision safetensors shards of the drafter's own weights.

The frozen head and embedding are the target's; config.json names that target and its fingerprint, and a mismatch is an
error before the first token, not an acceptance of zero.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import UserError
from ..linear import pack
from ..target import Target
from .autoregressive import Autoregressive, AutoregressiveConfig
from .cascade import Cascade, CascadeConfig

Model = Cascade | Autoregressive
MODELS: dict[str, tuple[Any, Any]] = {
    Cascade.kind: (Cascade, CascadeConfig),
    Autoregressive.kind: (Autoregressive, AutoregressiveConfig),
}
_HEAD = "head.linear.weight"
SHARD = "9MB"  # a Space takes larger files only as LFS objects


def new_model(kind: str, target: Target, vocabulary: Tensor, **sizes: Any) -> Model:
    """A drafter with random weights whose widths are the target's."""
    model_class, config_class = MODELS[kind]
    spec = target.spec
    config = config_class(spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, len(vocabulary), **sizes)
    model: Model = model_class(config, vocabulary)
    model.head.copy_from(target.head)
    return model.to(target.device)


def own_state(model: Model) -> dict[str, Tensor]:
    """The weights a checkpoint holds: all but head rows that are the target's."""
    return {k: v for k, v in model.state_dict().items() if model.head.own or k != _HEAD}


def save_checkpoint(
    model: Model, target_name: str, target_fingerprint: str, folder: Path, provenance: dict[str, Any]
) -> None:
    """Write a checkpoint beside its place and move it there, so that a half-written one never exists."""
    from huggingface_hub import save_torch_state_dict

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            state = {k: v.half() if v.is_floating_point() else v.int() for k, v in own_state(model).items()}
            save_torch_state_dict(state, scratch, max_shard_size=SHARD)
            config = {
                "drafter": model.kind,
                "model": asdict(model.config),
                "target": {"name": target_name, "fingerprint": target_fingerprint},
            }
            (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            (scratch / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
            for file in scratch.iterdir():
                file.chmod(0o644)
            if folder.exists():  # keep what a person put beside the weights, such as the model card
                for file in folder.iterdir():
                    if file.suffix != ".safetensors" and not (scratch / file.name).exists():
                        shutil.copy2(file, scratch)
                shutil.rmtree(folder)
            scratch.chmod(0o755)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise UserError(f"The checkpoint could not be written to {folder} ({error.strerror or error}).") from None


def load_checkpoint(folder: Path, target: Target, *, for_training: bool = False) -> Model:
    """Load a drafter for this target; packed and frozen unless it is to be trained on."""
    from safetensors.torch import load_file

    if not (folder / "config.json").is_file():
        raise UserError(f"No drafter checkpoint at {folder}: config.json is missing.")
    try:
        config = json.loads((folder / "config.json").read_text())
        model_class, config_class = MODELS[config["drafter"]]
        sizes, made_for = config_class(**config["model"]), config["target"]
        made_for["name"], made_for["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / 'config.json'} is not a drafter configuration of this project ({error!r})."
        ) from None
    if made_for["fingerprint"] != target.fingerprint:
        raise UserError(
            f"The drafter in {folder} was trained for {made_for['name']} ({made_for['fingerprint'][:12]}…), "
            f"but the target is {target.name} ({target.fingerprint[:12]}…). Use its own target or train a drafter for this one."
        )
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            state.update(load_file(file))
        except Exception as error:  # safetensors raises its own, undocumented types
            raise UserError(
                f"{file} is truncated or no safetensors file ({error}). Fetch the checkpoint again."
            ) from None
    if "head.vocabulary" not in state:
        raise UserError(f"{folder} holds no weights of a drafter: its *.safetensors files are missing or foreign.")
    model: Model = model_class(sizes, state["head.vocabulary"])
    model.head.copy_from(target.head)
    state = {k: v.float() if v.is_floating_point() else v.long() for k, v in state.items()}
    missing = set(own_state(model)) ^ set(state)
    wrong = [k for k, v in state.items() if k not in missing and v.shape != model.state_dict()[k].shape]
    if missing or wrong:
        named = ", ".join(sorted(missing | set(wrong))[:3])
        raise UserError(f"The weights in {folder} do not fit its config.json ({named}). Fetch the checkpoint again.")
    model.load_state_dict(state, strict=False)
    model = model.to(target.device, target.embedding.weight.dtype)
    if not for_training:
        model.requires_grad_(False).eval()
        pack(model)
    return model
