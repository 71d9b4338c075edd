"""More training data from the target alone: it writes the question, then answers it.

A sequence opens with the chat template's user turn, sometimes with a few words that steer the kind of request; the target
samples the rest of the question, the template's turn to the assistant is put in, and the target answers, every
other sequence greedily.  Given earlier answers, it also summarises and rewrites those.  Given prompts, it answers them instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UserError
from ..store import say
from ..target import Target
from .data import Corpus, length_batches

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
# Requests about a given text, before and behind it.
ABOUT: tuple[tuple[str, str], ...] = (
    ("Summarize the following text:\n\n", ""), ("Summarize: ", ""), ("", "\n\nSummarize the text above in three sentences."),
    ("What is the main idea of this text?\n\n", ""), ("List the key points of the following article:\n\n", ""),
    ("Rewrite the following text in simpler words:\n\n", ""), ("Rewrite this as a news article:\n\n", ""),
    ("Rewrite the following text in a friendly tone.\n\n", ""), ("Edit the following text to make it more concise:\n\n", ""),
    ("Correct the mistakes in this text:\n\n", ""), ("", "\n\nWrite a title and a short summary for this article."),
)  # fmt: skip
ABOUT_LENGTHS = (160, 256, 384, 640)  # tokens of such a prompt; those of one batch are cut to the same length
ABOUT_EVERY = 3  # every third batch
LONGEST_PROMPT = 640  # tokens of a given prompt, template included; longer ones are dropped
PROMPT_BATCH_TOKENS = 40_000  # of long prompts, so that their cache fits into memory


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

    def __init__(
        self,
        target: Target,
        seed: int,
        batch: int = 128,
        passages: list[list[int]] | None = None,
        prompts: list[list[int]] | None = None,
    ):
        """`passages`: texts to ask about; `prompts`: token ids up to the answer, to be answered instead of own questions."""
        self.target, self.batch, self.passages, self.batches = target, batch, passages or [], 0
        self.rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        self.prompts = prompts or []
        self.left = self._groups()  # given prompts not answered yet, as indices
        self.opening, self.turn = self._template()

    def _template(self) -> tuple[list[int], list[int]]:
        """Token ids up to the user's first word, and from the end of the question to the answer's first word."""
        before, after = chat_marks(self.target.tokenizer)
        return self._encode(before), self._encode(after)

    def _opener(self) -> list[int]:
        text = OPENERS[self.rng.integers(len(OPENERS))]
        return self._encode(text) if text else []

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.target.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def write(self) -> list[_Row]:
        """The next batch: of given prompts, or else every `ABOUT_EVERY`th about given passages, if there are any."""
        self.batches += 1
        if self.prompts:
            return self._answer(self.left.pop())
        return self._ask() if self.batches % ABOUT_EVERY or not self.passages else self._about(self.passages)

    def _ask(self) -> list[_Row]:
        """One batch in which the target writes the questions too; those that did not end in time are dropped."""
        rows = [_Row(list(self.opening), self._opener(), greedy=i % 2 == 0) for i in range(self.batch)]
        return self._write(rows, LONGEST_QUESTION + len(self.turn) + LONGEST_ANSWER)

    def _about(self, passages: list[list[int]]) -> list[_Row]:
        """One batch of requests about given texts, cut and put together to prompts of one length."""
        length = int(self.rng.choice(ABOUT_LENGTHS))
        rows, between = [], self._encode("\n\n")
        for i in range(max(1, min(self.batch, PROMPT_BATCH_TOKENS // length))):
            before, after = map(self._encode, ABOUT[self.rng.integers(len(ABOUT))])
            room = length - len(self.opening) - len(before) - len(after) - len(self.turn)
            text: list[int] = []
            while len(text) < room:
                text += (between if text else []) + passages[self.rng.integers(len(passages))]
            prompt = [*self.opening, *before, *text[: max(room, 1)], *after, *self.turn]
            rows.append(_Row(prompt, [], greedy=i % 2 == 0, start=len(prompt)))
        return self._write(rows, LONGEST_ANSWER)

    def _groups(self) -> list[list[int]]:
        """Given prompts in batches of similar length, in random order."""
        lengths = np.array([len(prompt) for prompt in self.prompts])
        similar = length_batches(np.arange(len(lengths)), lengths, PROMPT_BATCH_TOKENS)
        groups = [group[at : at + self.batch] for group in similar for at in range(0, len(group), self.batch)]
        return [groups[i] for i in self.rng.permutation(len(groups))]

    def _answer(self, group: list[int]) -> list[_Row]:
        """One batch of given prompts; what a prompt has more than the shortest one is put in token by token."""
        prompts = {i: self.prompts[i] for i in group}
        shortest, longest = (pick(map(len, prompts.values())) for pick in (min, max))
        rows = [_Row(p[:shortest], p[shortest:], greedy=i % 2 == 0, start=len(p)) for i, p in prompts.items()]
        return self._write(rows, longest - shortest + LONGEST_ANSWER)

    def _write(self, rows: list[_Row], room: int) -> list[_Row]:
        """Go on with equally long `rows`, by at most `room` tokens; returns those with an answer."""
        cache = self.target.new_cache(len(rows[0].tokens) + room, len(rows))
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
            written = len(row.tokens) - row.start  # not positive while the prompt is still put in
            row.over = written > 0 and (row.tokens[-1] in self.target.eos or written >= LONGEST_ANSWER)
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


def chat_marks(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before a user's request, and between it and the answer."""
    mark = "\u241fmark\u241f"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False
    )
    before, after = text.split(mark)
    return before, after


