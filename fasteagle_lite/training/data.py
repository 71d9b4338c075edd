"""Training sequences, and what the target thinks of them, computed once and kept in a memory-mapped cache.

A corpus file (.npz) holds `tokens` (all sequences end to end), `length` (S,) and `start` (S,), the index of the first
response token of each sequence.  Everything in it was written or answered by the target itself (self-distillation).
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..drafters.features import unit_taps
from ..errors import UserError
from ..store import cache_folder, say
from ..target import Target

TEACHER_TOP = 16  # the target's most probable tokens kept for every position
HELD_OUT_EVERY = 20  # every 20th sequence is never trained on
_BATCH_TOKENS = 2048


@dataclass(frozen=True)
class CorpusFile:
    """One of the files a corpus consists of: its hash, and which of the corpus' tokens are its own."""

    sha256: str
    tokens: slice


@dataclass(frozen=True)
class Corpus:
    """Sequences of token ids, with the response of each beginning at `starts[i]`."""

    tokens: np.ndarray  # (total,) all sequences end to end
    offsets: np.ndarray  # (S + 1,)
    starts: np.ndarray  # (S,)
    parts: tuple[CorpusFile, ...]

    def __len__(self) -> int:
        return len(self.starts)

    def sequence(self, i: int) -> np.ndarray:
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def response(self, i: int) -> np.ndarray:
        return self.sequence(i)[self.starts[i] :]

    @property
    def response_tokens(self) -> int:
        return int(self.offsets[-1] - self.starts.sum())

    @property
    def sha256(self) -> str:
        return hashlib.sha256("".join(part.sha256 for part in self.parts).encode()).hexdigest()

    @staticmethod
    def load(paths: list[Path], vocab: int) -> Corpus:
        """Read corpus files, and every .npz of given folders, into one corpus."""
        files = [file for path in paths for file in (sorted(path.glob("*.npz")) if path.is_dir() else [path])]
        if not files:
            raise UserError(
                f"No training sequences at {', '.join(map(str, paths))}: expected .npz files or folders of them."
            )
        arrays, parts, total = [], [], 0
        for file in files:
            try:
                with np.load(file) as data:
                    tokens, length, start = (data[k].astype(np.int64) for k in ("tokens", "length", "start"))
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
            except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
                raise UserError(
                    f"{file} is not a corpus file: it needs arrays tokens, length and start ({error!r})."
                ) from None
            fits = len(start) == len(length) > 0 and (start >= 1).all() and (start < length).all()
            if not fits or length.sum() != len(tokens) or tokens.min() < 0:
                raise UserError(f"{file} is damaged: its lengths and starts do not fit its tokens.")
            if tokens.max() >= vocab:
                raise UserError(
                    f"{file} holds token {tokens.max()}, but the target's vocabulary has {vocab}: another target?"
                )
            arrays.append((tokens, length, start))
            parts.append(CorpusFile(digest, slice(total, total + len(tokens))))
            total += len(tokens)
        tokens, length, start = (np.concatenate(column) for column in zip(*arrays, strict=True))
        return Corpus(tokens, np.concatenate([[0], np.cumsum(length)]), start, tuple(parts))

    def frequent_tokens(self, count: int) -> np.ndarray:
        """The `count` most frequent response tokens, ascending: the drafters' reduced vocabulary."""
        responses = np.concatenate([self.response(i) for i in range(len(self))])
        ids, counts = np.unique(responses, return_counts=True)
        return np.sort(ids[np.argsort(-counts, kind="stable")[:count]])


