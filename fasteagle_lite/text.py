"""Turning tokens into text while they arrive: no replacement characters for emoji that span several tokens."""

from __future__ import annotations

from typing import Any

_UNFINISHED = "\ufffd"
_PATIENCE = 64  # tokens: garbage bytes may never make a character


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
        self.held: list[int] = []  # tokens since then; their last character may be incomplete
        self.shown = 0  # characters of theirs that have been shown

    def push(self, token: int) -> str:
        if self.tokenizer is None:
            return f" {token}"
        self.held.append(token)
        text = self._held_text()
        # At most three bytes can still become a character; replacement characters before them are there to stay.
        complete = text[:-3] + text[-3:].rstrip(_UNFINISHED) if len(self.held) < _PATIENCE else text
        piece, self.shown = complete[self.shown :], max(self.shown, len(complete))
        if complete == text:
            self.before, self.held, self.shown = self.held, [], 0
        return piece

    def flush(self) -> str:
        """What is left when no more tokens come (a character cut off by the length limit)."""
        piece = self._held_text()[self.shown :] if self.held else ""
        self.before, self.held, self.shown = [], [], 0
        return piece

    def one(self, token: int) -> str:
        """Text of a token on its own, for labels."""
        return f"{token}" if self.tokenizer is None else self._decode([token])

    def _held_text(self) -> str:
        return self._decode(self.before + self.held)[len(self._decode(self.before)) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
