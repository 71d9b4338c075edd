"""More training data from the target alone: it writes the question, then answers it.

A sequence opens with the chat template's user turn, sometimes with a few words that steer the kind of request; the target
samples the rest of the question, the template's turn to the assistant is put in, and the target answers, every
other sequence greedily.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..store import say
from ..target import Target

QUESTION_TEMPERATURE, ANSWER_TEMPERATURE = 0.9, 0.7
LONGEST_QUESTION, LONGEST_ANSWER = 64, 192
BARREN_BATCHES = 5  # without a single new answer, after which the target is given up
# Kinds of request, so that the target does not only ask what comes to its mind first; None leaves it free.
OPENERS: tuple[str | None, ...] = (
    None, None, None, None, "Write a Python function that", "Write a Python program to", "Complete the following code:\n\ndef",
    "Explain why", "Explain the difference between", "What is", "What are the", "Who", "When did", "Where", "How do I",
    "How does", "Why do", "Can you", "A", "If a", "There are", "In a school", "Calculate", "Solve", "Summarize", "Rewrite",
    "Describe", "Write a short story about", "Write an email to", "Compose", "Give me", "List", "Compare", "Translate",
    "Classify", "Name", "Suggest", "Imagine", "Create", "Identify", "Edit the following sentence:", "Tell me about",
)  # fmt: skip


@dataclass
class _Row:
    """One sequence being written; `start` is 0 while it still is a question, `forced` what must come next."""

    tokens: list[int]
    forced: list[int]
    greedy: bool
    start: int = 0
    over: bool = False


class Generator:
    """Writes sequences in batches; all sequences of a batch are equally long at any time, so nothing is padded."""

    def __init__(self, target: Target, seed: int, batch: int = 128):
        self.target, self.batch = target, batch
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.opening, self.turn = self._template()

    def _template(self) -> tuple[list[int], list[int]]:
        """Token ids up to the user's first word, and from the end of the question to the answer's first word."""
        tokenizer: Any = self.target.tokenizer
        mark = "\u241fmark\u241f"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
        )
        before, after = text.split(mark)
        return tokenizer.encode(before, add_special_tokens=False), tokenizer.encode(after, add_special_tokens=False)

    def _opener(self) -> list[int]:
        text = OPENERS[self.rng.integers(len(OPENERS))]
        return self.target.tokenizer.encode(text, add_special_tokens=False) if text else []

    def write(self) -> list[_Row]:
        """One batch; questions that did not end in time are dropped."""
        capacity = len(self.opening) + LONGEST_QUESTION + len(self.turn) + LONGEST_ANSWER
        cache = self.target.new_cache(capacity, self.batch)
        rows = [_Row(list(self.opening), self._opener(), greedy=i % 2 == 0) for i in range(self.batch)]
        fresh = torch.tensor([row.tokens for row in rows])
        done: list[_Row] = []
        while rows:
            out = self.target(fresh.to(self.target.device), cache, last_logits_only=True)
            cache.keep(list(range(fresh.shape[1])))
            for row, token in zip(rows, self._draw(out.logits[:, -1], rows), strict=True):
                if not row.over:
                    self._extend(row, token)
                    if row.over and row.start:
                        done.append(row)
            alive = [i for i, row in enumerate(rows) if not row.over]
            if len(alive) <= 0.85 * len(rows):  # dropping rows copies the cache: do it now and then
                cache.data = cache.data[:, :, alive]
                rows = [rows[i] for i in alive]
            fresh = torch.tensor([row.tokens[-1:] for row in rows])
        return done

    def _extend(self, row: _Row, token: int) -> None:
        row.tokens.append(row.forced.pop(0) if row.forced else token)
        if row.start:
            row.over = row.tokens[-1] in self.target.eos or len(row.tokens) - row.start >= LONGEST_ANSWER
        elif not row.forced and row.tokens[-1] == self.turn[0]:
            row.forced = self.turn[1:]
            row.start = len(row.tokens) + len(row.forced)
        elif len(row.tokens) - len(self.opening) >= LONGEST_QUESTION:
            row.over = True

    def _draw(self, logits: Tensor, rows: list[_Row]) -> list[int]:
        """The next token of every row, greedy or sampled."""
        tokens = logits.argmax(-1)
        temperatures = torch.tensor([
            (0.0 if row.greedy else ANSWER_TEMPERATURE) if row.start else QUESTION_TEMPERATURE for row in rows
        ], device=logits.device)  # fmt: skip
        at = (temperatures > 0).nonzero()[:, 0]
        if len(at):
            probs = torch.softmax(logits[at] / temperatures[at, None], dim=-1)
            tokens[at] = (probs / torch.empty_like(probs).exponential_()).argmax(-1)
        return tokens.tolist()


def generate_corpus(
    target: Target, file: Path, *, response_tokens: int, seed: int, batch: int = 128, show: Callable[[str], None] = say
) -> None:
    """Write sequences with at least `response_tokens` answer tokens to `file` (.npz), without exact duplicates."""
    if response_tokens < 1:
        raise UserError(f"--generate is {response_tokens}; ask for at least 1 response token.")
    if target.tokenizer is None or not target.tokenizer.chat_template:
        raise UserError("The target's tokenizer has no chat template; sequences cannot be generated with it.")
    generator, begun = Generator(target, seed, batch), time.perf_counter()
    kept: dict[tuple[int, ...], int] = {}  # tokens -> index of the first answer token
    written = barren = 0
    while written < response_tokens:
        before = written
        for row in generator.write():
            if tuple(row.tokens) not in kept:
                kept[tuple(row.tokens)] = row.start
                written += len(row.tokens) - row.start
        barren = 0 if written > before else barren + 1
        if barren == BARREN_BATCHES:
            raise UserError(
                f"The target wrote nothing new in {barren} batches of {batch}: it cannot make a corpus of that size."
            )
        if kept:
            rate = written / (time.perf_counter() - begun)
            show(f"generated {written:,} of {response_tokens:,} response tokens, {rate:.0f}/s")
            save_corpus(file, [(start, list(tokens)) for tokens, start in kept.items()])


def save_corpus(file: Path, sequences: list[tuple[int, list[int]]]) -> None:
    """Write (index of the first response token, token ids) pairs in the corpus format of `training.data`."""
    scratch = file.with_suffix(".partial.npz")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            scratch,
            tokens=np.concatenate([np.array(tokens, dtype=np.uint32) for _, tokens in sequences]),
            length=np.array([len(tokens) for _, tokens in sequences], dtype=np.uint32),
            start=np.array([start for start, _ in sequences], dtype=np.uint32),
        )
        scratch.replace(file)
    except OSError as error:
        raise UserError(f"The corpus could not be written to {file} ({error.strerror or error}).") from None
