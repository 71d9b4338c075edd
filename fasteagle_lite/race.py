"""Several lanes on one machine, each on its own clock.

Lanes never run at the same moment: on two cores that would measure contention.  The scheduler always steps the lane
whose clock is furthest behind, and a lane's clock counts its own rounds only; so on screen all advance together at their
true relative speed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence

from .engine import Engine, LaneSpec
from .sampling import Sampling
from .trace import Round, Trace


def race(lanes: Mapping[str, Iterator[Round]]) -> Iterator[tuple[str, Round]]:
    """Step the lanes, (name -> `decode(...)`), one round at a time until all are done; yields (name, round)."""
    clocks = [(0.0, order, name) for order, name in enumerate(lanes)]  # `order`: ties go to the lane named first
    while clocks:
        seconds, order, name = heapq.heappop(clocks)
        step = next(lanes[name], None)
        if step is not None:
            yield name, step
            heapq.heappush(clocks, (seconds + step.seconds, order, name))


class Contest:
    """Lanes that answer one prompt on a shared prefill.  Iterating runs them, round by round."""

    def __init__(self, engine: Engine, specs: Sequence[LaneSpec], prompt: str, max_new_tokens: int, sampling: Sampling):
        self.engine, self.prompt, self.max_new_tokens, self.sampling = engine, prompt, max_new_tokens, sampling
        self.prefix = engine.prefill(prompt, max_new_tokens)
        self.specs = {str(spec): spec for spec in specs}
        self.lanes = {name: engine.run(s, self.prefix, max_new_tokens, sampling) for name, s in self.specs.items()}
        self.rounds: dict[str, list[Round]] = {name: [] for name in self.specs}

    def __iter__(self) -> Iterator[None]:
        for name, step in race(self.lanes):
            self.rounds[name].append(step)
            yield

    def traces(self) -> tuple[Trace, ...]:
        """All lanes as far as they have got, in the order of `specs`."""
        return tuple(
            self.engine.trace(spec, self.prompt, self.prefix, self.rounds[name], self.max_new_tokens, self.sampling)
            for name, spec in self.specs.items()
        )
