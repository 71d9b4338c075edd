"""An engine for tests of the page: random weights, a byte-level tokenizer, and lanes that can be slowed down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tiny
import torch

from fasteagle_lite.decode import Prefix
from fasteagle_lite.engine import Engine, LaneSpec
from fasteagle_lite.sampling import Sampling
from fasteagle_lite.trace import Round


@dataclass
class SlowEngine(Engine):
    """Counts rounds, and sleeps `pause` seconds before each: a race of known length on any machine."""

    pause: float = 0.0
    begun: list[float] = field(default_factory=list)  # when rounds began

    def run(self, spec: LaneSpec, prefix: Prefix, max_new_tokens: int, sampling: Sampling) -> Iterator[Round]:
        return self._paced(super().run(spec, prefix, max_new_tokens, sampling))

    def _paced(self, rounds: Iterator[Round]) -> Iterator[Round]:
        while True:
            self.begun.append(time.monotonic())
            time.sleep(self.pause)
            step = next(rounds, None)
            if step is None:
                return
            yield step


def engine(pause: float = 0.0, drafters: tuple[str, ...] = ("cascade", "autoregressive"), **changes: Any) -> SlowEngine:
    """A tiny engine; `changes` go to the target's configuration."""
    torch.set_num_threads(1)
    target = tiny.talking_target(**({"max_position_embeddings": 4096} | changes))
    return SlowEngine(target, {name: tiny.drafter_model(name, target) for name in drafters}, pause)
