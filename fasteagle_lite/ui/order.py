"""What a visitor asks for, checked: from the raw values of form fields or an API call to lanes and sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..engine import Engine, LaneSpec
from ..errors import UserError
from ..race import Contest
from ..sampling import Sampling

# Lanes' order on screen; plain decoding, the reference, is always there and comes first.
LANES = ("none", "autoregressive", "cascade", "lookup")


@dataclass(frozen=True)
class Order:
    """A race to run.  `specs` begins with plain decoding."""

    prompt: str
    specs: tuple[LaneSpec, ...]
    max_new_tokens: int
    sampling: Sampling

    @staticmethod
    def of(
        prompt: str | None,
        lanes: Sequence[str] | None,
        max_new_tokens: Any,
        temperature: Any,
        top_p: Any,
        top_k: Any,
        seed: Any,
        cascade_tree: str | None,
        autoregressive_tree: str | None,
        budget: Any,
    ) -> Order:
        """Check every field; a field that was cleared, or holds no number, is a UserError with its name."""
        trees = {"cascade": cascade_tree, "autoregressive": autoregressive_tree}
        nodes = _whole(budget, "The node budget")
        wanted = [name for name in LANES[1:] if name in (lanes or ())]
        unknown = [name for name in lanes or () if name not in LANES]
        specs = (LaneSpec.of(name, trees.get(name), nodes) for name in ["none", *wanted, *unknown])
        return Order(
            # A browser may send half of a surrogate pair, which no tokenizer can read.
            prompt=(prompt or "").encode("utf-8", "replace").decode("utf-8"),
            specs=tuple(specs),
            max_new_tokens=_whole(max_new_tokens, "The number of new tokens"),
            sampling=Sampling(
                temperature=_number(temperature, "The temperature"),
                top_p=_number(top_p, "Top-p"),
                top_k=_whole(top_k, "Top-k"),
                seed=_whole(seed, "The seed"),
            ),
        )

    def contest(self, engine: Engine) -> Contest:
        """The race itself, ready to be run."""
        return Contest(engine, self.specs, self.prompt, self.max_new_tokens, self.sampling)


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{name} is missing. Type a number.")
    return number


def _whole(value: Any, name: str) -> int:
    number = _number(value, name)
    if number != int(number):
        raise UserError(f"{name} is {value}; it must be a whole number.")
    return value if isinstance(value, int) else int(number)
