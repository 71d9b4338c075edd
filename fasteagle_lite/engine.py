"""Loaded weights, shared by every lane and visitor, and the making of lanes from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

from .costs import Costs, measure_draft, measure_verify
from .decode import Prefix, decode, prefill
from .drafters.autoregressive import AutoregressiveDrafter
from .drafters.base import Drafter, NoDrafter
from .drafters.cascade import CascadeDrafter
from .drafters.checkpoint import MODELS, Model, load_checkpoint
from .drafters.lookup import LookupDrafter
from .drafters.neural import NeuralDrafter
from .environment import describe
from .errors import UserError
from .sampling import Sampling
from .store import ASSETS, load_target
from .target import Target
from .trace import Round, Trace
from .tree import TreeConfig

DRAFTERS: dict[str, Any] = {
    "none": NoDrafter,
    "cascade": CascadeDrafter,
    "autoregressive": AutoregressiveDrafter,
    "lookup": LookupDrafter,
}
TITLES = {
    "none": "Plain decoding",
    "cascade": "FastEagle cascade",
    "autoregressive": "EAGLE-style autoregressive",
    "lookup": "Prompt lookup",
}
# Best settings of each drafter on two CPU cores (README, "Choosing a tree").
DEFAULT_TREES = {
    "none": TreeConfig("chain", budget=1),
    "cascade": TreeConfig("best_first", budget=6, top_k=4, depth=4),
    "autoregressive": TreeConfig("dynamic", budget=6, top_k=3, depth=3),
    "lookup": TreeConfig("chain", budget=6, depth=16),
}


@dataclass(frozen=True)
class LaneSpec:
    """A drafter and the tree it drafts; written `drafter[:tree[:budget]]`, such as `cascade:backbone:8`.

    A budget of `auto12` is adaptive: at most 12 nodes, and fewer where more do not pay; `auto` is the default limit.
    """

    drafter: str
    tree: TreeConfig

    @staticmethod
    def of(drafter: str, kind: str | None = None, budget: int | None = None, adaptive: bool | None = None) -> LaneSpec:
        """The drafter's default tree, with another kind or budget where given; a given budget is fixed unless `adaptive`."""
        if drafter not in DRAFTERS:
            raise UserError(f"Unknown drafter {drafter!r}. Choose from {', '.join(DRAFTERS)}.")
        tree = DEFAULT_TREES[drafter]
        if adaptive is None:
            adaptive = tree.adaptive and budget is None and kind != "backbone"
        limit = tree.budget if budget is None else budget
        chosen = replace(tree, kind=kind or tree.kind, budget=limit, adaptive=adaptive)
        if drafter == "none":  # has nothing to choose from, but what was chosen must make sense
            return LaneSpec(drafter, tree)
        kinds = DRAFTERS[drafter].TREES
        if chosen.kind not in kinds:
            raise UserError(f"The {drafter} drafter has no {chosen.kind!r} tree. Choose from {', '.join(kinds)}.")
        if adaptive and drafter not in MODELS:
            raise UserError(f"The {drafter} drafter states no probabilities; give it a fixed budget.")
        return LaneSpec(drafter, chosen)

    @staticmethod
    def parse(text: str) -> LaneSpec:
        drafter, *rest = text.strip().split(":")
        budget = re.fullmatch(r"(auto)?(-?\d+)?", rest[1]) if len(rest) == 2 else None
        if len(rest) > 2 or (len(rest) == 2 and not (budget and budget[0])):
            raise UserError(
                f"{text!r} is no lane. Write drafter, drafter:tree or drafter:tree:budget, such as cascade:backbone:8."
            )
        kind = rest[0] if rest and rest[0] else None
        if budget is None:
            return LaneSpec.of(drafter, kind)
        return LaneSpec.of(drafter, kind, int(budget[2]) if budget[2] else None, adaptive=bool(budget[1]))

    @property
    def title(self) -> str:
        return TITLES[self.drafter]

    def __str__(self) -> str:
        if self.drafter == "none":
            return self.drafter
        return f"{self.drafter}:{self.tree.kind}:{'auto' if self.tree.adaptive else ''}{self.tree.budget}"


