"""The record of a race that a visitor's page shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..engine import LaneSpec
from ..trace import Round, Trace, first_difference, speedup
from ..viz.lanes import LaneView, lanes_html
from ..viz.tree import tree_html
from .order import Order


@dataclass
class Result:
    """What a visitor's page shows: records only, no caches.  `shown` is the lane whose tree is drawn.

    The page of a running race and its other handlers hold the same object, so that a choice of lane takes effect at once.
    """

    order: Order
    shown: str
    traces: tuple[Trace, ...] = ()
    running: bool = True

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Those of the lane whose tree is drawn."""
        pairs = zip(self.order.specs, self.traces, strict=False)
        return next((trace.rounds for spec, trace in pairs if spec.drafter == self.shown), ())

    @property
    def fullest(self) -> int:
        """The number (from 1) of the round that kept most tokens: where a reader may begin."""
        return max(range(len(self.rounds)), key=lambda i: len(self.rounds[i].committed), default=-1) + 1

    def lanes(self) -> str:
        views = [
            LaneView(
                spec.title,
                _note(spec),
                trace,
                running=self.running and trace.finish == "stopped",
                difference=difference(self.traces[0], trace),
                compared="stopped" not in (self.traces[0].finish, trace.finish),
            )
            for spec, trace in zip(self.order.specs, self.traces, strict=True)
        ]
        return lanes_html(views, self.order.max_new_tokens)

    def tree(self, number: int | None = None) -> str:
        """The tree of a round, counted from 1; the latest by default."""
        rounds = self.rounds
        if not rounds:
            return ""
        return tree_html(rounds[-1 if number is None else min(max(number, 1), len(rounds)) - 1])

    def summary(self) -> str:
        """One sentence for the end."""
        plain, *others = self.traces
        if not plain.rounds or any(trace.finish == "stopped" for trace in self.traces):
            return "Stopped. The figures cover what had run by then."
        wrong = [t for t in others if difference(plain, t) is not None]
        if not others:
            return "Finished. Choose more lanes in the settings to compare."
        if wrong:
            return f"Finished, but {len(wrong)} of {len(others)} lanes differ from plain decoding."
        best = max(zip(self.order.specs[1:], others, strict=True), key=lambda pair: pair[1].tokens_per_second)
        return (
            f"Finished. Fastest drafter: {best[0].title}, {speedup(plain, best[1]):.2f}× plain decoding. "
            "Every lane gave identical tokens."
        )

    def figures(self) -> dict[str, Any]:
        """The figures of a finished race as plain JSON."""
        plain = self.traces[0]
        lanes = []
        for spec, trace in zip(self.order.specs, self.traces, strict=True):
            ratio, index = speedup(plain, trace), difference(plain, trace)
            lanes.append(
                {
                    "lane": str(spec),
                    "title": spec.title,
                    "tokens": len(trace.tokens),
                    "rounds": len(trace.rounds),
                    "tokens_per_second": round(trace.tokens_per_second, 2),
                    "speedup": None if ratio is None else round(ratio, 3),
                    "tau": round(trace.tau, 3),
                    "identical": index is None,
                    "first_difference": index,
                    "finish": trace.finish,
                    "text": trace.text,
                }
            )
        return {"prompt": self.order.prompt, "prefill_seconds": round(plain.prefill_seconds, 4), "lanes": lanes,
                "environment": plain.environment}  # fmt: skip


def difference(plain: Trace, other: Trace) -> int | None:
    """Index of the first token that is not plain decoding's.  A lane that is not done is compared as far as both are."""
    index = first_difference(plain, other)
    shared = min(len(plain.tokens), len(other.tokens))
    return None if index == shared and "stopped" in (plain.finish, other.finish) else index


def _note(spec: LaneSpec) -> str:
    if spec.drafter == "none":
        return "one token a pass"
    return f"{spec.tree.kind.replace('_', '-')} tree, up to {spec.tree.budget} nodes a round"
