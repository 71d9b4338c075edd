"""Several lanes on one machine, each on its own clock.

Lanes never run at the same moment: on two cores that would measure contention.  The scheduler always steps the lane
whose clock is furthest behind, and a lane's clock counts its own rounds only; so on screen all advance together at their
true relative speed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from .trace import Round


def race(lanes: Mapping[str, Iterator[Round]]) -> Iterator[tuple[str, Round]]:
    """Step the lanes, (name -> `decode(...)`), one round at a time until all are done; yields (name, round)."""
    clocks = [(0.0, order, name) for order, name in enumerate(lanes)]  # `order`: ties go to the lane named first
    while clocks:
        seconds, order, name = heapq.heappop(clocks)
        step = next(lanes[name], None)
        if step is not None:
            yield name, step
            heapq.heappush(clocks, (seconds + step.seconds, order, name))