class Features:
    """The target's view of every position of a corpus, kept file by file, so that a grown corpus costs only its new files.

    For the tokens of a sequence: taps (T, 3h) fp16, each of the three scaled to unit RMS; hidden (T, h) fp16, the normed
    state before the head; top_ids and top_logprobs (T, TEACHER_TOP), the target's distribution of the NEXT token
    (log-probability -inf where that token belongs to the prompt).
    """

    NAMES = ("taps", "hidden", "top_ids", "top_logprobs")

    def __init__(self, corpus: Corpus, target: Target, reader: Target | None = None):
        """Open the features in the cache folder; compute those that are missing.

        `reader` is the same target in a lower precision: it runs the layers, faster; the distributions still come from
        `target`'s own head, because rounded logits would tie.
        """
        longest = int(np.diff(corpus.offsets).max())
        if longest > target.context:
            raise UserError(f"A sequence of {longest:,} tokens exceeds the target's context of {target.context:,}.")
        self.corpus = corpus
        self.arrays = [
            {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in self.NAMES}
            for folder in (_kept(corpus, part, target, reader or target) for part in corpus.parts)
        ]

    def sequence(self, i: int) -> dict[str, np.ndarray]:
        """The four arrays of sequence i."""
        begin, end = self.corpus.offsets[i], self.corpus.offsets[i + 1]
        for part, arrays in zip(self.corpus.parts, self.arrays, strict=True):
            if begin < part.tokens.stop:
                first = begin - part.tokens.start
                return {name: np.array(array[first : first + end - begin]) for name, array in arrays.items()}
        raise IndexError(i)


def _kept(corpus: Corpus, part: CorpusFile, target: Target, reader: Target) -> Path:
    """The cache folder of one file's features, filled if need be."""
    key = hashlib.sha256(
        f"{part.sha256} {target.fingerprint} {TEACHER_TOP} {reader.embedding.weight.dtype}".encode()
    ).hexdigest()[:16]
    folder = cache_folder() / "features" / key
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix="partial-"))
        try:
            _compute(corpus, part, target, reader, scratch)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _compute(corpus: Corpus, part: CorpusFile, target: Target, reader: Target, folder: Path) -> None:
    total, hidden = part.tokens.stop - part.tokens.start, target.spec.hidden
    top = min(TEACHER_TOP, target.vocab)
    maps = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=dtype, shape=(total, width))
        for name, width, dtype in zip(
            Features.NAMES, (3 * hidden, hidden, top, top), (np.float16, np.float16, np.int32, np.float16), strict=True
        )
    }
    mine = np.flatnonzero((corpus.offsets[:-1] >= part.tokens.start) & (corpus.offsets[:-1] < part.tokens.stop))
    done, reported, begun = 0, 0.0, time.perf_counter()
    for batch in length_batches(mine, np.diff(corpus.offsets), _BATCH_TOKENS):
        width = max(len(corpus.sequence(i)) for i in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.long)
        for row, i in enumerate(batch):
            tokens[row, : len(corpus.sequence(i))] = torch.from_numpy(corpus.sequence(i))
        out = reader(tokens.to(target.device), reader.new_cache(width, len(batch)), last_logits_only=True)
        taps, hidden = unit_taps(out.taps), out.hidden.float()
        for row, i in enumerate(batch):
            begin, size = corpus.offsets[i] - part.tokens.start, len(corpus.sequence(i))
            asked = int(corpus.starts[i]) - 1  # nobody asks what the target thinks before the response begins
            logits = target.logits(out.hidden[row, asked:size])
            best = logits.topk(top)
            logprobs = best.values - logits.logsumexp(dim=-1, keepdim=True)
            views = (taps[row, :size], hidden[row, :size], best.indices, logprobs)
            for array, tensor in zip(maps.values(), views, strict=True):
                array[begin + size - len(tensor) : begin + size] = tensor.cpu().numpy()
            maps["top_logprobs"][begin : begin + asked] = -np.inf
            done += size
        if time.perf_counter() - reported > 30:
            reported = time.perf_counter()
            rate = done / (reported - begun)
            say(f"features: {done:,} of {total:,} tokens, {rate:.0f}/s, {(total - done) / rate / 60:.1f} min left")
    for array in maps.values():
        array.flush()


def length_batches(sequences: np.ndarray, lengths: np.ndarray, budget: int) -> Iterator[list[int]]:
    """`sequences` grouped by similar length, each group padded to at most `budget` tokens (or a single sequence)."""
    batch: list[int] = []
    for i in sequences[np.argsort(lengths[sequences], kind="stable")]:
        if batch and (len(batch) + 1) * lengths[i] > budget:
            yield batch
            batch = []
        batch.append(int(i))
    if batch:
        yield batch
