"""Records of a run: frozen, plain, and JSON in and out.  The only thing pages, notebooks and replays read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import UserError

FORMAT = 1


@dataclass(frozen=True)
class Round:
    """One round: a tree was drafted, verified in one target forward, and part of it committed.

    Nodes are numbered as in the tree; node 0 is the last token committed before.  `accepted` are the nodes below the root
    that the target agreed with.  `committed` are the tokens the round added to the output: the accepted ones, then the
    bonus (the target's own next token), ended exactly at an end-of-sequence token or at the length limit; `text` has
    their text, piece by piece, '' where a character is not complete yet.  Times are seconds: draft, verify (the
    target's forward) and rest (mask, walk, cache, bookkeeping).
    """

    index: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    logprobs: tuple[float, ...]
    node_text: tuple[str, ...]
    passes: int
    accepted: tuple[int, ...]
    bonus: int
    bonus_text: str
    committed: tuple[int, ...]
    text: tuple[str, ...]
    draft_seconds: float
    verify_seconds: float
    rest_seconds: float

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.rest_seconds

    @property
    def origins(self) -> tuple[str, ...]:
        """Where each committed token came from: `draft` (accepted) or `bonus`."""
        return tuple("draft" if i < len(self.accepted) else "bonus" for i in range(len(self.committed)))


def mean_accepted_length(rounds: Sequence[Round]) -> float:
    """tau: committed tokens a round, the bonus included, nothing past the end of the output."""
    return sum(len(r.committed) for r in rounds) / len(rounds) if rounds else 0.0


@dataclass(frozen=True)
class Trace:
    """A whole run of one lane.

    `settings` holds what the run was asked for, `environment` what it ran on (see `environment.describe`).
    `prefill_seconds` is the target's forward over the prompt, the same work in every lane and part of no round.
    `finish`: `eos`, `length`, or `stopped`.
    """

    lane: str
    prompt: str
    prompt_tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    prefill_seconds: float = 0.0
    finish: str = "length"
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for r in self.rounds for t in r.committed)

    @property
    def text(self) -> str:
        return "".join(piece for r in self.rounds for piece in r.text)

    @property
    def tau(self) -> float:
        return mean_accepted_length(self.rounds)

    @property
    def seconds(self) -> float:
        """Time of all rounds, without the prefill."""
        return sum(r.seconds for r in self.rounds)

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.rounds else 0.0

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> Trace:
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise UserError("This trace was saved by another version of FastEagle Lite and cannot be read.")
            rounds = tuple(Round(**{k: _frozen(v) for k, v in r.items()}) for r in data.pop("rounds"))
            return Trace(**(data | {"prompt_tokens": tuple(data["prompt_tokens"])}), rounds=rounds)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"This file is not a saved trace ({error!r}).") from None

    def save(self, path: Path) -> None:
        path.write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Trace:
        try:
            return Trace.from_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"The trace {path} cannot be read ({error}).") from None


def first_difference(plain: Trace, other: Trace) -> int | None:
    """Index of the first token in which two outputs differ; None if they are identical."""
    if plain.tokens == other.tokens:
        return None
    pairs = zip(plain.tokens, other.tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain.tokens), len(other.tokens)))


def speedup(plain: Trace, trace: Trace) -> float | None:
    """Tokens a second relative to plain decoding's, each on its own clock; None before both have a round."""
    return trace.tokens_per_second / plain.tokens_per_second if plain.rounds and trace.rounds else None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
