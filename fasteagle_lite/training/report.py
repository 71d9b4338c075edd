"""What a corpus consists of, stated before anything is trained on it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ..repetition import repetitive
from .data import Corpus
from .generate import chat_marks

SPAN = 13  # tokens in a row that count as contamination by a benchmark prompt (GPT-3's length, arXiv 2005.14165)

_ABOUT_A_TEXT = re.compile(
    r"\b(summar\w+|rewrite|rephrase|paraphrase|edit|correct|proofread|main idea|key points|title)\b", re.I
)
_CODE = re.compile(
    r"```|\bdef \w|\b(python|javascript|typescript|java|html|css|sql|regex|algorithm)\b|\bC\+\+|\bC#"
    r"|\b(code|function|program|script|class|method) (that|to|which|for|in)\b|\b(following|this|some|your) code\b",
    re.I,
)
_MATHS = re.compile(r"\b(equations?|derivative|integral|square root|polynomial|probability that)\b", re.I)
_RECKONING = re.compile(
    r"\b(calculate|solve|how (many|much|long|far|old|fast)|total|average|sum|product|percent|probability|what is)\b|=",
    re.I,
)
_NUMBER = re.compile(r"\d[\d.,]*")


def kind_of(request: str) -> str:
    """`text`, `code`, `maths` or `other`, by the first rule that holds.

    text: at least 50 words, and the first or last 12 of them ask to summarise, rewrite, rephrase, edit or correct, or
    for a title, main idea or key points.  code: a code block, `def`, the name of a programming language, `algorithm`,
    or words like "a function that", "the following code".  maths: `equation`, `derivative` and the like, or two numbers
    and a word of reckoning such as `calculate`, "how many", `total`, `=`.  Rules err; the shares are estimates.
    """
    words = request.split()
    if len(words) >= 50 and _ABOUT_A_TEXT.search(" ".join([*words[:12], *words[-12:]])):
        return "text"
    if _CODE.search(request):
        return "code"
    if _MATHS.search(request) or (len(_NUMBER.findall(request)) > 1 and _RECKONING.search(request)):
        return "maths"
    return "other"


def describe_corpus(
    corpus: Corpus, tokenizer: Any, eos: Collection[int], prompts: Sequence[str] = ()
) -> dict[str, Any]:
    """Plain JSON about a corpus; lengths are tokens, a prompt's include the chat template, shares lie in 0 .. 1.

    ended: responses whose last token is one of `eos`.  kinds: see `kind_of`.  repetitive: see `repetition`.  duplicates:
    sequences that occur earlier, token by token.  overlap: sequences that share `SPAN` tokens in a row, anywhere in
    prompt or response, with one of the benchmark `prompts` (and how many of those are met); None without prompts.
    """
    count, lengths = len(corpus), np.diff(corpus.offsets)
    sequences = [tuple(corpus.sequence(i).tolist()) for i in range(count)]
    before, after = chat_marks(tokenizer) if tokenizer.chat_template else ("", "")
    requests = [
        tokenizer.decode(tokens[:start]).removeprefix(before).removesuffix(after)
        for tokens, start in zip(sequences, corpus.starts, strict=True)
    ]
    kinds = Counter(map(kind_of, requests))
    files = []
    for part in corpus.parts:
        mine = (corpus.offsets[:-1] >= part.tokens.start) & (corpus.offsets[:-1] < part.tokens.stop)
        tokens = int((lengths - corpus.starts)[mine].sum())
        files.append({"sha256": part.sha256, "sequences": int(mine.sum()), "response_tokens": tokens})
    return {
        "sequences": count,
        "response_tokens": corpus.response_tokens,
        "files": files,
        "prompt_length": _quantiles(corpus.starts),
        "response_length": _quantiles(lengths - corpus.starts),
        "ended": sum(tokens[-1] in eos for tokens in sequences) / count,
        "kinds": {kind: kinds[kind] / count for kind in ("code", "maths", "text", "other")},
        "repetitive": sum(repetitive(corpus.response(i).tolist()) for i in range(count)) / count,
        "duplicates": count - len(set(sequences)),
        "overlap": _overlap(sequences, [tokenizer.encode(p, add_special_tokens=False) for p in prompts]),
    }


def _quantiles(lengths: np.ndarray) -> dict[str, int]:
    values = np.quantile(lengths, (0, 0.5, 0.9, 1), method="inverted_cdf")
    return {name: int(value) for name, value in zip(("min", "median", "p90", "max"), values, strict=True)}


def _overlap(sequences: Sequence[Sequence[int]], prompts: list[list[int]]) -> dict[str, int] | None:
    if not prompts:
        return None
    owners: dict[tuple[int, ...], set[int]] = {}  # span -> the prompts that it stands in
    for i, prompt in enumerate(prompts):
        for span in _spans(prompt):
            owners.setdefault(span, set()).add(i)
    shared = [spans for spans in (_spans(tokens) & owners.keys() for tokens in sequences) if spans]
    met = {i for spans in shared for span in spans for i in owners[span]}
    return {"span": SPAN, "prompts": len(prompts), "sequences": len(shared), "prompts_met": len(met)}


def _spans(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[i : i + SPAN]) for i in range(len(tokens) - SPAN + 1)}


def corpus_table(report: dict[str, Any]) -> str:
    """The report as text for the terminal."""
    lines = [f"{'file (SHA-256)':<20}{'sequences':>12}{'response tokens':>18}"]
    rows = [(file["sha256"][:16], file) for file in report["files"]] + [("total", report)]
    lines += [f"{name:<20}{row['sequences']:>12,}{row['response_tokens']:>18,}" for name, row in rows]
    lines += ["", f"{'length in tokens':<20}" + "".join(f"{name:>8}" for name in ("min", "median", "90 %", "max"))]
    for name in ("prompt", "response"):
        lines.append(f"{name:<20}" + "".join(f"{value:>8,}" for value in report[f"{name}_length"].values()))
    names = {"code": "code", "maths": "maths", "text": "work on a given text", "other": "other"}
    lines += [
        "",
        f"requests            {', '.join(f'{names[kind]} {share:.1%}' for kind, share in report['kinds'].items())}",
        f"ended by themselves {report['ended']:.1%} of the responses, the others were cut",
        f"repetitive          {report['repetitive']:.1%} of the responses",
        f"exact duplicates    {report['duplicates']:,}",
    ]
    if overlap := report["overlap"]:
        lines.append(
            f"benchmark overlap   {overlap['sequences']:,} sequences share {overlap['span']} tokens in a row with "
            f"{overlap['prompts_met']:,} of {overlap['prompts']:,} prompts"
        )
    return "\n".join(lines)
