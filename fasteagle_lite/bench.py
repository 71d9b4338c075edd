"""The benchmark: tasks x lanes in one run, interleaved, so that a ratio never spans two states of the machine."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .engine import Engine, LaneSpec
from .errors import UserError
from .peers import NAME as PEER_NAME
from .peers import TransformersPeer
from .repetition import repetitive
from .sampling import Sampling
from .store import say
from .trace import Round, Trace, first_difference, mean_accepted_length


@dataclass(frozen=True)
class Task:
    """Prompts of one kind."""

    name: str
    prompts: tuple[str, ...]


def read_tasks(paths: Iterable[Path], limit: int | None) -> list[Task]:
    """Read FastChat-style question.jsonl files (or folders of them); the first turn of each question is the prompt."""
    if limit is not None and limit < 1:
        raise UserError(f"--limit is {limit}; it must be at least 1.")
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    if not files:
        raise UserError(f"No .jsonl files in {', '.join(map(str, paths))}.")
    return [Task(file.stem, _prompts(file)[:limit]) for file in files]


def _prompts(file: Path) -> tuple[str, ...]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = tuple(json.loads(line)["turns"][0] for line in lines)
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise TypeError("a turn is no string")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).") from None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(
            f'{file} is no prompt file: each line must be JSON with "turns": [prompt, ...] ({error!r}).'
        ) from None
    if not prompts:
        raise UserError(f"{file} holds no prompts.")
    return prompts


def warm_up(engine: Engine, specs: Iterable[LaneSpec]) -> None:
    """A few rounds of every lane, so that no measured lane pays for the process's first products."""
    prefix = engine.prefill("Hello!", 24)
    for spec in specs:
        for _ in engine.run(spec, prefix, 24, Sampling()):
            pass


def measure(
    engine: Engine,
    tasks: list[Task],
    specs: list[LaneSpec],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    command: str = "",
    out: Path | None = None,
    peers: bool = False,
) -> dict[str, Any]:
    """Run every lane on every prompt; returns (and writes to `out` after each task) one plain-JSON result.

    Plain decoding is always among the lanes: it is what speedups and identity refer to.  The lanes of a prompt run one
    after another in an order that rotates from prompt to prompt.  With `peers`, transformers' greedy `generate` runs on
    the same prompts in between.
    """
    plain = LaneSpec.of("none")
    specs = [plain, *(spec for spec in specs if spec != plain)]
    results: dict[str, Any] = {
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environment": engine.environment,
        "max_new_tokens": max_new_tokens,
        "sampling": vars(sampling) | {},
        "lanes": [str(spec) for spec in specs],
        "tasks": {},
        "repetitive": {},  # outputs of plain decoding that repeat themselves, see `repetition`
        "sound": {},
        "costs": {spec.drafter: vars(engine.costs(spec.drafter)) | {} for spec in specs if spec.tree.adaptive},
    }
    if out is not None:
        write_results(out, results)  # an unwritable file is reported before the work, not after it
    warm_up(engine, specs)
    peer = TransformersPeer(engine.target) if peers else None
    for task in tasks:
        traces: dict[str, list[Trace]] = {str(spec): [] for spec in specs}
        generated: list[tuple[tuple[int, ...], float]] = []
        for i, prompt in enumerate(task.prompts):
            prefix = engine.prefill(prompt, max_new_tokens)
            for spec in specs[i % len(specs) :] + specs[: i % len(specs)]:
                rounds = list(engine.run(spec, prefix, max_new_tokens, sampling))
                traces[str(spec)].append(engine.trace(spec, prompt, prefix, rounds, max_new_tokens, sampling))
            if peer is not None:
                generated.append(peer.generate(prefix.tokens, max_new_tokens))
        results["tasks"][task.name] = {lane: summarise(traces[lane], traces[str(plain)]) for lane in traces}
        sound = [i for i, trace in enumerate(traces[str(plain)]) if not repetitive(trace.tokens)]
        results["repetitive"][task.name] = len(task.prompts) - len(sound)
        if sound:  # the same once more without the outputs that go round in circles
            kept = {lane: [traces[lane][i] for i in sound] for lane in traces}
            results["sound"][task.name] = {lane: summarise(kept[lane], kept[str(plain)]) for lane in kept}
        if peer is not None:
            results.setdefault("peers", {})[task.name] = summarise_peer(generated, traces[str(plain)])
        say(f"bench: {task.name} done ({len(task.prompts)} prompts)")
        if out is not None:
            write_results(out, results)
    return results


