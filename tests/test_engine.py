"""Lanes: how they are written, what they default to, and the record of a run; and the real thing, end to end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from fasteagle_lite import Engine, LaneSpec, Sampling, Trace, UserError, load
from fasteagle_lite.engine import DEFAULT_TREES, DRAFTERS, TITLES
from fasteagle_lite.trace import mean_accepted_length


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_defaults_are_possible(drafter: str) -> None:
    spec = LaneSpec.of(drafter)
    assert spec.tree == DEFAULT_TREES[drafter]
    assert spec.title == TITLES[drafter]
    assert LaneSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "drafter", "kind", "budget"),
    [
        ("cascade:backbone:5", "cascade", "backbone", 5),
        ("cascade::5", "cascade", DEFAULT_TREES["cascade"].kind, 5),
        (" autoregressive:chain ", "autoregressive", "chain", DEFAULT_TREES["autoregressive"].budget),
        ("none", "none", "chain", 1),
    ],
)
def test_lanes_are_read(text: str, drafter: str, kind: str, budget: int) -> None:
    spec = LaneSpec.parse(text)
    assert (spec.drafter, spec.tree.kind, spec.tree.budget) == (drafter, kind, budget)


@pytest.mark.parametrize(
    "text", ["", "oracle", "cascade:bush", "cascade:dynamic", "lookup:chain:x", "cascade:chain:-1"]
)
def test_lanes_that_are_none_are_explained(text: str) -> None:
    with pytest.raises(UserError):
        LaneSpec.parse(text)


def test_a_drafter_that_is_not_loaded_is_explained() -> None:
    engine = Engine(tiny.talking_target())
    with pytest.raises(UserError, match="Train one"):
        engine.drafter(LaneSpec.of("cascade"))


def test_a_trace_says_how_the_run_ended(
    target_folder: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(str(target_folder), checkpoints=checkpoints)
    assert set(engine.models) == {"cascade", "autoregressive"}
    spec, prefix = LaneSpec.parse("cascade"), engine.prefill("Hi", 12)
    rounds = list(engine.run(spec, prefix, 12, Sampling()))

    def record(count: int) -> Trace:
        return engine.trace(spec, "Hi", prefix, rounds[:count], 12, Sampling())

    whole = record(len(rounds))
    assert whole.finish == "length"
    assert record(1).finish == record(0).finish == "stopped"
    assert Trace.from_json(whole.to_json()) == whole
    monkeypatch.setattr(engine.target, "eos", frozenset([whole.tokens[-1]]))
    assert record(len(rounds)).finish == "eos"


def test_drafters_of_lanes_are_their_own(target_folder: Path, checkpoints: Path) -> None:
    engine = load(str(target_folder), checkpoints=checkpoints)
    first, second = (engine.drafter(LaneSpec.of("cascade")) for _ in range(2))
    assert first is not second
    assert first.model is second.model


# ---- the real target and the trained drafters -------------------------------------------------------------------------

PROMPTS = ("Why is the sky blue?", "Write a Python function that reverses a list. 🐍", "Count from one to twenty.")
COUNT = 40


@pytest.fixture(scope="module")
def real_outputs(real_engine: Engine) -> dict[tuple[str, bool], list[int]]:
    """(prompt, greedy) -> what is to be said: by transformers' `generate`, or by plain sampling with the same seed."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(real_engine.target.folder, dtype=torch.float32).eval()
    outputs = {}
    for prompt in PROMPTS:
        prefix = real_engine.prefill(prompt, COUNT)
        eos = next(iter(real_engine.target.eos))
        outputs[prompt, True] = tiny.greedy_reference(model, list(prefix.tokens), COUNT, eos)
        plain = real_engine.run(LaneSpec.of("none"), prefix, COUNT, SAMPLED)
        outputs[prompt, False] = [token for r in plain for token in r.committed]
    return outputs


SAMPLED = Sampling(0.8, top_p=0.95, seed=11)


def real_spec(engine: Engine, name: str, kind: str | None, budget: int | None = None) -> LaneSpec:
    if name not in engine.models and name != "lookup":
        reason = f"no {name} checkpoint in assets/"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return LaneSpec.of(name, kind, budget)


@pytest.mark.real
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("budget", "prompts"), [(None, PROMPTS), (2, PROMPTS[1:2]), (24, PROMPTS[1:2])])
@pytest.mark.parametrize(("name", "kind"), tiny.TREES)
def test_real_outputs_are_the_targets_own(
    name: str,
    kind: str,
    budget: int | None,
    prompts: tuple[str, ...],
    greedy: bool,
    real_engine: Engine,
    real_outputs: dict[tuple[str, bool], list[int]],
) -> None:
    spec = real_spec(real_engine, name, kind, budget)
    for prompt in prompts:
        prefix = real_engine.prefill(prompt, COUNT)
        rounds = list(real_engine.run(spec, prefix, COUNT, Sampling() if greedy else SAMPLED))
        assert [token for r in rounds for token in r.committed] == real_outputs[prompt, greedy]


@pytest.mark.real
def test_real_plain_decoding_is_transformers(
    real_engine: Engine, real_outputs: dict[tuple[str, bool], list[int]]
) -> None:
    for prompt in PROMPTS:
        rounds: list[Any] = list(
            real_engine.run(LaneSpec.of("none"), real_engine.prefill(prompt, COUNT), COUNT, Sampling())
        )
        assert [token for r in rounds for token in r.committed] == real_outputs[prompt, True]
        assert "".join(piece for r in rounds for piece in r.text) == real_engine.target.tokenizer.decode(
            real_outputs[prompt, True]
        )


@pytest.mark.real
@pytest.mark.parametrize("name", ["cascade", "autoregressive"])
def test_real_drafters_are_accepted(name: str, real_engine: Engine) -> None:
    """A drafter that does not match its target would still give the right text, one token a round."""
    spec = real_spec(real_engine, name, None)
    rounds = [
        step
        for prompt in PROMPTS
        for step in real_engine.run(spec, real_engine.prefill(prompt, COUNT), COUNT, Sampling())
    ]
    assert mean_accepted_length(rounds) > 1.35