def generate_corpus(
    target: Target,
    file: Path,
    *,
    response_tokens: int,
    seed: int,
    about: Corpus | None = None,
    prompts: Sequence[str] = (),
    batch: int = 128,
    show: Callable[[str], None] = say,
) -> None:
    """Write sequences with at least `response_tokens` answer tokens to `file` (.npz), without exact duplicates.

    With `about`, a part of the requests is to summarise or rewrite the answers of that corpus.  With `prompts`, the target
    answers each of them once, and stops earlier if there are no more.
    """
    if response_tokens < 1:
        raise UserError(f"--generate is {response_tokens}; ask for at least 1 response token.")
    if target.tokenizer is None or not target.tokenizer.chat_template:
        raise UserError("The target's tokenizer has no chat template; sequences cannot be generated with it.")
    passages = (
        [[t for t in about.response(i).tolist() if t not in target.eos] for i in range(len(about))] if about else []
    )
    given = _encoded(target, prompts, show) if prompts else None
    generator = Generator(target, seed, batch, [passage for passage in passages if passage], given)
    begun = time.perf_counter()
    kept: dict[tuple[int, ...], int] = {}  # tokens -> index of the first answer token
    written = barren = dropped = 0
    while written < response_tokens and (generator.left or not prompts):
        before = written
        for row in generator.write():
            if tuple(row.tokens) in kept:
                dropped += 1
            else:
                kept[tuple(row.tokens)] = row.start
                written += len(row.tokens) - row.start
        barren = 0 if written > before else barren + 1
        if barren == BARREN_BATCHES:
            raise UserError(
                f"The target wrote nothing new in {barren} batches of {batch}: it cannot make a corpus of that size."
            )
        if kept:
            rate = written / (time.perf_counter() - begun)
            show(
                f"generated {written:,} of {response_tokens:,} response tokens, {rate:.0f}/s; {dropped} duplicates dropped"
            )
            save_corpus(file, [(start, list(tokens)) for tokens, start in kept.items()])


def _encoded(target: Target, prompts: Sequence[str], show: Callable[[str], None]) -> list[list[int]]:
    """Chats that are to be answered, each once, without those that are too long."""
    chats = [target.encode_chat(prompt) for prompt in dict.fromkeys(prompts)]
    longest = min(LONGEST_PROMPT, target.context - LONGEST_ANSWER)
    fitting = [chat for chat in chats if len(chat) <= longest]
    show(f"{len(fitting):,} prompts to answer; {len(chats) - len(fitting):,} of more than {longest} tokens dropped")
    if not fitting:
        raise UserError(f"None of the prompts fits into {longest} tokens; give shorter ones.")
    return fitting


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
