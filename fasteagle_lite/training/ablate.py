"""What each idea is worth: small, equal training runs that differ in one setting, and trees over a finished drafter.

Every run starts from the same seed and sees the same visits of the same corpus.  It is judged by the held-out agreement
at each depth, and by tau: the mean accepted length when the drafter really decodes held-out prompts, greedily.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..bench import write_results
from ..decode import decode, prefill
from ..drafters.cascade import Cascade, CascadeDrafter
from ..drafters.checkpoint import Model
from ..environment import describe
from ..errors import UserError
from ..store import say
from ..target import Target
from ..trace import mean_accepted_length
from ..tree import TreeConfig
from .data import Corpus, Features
from .trainer import TrainConfig, Trainer

# Name -> what differs from the baseline, a cascade with the default configuration.
RUNS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "no cascade": {"parallel": True},
    "last layer only": {"supervise": "last"},
    "no Markov head": {"markov_rank": 0},
    "trunk of 1": {"trunk": 1},
    "trunk of 2": {"trunk": 2},
    **{f"N = {n}": {"depths": n} for n in (1, 2, 3, 5, 6)},
    **{f"vocabulary {size:,}": {"vocabulary": size} for size in (2048, 4096, 16384)},
    "feature term": {"feature_weight": 0.5},
    "full softmax": {"negatives": 0},
    "16 sequences a step, AdamW": {"sequences": 16},
    "16 sequences a step, Muon": {"sequences": 16, "optimizer": "muon"},
}
TREES = tuple(TreeConfig(kind, n, 4, 8) for n in (4, 6, 8, 12, 16) for kind in ("chain", "backbone", "best_first"))
TREE = TreeConfig("best_first", budget=8, top_k=4, depth=8)
PROMPTS, NEW_TOKENS = 12, 64


def ablate(
    target: Target,
    corpus: Corpus,
    features: Features,
    names: Iterable[str],
    visits: int,
    out: Path,
    *,
    command: str,
    show: Callable[[str], None] = say,
) -> None:
    """Train and judge the named runs, adding each to the JSON file `out`; those that it holds already are kept."""
    unknown = set(names) - set(RUNS)
    if unknown:
        raise UserError(f"No ablation {sorted(unknown)[0]!r}. Choose from: {'; '.join(RUNS)}.")
    for name in names:
        config = replace(TrainConfig("cascade", visits=visits), **RUNS[name])
        if name in _read(out).get("runs", {}):
            show(f"{name}: in {out} already")
            continue
        trainer = Trainer(config, target, corpus, features=features, state_folder=out.parent)
        begun = time.perf_counter()
        record = list(trainer.train(report_every=1e9, save_every=1e9, evaluations=1))[-1]
        trainer.state_file.unlink()  # minutes of work: not worth resuming
        parameters = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        result = {
            "changes": RUNS[name],
            "config": asdict(config),
            "parameters": parameters,
            "seconds": round(time.perf_counter() - begun, 1),
            **{key: record[key] for key in ("visits", "visits_per_second", "loss", "agreement")},
            "tau": tau(trainer.model, target, trainer.batches.held_out, corpus, TREE),
        }
        show(f"{name}: tau {result['tau']:.3f}, agreement {result['agreement']}")
        _add(out, "runs", name, result, target, corpus, command)


def compare_trees(model: Model, target: Target, corpus: Corpus, out: Path, *, command: str) -> None:
    """Judge a finished cascade under every tree of `TREES`, with and without its Markov head."""
    held_out = list(range(0, len(corpus), 20))
    for markov in (True, False):
        for tree in TREES if markov else (tree for tree in TREES if tree.budget == TREE.budget):
            value = tau(model, target, held_out, corpus, tree, markov=markov)
            name = f"{tree.kind}:{tree.budget}" + ("" if markov else " without Markov head")
            say(f"{name}: tau {value:.3f}")
            _add(out, "trees", name, {**asdict(tree), "markov": markov, "tau": value}, target, corpus, command)


@torch.inference_mode()
def tau(
    model: Model, target: Target, held_out: list[int], corpus: Corpus, tree: TreeConfig, *, markov: bool = True
) -> float:
    """Mean over held-out prompts of the mean accepted length, decoding greedily."""
    assert isinstance(model, Cascade)
    lengths = []
    for i in held_out[:: max(1, len(held_out) // PROMPTS)][:PROMPTS]:
        prefix = prefill(target, corpus.sequence(i)[: corpus.starts[i]].tolist(), NEW_TOKENS)
        drafter = CascadeDrafter(model, target, tree, markov=markov)
        lengths.append(mean_accepted_length(list(decode(target, drafter, prefix, max_new_tokens=NEW_TOKENS))))
    return round(statistics.mean(lengths), 4)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except ValueError:
        raise UserError(f"{file} is no JSON file. Name another one with --out.") from None
    return found


def _add(
    file: Path, part: str, name: str, result: dict[str, Any], target: Target, corpus: Corpus, command: str
) -> None:
    results = _read(file) or {
        "environment": describe(target.device, torch.float32) | {"target": target.name},
        "corpus": {"sha256": corpus.sha256, "response_tokens": corpus.response_tokens},
        "judged_on": {"prompts": PROMPTS, "new_tokens": NEW_TOKENS, "tree": asdict(TREE)},
    }
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    results.setdefault(part, {})[name] = {**result, "command": command, "date": date}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_results(file, results)
