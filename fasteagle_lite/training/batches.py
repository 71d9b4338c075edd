"""From corpus and features to the padded batches that the losses read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..target import Target
from .data import HELD_OUT_EVERY, Corpus, Features
from .losses import Batch


class Batches:
    """Turns corpus, features and draft vocabulary into `Batch`es."""

    def __init__(self, corpus: Corpus, features: Features, target: Target, vocabulary: Tensor):
        self.corpus, self.features, self.target = corpus, features, target
        self.size = len(vocabulary)
        self.index = torch.full((target.vocab,), self.size)  # target token -> draft index, V where there is none
        self.index[vocabulary] = torch.arange(self.size)
        self.held_out = list(range(0, len(corpus), HELD_OUT_EVERY)) if len(corpus) >= HELD_OUT_EVERY else [0]
        held = set(self.held_out)
        self.training = [i for i in range(len(corpus)) if i not in held] or [0]

    def of(self, sequences: list[int]) -> Batch:
        views = [self.features.sequence(i) for i in sequences]
        texts = [self.corpus.sequence(i) for i in sequences]
        length = max(len(text) for text in texts)

        def padded(arrays: list[np.ndarray]) -> Tensor:
            rows = [torch.from_numpy(array) for array in arrays]
            return torch.stack([F.pad(r, (0, 0) * (r.ndim - 1) + (0, length - len(r))) for r in rows])

        tokens = padded(texts)
        ids = self.index[padded([view["top_ids"] for view in views]).long()]
        known = ids < self.size
        probs = padded([view["top_logprobs"] for view in views]).float().exp() * known
        place = torch.arange(length)
        scored = torch.stack(
            [
                (place + 1 >= self.corpus.starts[i]) & (place + 1 < len(text))
                for i, text in zip(sequences, texts, strict=True)
            ]
        )
        batch = Batch(
            tokens=tokens,
            draft_tokens=self.index[tokens],
            embeddings=F.embedding(tokens.to(self.target.device), self.target.embedding.weight).float(),
            taps=padded([view["taps"] for view in views]).float(),
            hidden=padded([view["hidden"] for view in views]).float(),
            teacher_ids=ids * known,
            teacher_probs=probs,
            scored=scored,
        )
        return Batch(**{name: tensor.to(self.target.device) for name, tensor in vars(batch).items()})

    def epochs(self, size: int, rng: np.random.Generator) -> Iterator[list[int]]:
        """Endless batches of `size` sequences; every epoch in a new order, neighbours in length together."""
        lengths = np.diff(self.corpus.offsets)
        while True:
            order = rng.permutation(self.training)
            pools = [order[i : i + 16 * size] for i in range(0, len(order), 16 * size)]
            groups = [g for pool in pools for g in chunks(pool[np.argsort(lengths[pool], kind="stable")], size)]
            for g in rng.permutation(len(groups)):
                yield groups[g]


def chunks(items: np.ndarray, size: int) -> list[list[int]]:
    return [[int(i) for i in items[at : at + size]] for at in range(0, len(items), size)]