@dataclass
class Engine:
    """A target and the drafters trained for it.  Nothing here changes after loading but what is known of their costs."""

    target: Target
    models: dict[str, Model] = field(default_factory=dict)
    _costs: dict[str, Costs] = field(default_factory=dict, repr=False)
    _verify: list[float] = field(default_factory=list, repr=False)
    _measuring: Lock = field(default_factory=Lock, repr=False)

    @staticmethod
    def load(
        target: str | None = None, *, checkpoints: Path = ASSETS, device: str = "cpu", dtype: str = "float32"
    ) -> Engine:
        """Load the target (see `store.load_target`) and every drafter below `checkpoints`."""
        loaded = load_target(target, device=device, dtype=dtype)
        engine = Engine(loaded)
        for name in ("cascade", "autoregressive"):
            if (checkpoints / name).is_dir():
                engine.models[name] = load_checkpoint(checkpoints / name, loaded)
        return engine

    @cached_property
    def environment(self) -> dict[str, Any]:
        return describe(self.target.device, self.target.embedding.weight.dtype) | {"target": self.target.name}

    def drafter(self, spec: LaneSpec) -> Drafter:
        """A fresh drafter for one lane."""
        if spec.drafter == "none":
            return NoDrafter()
        if spec.drafter == "lookup":
            return LookupDrafter(spec.tree)
        if spec.drafter not in self.models:
            raise UserError(
                f"No {spec.drafter} drafter is loaded. Train one: python -m fasteagle_lite train --drafter {spec.drafter}"
            )
        costs = self.costs(spec.drafter) if spec.tree.adaptive else None
        drafter: Drafter = DRAFTERS[spec.drafter](self.models[spec.drafter], self.target, spec.tree, costs)
        return drafter

    def costs(self, name: str) -> Costs:
        """What rounds with this drafter cost on this machine; measured the first time, which takes a second or two."""
        with self._measuring:
            if not self._verify:
                self._verify.extend(measure_verify(self.target))
            if name not in self._costs:
                drafter = self.drafter(LaneSpec(name, replace(DEFAULT_TREES[name], adaptive=False)))
                assert isinstance(drafter, NeuralDrafter)
                self._costs[name] = Costs(tuple(self._verify), *measure_draft(self.target, drafter))
        return self._costs[name]

    def prefill(self, prompt: str, max_new_tokens: int) -> Prefix:
        """Encode a chat prompt and run it through the target once; lanes share the result."""
        return prefill(self.target, self.target.encode_chat(prompt), max_new_tokens)

    def run(self, spec: LaneSpec, prefix: Prefix, max_new_tokens: int, sampling: Sampling) -> Iterator[Round]:
        """One lane's rounds."""
        return decode(self.target, self.drafter(spec), prefix, max_new_tokens=max_new_tokens, sampling=sampling)

    def trace(
        self, spec: LaneSpec, prompt: str, prefix: Prefix, rounds: list[Round], max_new_tokens: int, sampling: Sampling
    ) -> Trace:
        """The record of a lane that has run these rounds, finished or not."""
        tokens = [token for r in rounds for token in r.committed]
        ended = bool(tokens) and tokens[-1] in self.target.eos
        return Trace(
            lane=str(spec),
            prompt=prompt,
            prompt_tokens=prefix.tokens,
            rounds=tuple(rounds),
            prefill_seconds=prefix.seconds,
            finish="eos" if ended else "length" if len(tokens) >= max_new_tokens else "stopped",
            settings={"max_new_tokens": max_new_tokens, "tree": vars(spec.tree) | {}, "sampling": vars(sampling) | {}},
            environment=self.environment,
        )
