"""Whether a text goes round in circles: small models do, and drafters then look better than they are."""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 8  # tokens: longer than the idioms and list markers that any sound text repeats
SHARE = 1 / 3


def repetitive(tokens: Sequence[int]) -> bool:
    """Whether more than a third of a response's 8-grams (runs of 8 tokens) occurred earlier in the same response.

    False for fewer than 8 tokens.  Overlapping runs count, so a response of one token over and over is repetitive.
    """
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return len(grams) - len(set(grams)) > SHARE * len(grams)
