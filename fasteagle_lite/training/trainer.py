"""The training loop: same for both drafters, counted in token visits, resumable at any moment."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..drafters.cascade import Cascade, with_trunk
from ..drafters.checkpoint import Model, load_checkpoint, new_model, own_state, save_checkpoint
from ..environment import describe
from ..errors import UserError
from ..store import say
from ..target import Target
from .batches import Batches, chunks
from .card import model_card
from .data import Corpus, Features
from .losses import Batch, Vocabulary, agreement, autoregressive_loss, cascade_loss


def bf16_is_fast() -> bool:
    """Whether this machine multiplies bf16 matrices in hardware (a GPU, or a CPU with AVX512-BF16 or AMX)."""
    return torch.cuda.is_available() or any(
        getattr(torch.cpu, name, lambda: False)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the outcome of a run.

    visits: response tokens to train on, repetitions counted.  sequences: per step.  negatives: sampled part of the
    softmax (0: all of it).  depths: positions to draft (cascade layers; training-time test steps).  decay: the last
    part of the run in which the learning rate falls to a twentieth.  bf16: matrix products in bf16, weights stay fp32.
    optimizer: adamw, or muon (arXiv 2502.16982) for the matrices and AdamW for the rest.  supervise: all layers of a
    cascade, or only the last (an ablation, like parallel).
    """

    drafter: str
    visits: int = 1_000_000
    sequences: int = 4
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    decay: float = 0.4
    negatives: int = 1024
    vocabulary: int = 8192
    depths: int = 4
    ffn: int | None = None
    markov_rank: int = 64
    trunk: int = 0
    parallel: bool = False
    supervise: str = "all"
    optimizer: str = "adamw"
    own_head: bool = False
    feature_weight: float = 0.0
    bf16: bool = field(default_factory=bf16_is_fast)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("visits", "sequences", "vocabulary", "depths"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} is {getattr(self, name)}; it must be at least 1.")
        if not 0 < self.learning_rate < 1:
            raise UserError(f"--learning-rate is {self.learning_rate}; it must lie between 0 and 1.")
        for name, choices in (("supervise", ("all", "last")), ("optimizer", ("adamw", "muon"))):
            if getattr(self, name) not in choices:
                raise UserError(f"--{name} is {getattr(self, name)!r}; choose {' or '.join(choices)}.")

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of the drafter's configuration."""
        sizes: dict[str, Any] = {} if self.ffn is None else {"ffn": self.ffn}
        if self.drafter == Cascade.kind:
            names = ("markov_rank", "trunk", "parallel")
            return sizes | {"layers": self.depths} | {name: getattr(self, name) for name in names}
        return sizes | {"own_head": self.own_head}


