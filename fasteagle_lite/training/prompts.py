"""Prompts that other people wrote, for the target to answer: from the hub or from files, read by the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import UserError

READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
# Where data sets keep the prompt, the first one that a row has is taken.
COLUMNS = ("messages", "conversations", "conversation", "instruction", "prompt", "question", "turns", "text")
USERS = ("user", "human", "prompter")


def load_prompts(
    name_or_path: str, split: str = "train", column: str | None = None, limit: int | None = None
) -> list[str]:
    """The first `limit` prompts (None: all) of a data set, without empty ones.

    `name_or_path`: a .json, .jsonl, .csv or .parquet file, a folder of such, or a hub name (org/name, or
    org/name:configuration).  `column`: the one with the prompts (None: the first known one).  A column may hold text,
    turns of a chat (the user's first one is taken), or, named `instruction`, be completed by `input` or `context`.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit is {limit}; it must be at least 1.")
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise UserError("Reading prompts needs the datasets library. Install it: pip install datasets") from None
    path = Path(name_or_path).expanduser()
    if path.suffix in READERS and not path.is_file():
        raise UserError(f"There is no prompt file {path}.")
    name, _, configuration = (str(path), "", "") if path.exists() else name_or_path.partition(":")
    try:  # as a stream: a hub data set may be far larger than what is asked of it
        if path.is_file():
            reader = READERS.get(path.suffix, path.suffix)
            rows = datasets.load_dataset(reader, data_files=str(path), split=split, streaming=True)
        else:
            rows = datasets.load_dataset(name, configuration or None, split=split, streaming=True)
        prompts = list(islice(_prompts(rows, column), limit))
    except UserError:
        raise
    except Exception as error:  # offline, gated, misspelt, damaged: the library and the hub client have dozens of types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UserError(f"The prompts of {name_or_path!r} (split {split!r}) cannot be read ({reason}).") from None
    if not prompts:
        raise UserError(f"{name_or_path!r} (split {split!r}) holds no prompts.")
    return prompts


def _prompts(rows: Iterable[dict[str, Any]], column: str | None) -> Iterable[str]:
    for row in rows:
        name = column or next((c for c in COLUMNS if c in row), None)
        if name not in row:
            raise UserError(f"Name the column with the prompts by --column; there are {', '.join(row)}.")
        prompt = first_request(row[name])
        if name == "instruction" and column is None:
            about = row.get("input") or row.get("context")
            prompt = f"{prompt}\n\n{about}" if prompt and about else prompt
        if prompt and prompt.strip():
            yield prompt


def first_request(value: Any) -> str | None:
    """The text that a cell asks first: the text itself, the first of several, or the user's first turn of a chat."""
    if isinstance(value, list):
        turns = [
            turn for turn in value if not isinstance(turn, dict) or (turn.get("role") or turn.get("from")) in USERS
        ]
        value = turns[0] if turns else None
    if isinstance(value, dict):
        value = value.get("content") or value.get("value")
    return value if isinstance(value, str) else None
