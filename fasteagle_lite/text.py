"""Turning tokens into text while they arrive: no replacement characters for emoji that span several tokens."""

from __future__ import annotations

from typing import Any

_UNFINISHED = "\ufffd"


class Detokenizer:
    """Text of a growing token sequence, piece by piece; the pieces of all tokens join to the whole text.

    A token that ends in the middle of a character yields '' and the one that completes it yields the character.  Without
    a tokenizer (random test models) a token reads as its number.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.before: list[
            int
        ] = []  # the last tokens already shown: some tokenizers' pieces depend on their left neighbour
        self.held: list[int] = []  # tokens since then, not shown yet

    def push(self, token: int) -> str:
        if self.tokenizer is None:
            return f" {token}"
        self.held.append(token)
        piece = self._held_text()
        if piece.endswith(_UNFINISHED) and len(self.held) < 4:  # a character has at most four bytes
            return ""
        self.before, self.held = self.held, []
        return piece

    def flush(self) -> str:
        """What is left when no more tokens come (a character cut off by the length limit)."""
        piece = self._held_text() if self.held else ""
        self.held = []
        return piece

    def one(self, token: int) -> str:
        """Text of a token on its own, for labels."""
        return f"{token}" if self.tokenizer is None else self._decode([token])

    def _held_text(self) -> str:
        return self._decode(self.before + self.held)[len(self._decode(self.before)) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