class Trainer:
    """One run.  `train` yields a record (visits, losses, rate) every `report_every` seconds and after every evaluation."""

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        corpus: Corpus,
        *,
        features: Features | None = None,
        state_folder: Path,
        start_from: Path | None = None,
    ):
        self.config, self.target, self.corpus = config, target, corpus
        torch.manual_seed(config.seed)
        if start_from is None:
            vocabulary = torch.from_numpy(corpus.frequent_tokens(config.vocabulary))
            self.model: Model = new_model(config.drafter, target, vocabulary, **config.sizes)
        else:
            self.model = load_checkpoint(start_from, target, for_training=True)
            if self.model.kind != config.drafter:
                raise UserError(f"{start_from} holds a drafter of kind {self.model.kind!r}, not {config.drafter!r}.")
            if isinstance(self.model, Cascade) and config.trunk > self.model.config.trunk:
                self.model = with_trunk(self.model, config.trunk)
        features = features or Features(corpus, target)
        self.batches = Batches(corpus, features, target, self.model.head.vocabulary.cpu())
        self.optimizers = _optimizers(config, self.model)
        self.started_from: dict[str, Any] | None = None  # the provenance of the checkpoint gone on from
        if start_from is not None and (start_from / "provenance.json").is_file():
            self.started_from = json.loads((start_from / "provenance.json").read_text())
        self.visits, self.step, self.seconds = 0, 0, 0.0
        self.history: list[dict[str, Any]] = []
        # Not by the number of visits: a run can be made longer or shorter while it goes on.
        key = json.dumps([asdict(replace(config, visits=1)), corpus.sha256, target.fingerprint, str(start_from)])
        self.state_file = state_folder / f"{config.drafter}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.pt"

    def loss(self, batch: Batch) -> tuple[Tensor, list[float]]:
        vocabulary = Vocabulary.sample(batch, self.batches.size, self.config.negatives)
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.config.bf16):
            if isinstance(self.model, Cascade):
                return cascade_loss(
                    self.model,
                    batch,
                    self.target.rope,
                    vocabulary,
                    feature_weight=self.config.feature_weight,
                    last_only=self.config.supervise == "last",
                )
            return autoregressive_loss(self.model, batch, self.target.rope, vocabulary, self.config.depths)

    def learning_rate(self) -> float:
        """Warm-up, plateau, then a linear decay to a twentieth over the last part of the visits."""
        left = (1 - self.visits / self.config.visits) / self.config.decay if self.config.decay else 1.0
        warm = (self.step + 1) / self.config.warmup_steps
        return self.config.learning_rate * min(1.0, warm, max(0.05, left))

    def train(
        self, *, report_every: float = 30, save_every: float = 300, evaluations: int = 10
    ) -> Iterator[dict[str, Any]]:
        rng = np.random.default_rng([self.config.seed, self.step])  # a resumed run goes on with fresh orders
        saved = reported = time.perf_counter()
        since_visits, since_seconds = self.visits, self.seconds
        recent: list[list[float]] = []
        for sequences in self.batches.epochs(self.config.sequences, rng):
            if self.visits >= self.config.visits:
                break
            begun = time.perf_counter()
            batch = self.batches.of(sequences)
            loss, parts = self.loss(batch)
            if not math.isfinite(loss.item()):
                raise UserError(f"The loss became {loss.item()} at {self.visits:,} visits. Lower --learning-rate.")
            self.model.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self.learning_rate()
                optimizer.step()
            recent.append(parts)
            before, self.visits, self.step = self.visits, self.visits + batch.visits, self.step + 1
            now = time.perf_counter()
            self.seconds += now - begun
            every = self.config.visits / evaluations
            evaluate = self.visits // every > before // every or self.visits >= self.config.visits
            if evaluate or now - reported > report_every:
                record: dict[str, Any] = {
                    "visits": self.visits,
                    "loss": [round(sum(p) / len(recent), 4) for p in zip(*recent, strict=True)],
                    "visits_per_second": round((self.visits - since_visits) / (self.seconds - since_seconds), 1),
                    "seconds": round(self.seconds, 1),
                }
                if evaluate:
                    record["agreement"] = [round(x, 4) for x in self.evaluate()]
                    self.history.append(record)
                yield record
                reported, recent = time.perf_counter(), []
                since_visits, since_seconds = self.visits, self.seconds
            if time.perf_counter() - saved > save_every:
                self.save_state()
                saved = time.perf_counter()
        self.save_state()

    def evaluate(self) -> list[float]:
        """Held-out top-1 agreement with the target at each depth."""
        hits = counts = torch.zeros(self.config.depths)
        for chunk in chunks(np.array(self.batches.held_out), 4):
            h, c = agreement(self.model, self.batches.of(chunk), self.target.rope, self.config.depths)
            hits, counts = hits + h, counts + c
        return (hits / counts.clamp(min=1)).tolist()

    def save_state(self) -> None:
        """Everything needed to go on, written aside and moved into place."""
        state = {
            "model": own_state(self.model),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": [self.visits, self.step, self.seconds, self.history],
        }
        try:
            self.state_file.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.state_file.with_suffix(f".{os.getpid()}")
            torch.save(state, scratch)
            scratch.replace(self.state_file)
        except OSError as error:
            raise UserError(
                f"The training state could not be written to {self.state_file} ({error.strerror})."
            ) from None

    def resume(self) -> bool:
        """Go on where a run with the same configuration, data and target stopped; False if there is none."""
        if not self.state_file.is_file():
            return False
        try:
            state = torch.load(self.state_file, map_location=self.target.device, weights_only=True)
            self.model.load_state_dict(state["model"], strict=False)
            for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            self.visits, self.step, self.seconds, self.history = state["progress"]
        except Exception as error:  # torch, pickle and zip each have their own
            raise UserError(
                f"The training state {self.state_file} is damaged ({error!r}). Delete it to begin anew."
            ) from None
        return True

    def export(self, folder: Path, command: str) -> None:
        """Write the drafter with its provenance and model card."""
        provenance = {
            "command": command,
            "config": asdict(self.config),
            "corpus": {
                "sha256": self.corpus.sha256,
                "sequences": len(self.corpus),
                "response_tokens": self.corpus.response_tokens,
            },
            "target": {"name": self.target.name, "fingerprint": self.target.fingerprint},
            "environment": describe(self.target.device, torch.bfloat16 if self.config.bf16 else torch.float32),
            "visits": self.visits,
            "seconds": round(self.seconds, 1),
            "history": self.history,
            "started_from": self.started_from,
        }
        save_checkpoint(self.model, self.target.name, self.target.fingerprint, folder, provenance)
        (folder / "README.md").write_text(model_card(self.model, provenance))


def _optimizers(config: TrainConfig, model: Model) -> list[torch.optim.Optimizer]:
    """AdamW for everything; or Muon, with steps as large as AdamW's, for what multiplies hidden states."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    muon = {name for name, p in trained.items() if p.ndim == 2 and not name.startswith(("markov", "head"))}
    if config.optimizer != "muon":
        muon = set()
    rest = [p for name, p in trained.items() if name not in muon]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    ]
    if muon:
        matrices = [trained[name] for name in muon]
        optimizers.append(
            torch.optim.Muon(matrices, lr=config.learning_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


def run(
    config: TrainConfig,
    target: Target,
    corpus: Corpus,
    *,
    features: Features | None = None,
    out: Path,
    state_folder: Path,
    command: str,
    start_from: Path | None = None,
    show: Callable[[str], None] = say,
) -> None:
    """Train (or go on training), with progress, and write the checkpoint."""
    trainer = Trainer(config, target, corpus, features=features, state_folder=state_folder, start_from=start_from)
    if trainer.resume():
        show(f"going on from {trainer.visits:,} visits ({trainer.state_file})")
    parameters = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    show(
        f"{config.drafter}: {parameters / 1e6:.1f} M parameters, {corpus.response_tokens:,} response tokens, {config.visits:,} visits"
    )
    for record in trainer.train():
        left = (config.visits - record["visits"]) / record["visits_per_second"] / 60
        line = f"{config.drafter} {record['visits']:>9,} visits  {record['visits_per_second']:.0f}/s  {left:.0f} min left  loss "
        line += " ".join(f"{x:.3f}" for x in record["loss"])
        if "agreement" in record:
            line += "  held-out agreement " + " ".join(f"{x:.3f}" for x in record["agreement"])
        show(line)
    trainer.export(out, command)
    show(f"written to {out}")