def summarise(traces: list[Trace], plain: list[Trace]) -> dict[str, Any]:
    """One lane on one task.  Speedup compares time per token with plain decoding of the same prompts.

    `overhead` is the median time of a round outside the models, relative to the median one-row target forward.
    """
    rounds = [r for trace in traces for r in trace.rounds]
    rate = _rate(traces)
    step = statistics.median(r.verify_seconds for t in plain for r in t.rounds)
    return {
        "prompts": len(traces),
        "tokens": sum(len(t.tokens) for t in traces),
        "rounds": len(rounds),
        "tokens_per_second": round(rate, 2),
        "speedup": round(rate / _rate(plain), 3),
        "tau": round(mean_accepted_length(rounds), 3),
        "identical": sum(first_difference(p, t) is None for p, t in zip(plain, traces, strict=True)) / len(traces),
        "draft_ms": round(1e3 * statistics.mean(r.draft_seconds for r in rounds), 2),
        "verify_ms": round(1e3 * statistics.mean(r.verify_seconds for r in rounds), 2),
        "rest_ms": round(1e3 * statistics.mean(r.rest_seconds for r in rounds), 2),
        "overhead": round(statistics.median(r.rest_seconds for r in rounds) / step, 4),
        "passes": round(statistics.mean(r.passes for r in rounds), 2),
        "nodes": round(statistics.mean(len(r.tokens) for r in rounds), 2),
        "calibration": calibration(rounds),
    }


def calibration(rounds: Iterable[Round]) -> dict[str, list[list[float]]]:
    """Predicted against observed acceptance: per depth ten bins of the drafter's probability of a node.

    A bin is [nodes, sum of their probabilities, accepted ones].  Counted are nodes under an accepted parent (or the
    root): only they were up for acceptance, with the probability the drafter gave them under that parent.
    """
    bins: dict[str, list[list[float]]] = {}
    for r in rounds:
        open_to, depths = {0, *r.accepted}, [0]
        for node in range(1, len(r.tokens)):
            depths.append(depths[r.parents[node]] + 1)
            if r.parents[node] in open_to:
                p = math.exp(r.logprobs[node])
                table = bins.setdefault(str(depths[node]), [[0, 0.0, 0] for _ in range(10)])
                row = table[min(9, int(10 * p))]
                row[0], row[1], row[2] = row[0] + 1, round(row[1] + p, 4), row[2] + (node in r.accepted)
    return bins


def _rate(traces: list[Trace]) -> float:
    """Tokens a second over all traces, without prefills."""
    return sum(len(t.tokens) for t in traces) / sum(t.seconds for t in traces)


def summarise_peer(generated: list[tuple[tuple[int, ...], float]], plain: list[Trace]) -> dict[str, Any]:
    """transformers' `generate` on one task; `speedup` is relative to our plain decoding, so below 1 if it is slower."""
    tokens = sum(len(out) for out, _ in generated)
    seconds = sum(len(out) * per_token for out, per_token in generated)
    return {
        "tokens_per_second": round(tokens / seconds, 2),
        "speedup": round(tokens / seconds / _rate(plain), 3),
        "identical": sum(out == t.tokens for (out, _), t in zip(generated, plain, strict=True)) / len(plain),
    }


def overall(results: dict[str, Any], part: str = "tasks") -> dict[str, dict[str, float]]:
    """Per lane over all tasks: mean tau, geometric mean of the speedups, fraction identical, largest overhead.

    `part` "sound" leaves the repetitive outputs out.
    """
    rows = {lane: [task[lane] for task in results[part].values()] for lane in results["lanes"]}
    return {
        lane: {
            "tau": statistics.mean(r["tau"] for r in cells),
            "speedup": statistics.geometric_mean(r["speedup"] for r in cells),
            "identical": sum(r["identical"] * r["prompts"] for r in cells) / sum(r["prompts"] for r in cells),
            "overhead": max(r["overhead"] for r in cells),
        }
        for lane, cells in rows.items()
    }


def summary(results: dict[str, Any]) -> str:
    """A short Markdown table: the lanes over all tasks."""
    lines = ["| lane | vs plain | τ | identical to plain |", "|---|---|---|---|"]
    for lane, r in overall(results).items():
        lines.append(f"| `{lane}` | {r['speedup']:.2f}x | {r['tau']:.2f} | {r['identical']:.0%} |")
    return "\n".join(lines)


def table(results: dict[str, Any]) -> str:
    """A Markdown table: a row per task and lane, then the lanes over all tasks."""
    lines = [
        "| task | lane | tokens/s | vs plain | tau | identical | draft ms | verify ms | rest ms | overhead |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for task, lanes in results["tasks"].items():
        for lane, r in lanes.items():
            lines.append(
                f"| {task} | {lane} | {r['tokens_per_second']:.1f} | {r['speedup']:.2f}x | {r['tau']:.2f} | {r['identical']:.0%} "
                f"| {r['draft_ms']:.1f} | {r['verify_ms']:.1f} | {r['rest_ms']:.1f} | {r['overhead']:.1%} |"
            )
        if task in results.get("peers", {}):
            r = results["peers"][task]
            cells = f"{r['tokens_per_second']:.1f} | {r['speedup']:.2f}x | | {r['identical']:.0%}"
            lines.append(f"| {task} | {PEER_NAME} | {cells} | | | | |")
    for lane, r in overall(results).items():
        lines.append(
            f"| all | {lane} | | {r['speedup']:.2f}x | {r['tau']:.2f} | {r['identical']:.0%} | | | | {r['overhead']:.1%} |"
        )
    return "\n".join(lines)


def write_results(file: Path, results: dict[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    scratch = file.with_name(file.name + ".partial")
    try:
        scratch.write_text(json.dumps(results, indent=1) + "\n")
        scratch.replace(file)
    except OSError as error:
        raise UserError(f"The results could not be written to {file} ({error.strerror}).") from None
