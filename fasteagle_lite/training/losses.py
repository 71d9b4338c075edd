"""What each drafter is trained on: the target's own distribution, at every position, in one pass over the sequences.

Row j of a sequence x_0 .. x_{T-1} pairs feature f_j with token x_{j+1}; depth i (1, 2, ...) predicts x_{j+1+i}, whose
distribution the target stated at position j + i.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..drafters.autoregressive import Autoregressive
from ..drafters.cascade import Cascade
from ..llama import Rope, Rows, attention_bias

STEP_DECAY = 0.8  # EAGLE-3: the weight of training-time test step i is 0.8^i


@dataclass(frozen=True)
class Batch:
    """Padded sequences and the target's view of them; B sequences, T positions, K teacher tokens.

    tokens (B, T); draft_tokens (B, T) the same as draft indices, V where outside the draft vocabulary; embeddings
    (B, T, h); taps (B, T, 3h); hidden (B, T, h); teacher_ids and teacher_probs (B, T, K), draft indices and the
    probabilities of the NEXT token (0 outside the draft vocabulary); scored (B, T) bool, whether the next token is a
    response token, so that a prediction made here counts.
    """

    tokens: Tensor
    draft_tokens: Tensor
    embeddings: Tensor
    taps: Tensor
    hidden: Tensor
    teacher_ids: Tensor
    teacher_probs: Tensor
    scored: Tensor

    @property
    def visits(self) -> int:
        """Response tokens in the batch: the unit in which training is counted."""
        return int(self.scored.sum())

    @property
    def drafted(self) -> tuple[Tensor, Tensor]:
        """Rows that decoding can draft from, whose own next draw x_{j+2} is of the response: (B, Q) indices, and which
        of them are real, not padding."""
        own = self.scored[:, 1:]
        rows = own.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(own.sum(1).max()))]
        return rows, own.gather(1, rows)

    def pick(self, x: Tensor) -> Tensor:
        """The drafted rows of x (B, T, ...): (B, Q, ...)."""
        return x[torch.arange(len(x), device=x.device)[:, None], self.drafted[0]]


@dataclass(frozen=True)
class Vocabulary:
    """The draft indices a step's softmax runs over, and how its denominator is corrected for those left out.

    With all of them `among` is None.  Else `among` (M,) holds every teacher token of the batch and a random sample of
    the rest; each sampled one stands for several, so `log_weight` (M,) is added to the logits in the denominator, which
    keeps its expectation right and the drafter's probabilities calibrated.
    """

    among: Tensor | None
    log_weight: Tensor | None
    place: Tensor | None  # (V,) draft index -> place in `among`

    @staticmethod
    def sample(batch: Batch, size: int, negatives: int) -> Vocabulary:
        if not negatives:
            return Vocabulary(None, None, None)
        used = torch.zeros(size, dtype=torch.bool, device=batch.tokens.device)
        used[batch.teacher_ids[batch.teacher_probs > 0]] = True
        rest = (~used).nonzero()[:, 0]
        if len(rest) <= negatives:
            return Vocabulary(None, None, None)
        drawn = rest[torch.randperm(len(rest), device=rest.device)[:negatives]]
        used_ids = used.nonzero()[:, 0]
        among = torch.cat([used_ids, drawn])
        log_weight = torch.zeros(len(among), device=among.device)
        log_weight[len(used_ids) :] = torch.log(torch.tensor(len(rest) / negatives))
        place = torch.zeros(size, dtype=torch.long, device=among.device)
        place[among] = torch.arange(len(among), device=among.device)
        return Vocabulary(among, log_weight, place)


def soft_cross_entropy(logits: Tensor, ids: Tensor, probs: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Mean of -sum_k p_k log q_k over rows, 0 without any: logits (R, M), teacher ids and probs (R, K)."""
    if vocabulary.place is not None:
        ids = vocabulary.place[ids]
    picked = logits.gather(1, ids).float()
    weighted = logits if vocabulary.log_weight is None else logits + vocabulary.log_weight
    normaliser = torch.logsumexp(weighted.float(), dim=-1, keepdim=True)
    return -(probs * (picked - normaliser)).sum() / max(1, len(logits))


def _rows(rope: Rope, count: int, like: Tensor) -> Rows:
    steps = torch.arange(count, device=like.device)
    return Rows(rope(steps), attention_bias(None, count, count, like))


def _asked(batch: Batch, depth: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The predictions that count at `depth`: their indices in (B, Q), and the positions (B, T) that state the answers."""
    rows, real = batch.drafted
    wanted = F.pad(batch.scored, (0, depth)).gather(1, rows + depth) & real
    sequence, column = wanted.nonzero(as_tuple=True)
    return (sequence, column), (sequence, rows[sequence, column] + depth)


def cascade_loss(
    model: Cascade,
    batch: Batch,
    rope: Rope,
    vocabulary: Vocabulary,
    *,
    feature_weight: float = 0.0,
    last_only: bool = False,
) -> tuple[Tensor, list[float]]:
    """Layer-wise supervision: the mean over layers; and each layer's cross-entropy.

    `feature_weight` adds SmoothL1 between a layer's normed state and the target's, at the position it stands for.
    `last_only` drops the supervision of all layers but the last (an ablation).
    """
    rows = batch.tokens.shape[1] - 1
    states = model(batch.taps[:, :rows], batch.embeddings[:, 1:], _rows(rope, rows, batch.embeddings))
    losses, features = [], []
    for depth, state in enumerate(states, start=1):
        at, source = _asked(batch, depth)  # `source`: where the target stated the distribution
        state = batch.pick(state)
        logits = model.head.logits(state[at], vocabulary.among)
        if model.config.markov_rank and depth > 1:
            logits = logits + model.markov(batch.draft_tokens[source], vocabulary.among)
        losses.append(soft_cross_entropy(logits, batch.teacher_ids[source], batch.teacher_probs[source], vocabulary))
        if feature_weight:
            features.append(F.smooth_l1_loss(state[at].float(), batch.hidden[source].float()))
    supervised = slice(-1, None) if last_only else slice(None)
    loss = torch.stack(losses[supervised]).mean()
    if feature_weight:
        loss = loss + feature_weight * torch.stack(features[supervised]).mean()
    return loss, [float(x.detach()) for x in losses]


def unrolled_states(model: Autoregressive, batch: Batch, rope: Rope, steps: int) -> list[Tensor]:
    """Training-time test: the states (B, Q, h) of the drafted rows after 1 .. `steps` steps, each fed the one before.

    A step's query sees the first step's keys causally, and of each later step the one key of its own row, exactly what
    the drafter would have in its cache; so no (steps*T)^2 mask is needed, and prompt rows lend their first keys only.
    """
    rows, _ = batch.drafted
    attention, count = model.attention, batch.tokens.shape[1] - 1
    kv_heads, scale = attention.kv_heads, attention.dim**-0.5
    everywhere = model.fusion(batch.taps[:, :count])
    inputs = model.inputs(everywhere, batch.embeddings[:, 1:])
    q, k, v = attention.project(inputs, rope(torch.arange(count, device=rows.device)))
    first_keys, first_values = k.transpose(1, 2), v.transpose(1, 2)  # (B, K, T, D)
    q, k, v, hidden = batch.pick(q), batch.pick(k), batch.pick(v), batch.pick(everywhere)
    hides = torch.arange(count, device=rows.device) > rows[..., None]  # (B, Q, T)
    bias = torch.zeros_like(hides, dtype=q.dtype).masked_fill(hides, float("-inf"))[:, None, None]
    # Behind the end nothing is scored, any token will do.
    embeddings = F.pad(batch.embeddings, (0, 0, 0, steps))
    later_keys: list[
        Tensor
    ] = []  # of each later step: (B, K, 1, Q, D), one key a row, shared by a group of query heads
    later_values: list[Tensor] = []
    states = []
    for step in range(steps):
        if step:  # teacher forcing: at step s row j reads x_{j+1+s}
            token = embeddings[torch.arange(len(rows), device=rows.device)[:, None], rows + 1 + step]
            q, k, v = attention.project(model.inputs(hidden, token), rope(rows + step))
            later_keys.append(k.transpose(1, 2).unsqueeze(2))
            later_values.append(v.transpose(1, 2).unsqueeze(2))
        batches, asked, heads, dim = q.shape
        q = q.view(batches, asked, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)  # (B, K, G, Q, D)
        scores = q.flatten(2, 3) @ first_keys.transpose(-1, -2)  # a group's query heads stacked as rows
        own = [(q * later).sum(-1, keepdim=True) for later in later_keys]
        scores = torch.cat([scores.view(*q.shape[:4], count) + bias, *own], dim=-1) * scale
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
        out = (weights[..., :count].flatten(2, 3) @ first_values).view(q.shape)
        for i, later in enumerate(later_values):
            out = out + weights[..., count + i, None] * later
        hidden = hidden + attention.output(out.permute(0, 3, 1, 2, 4).reshape(batches, asked, heads * dim))
        hidden = hidden + model.mlp(model.mlp_norm(hidden))
        states.append(hidden)
    return states


def autoregressive_loss(
    model: Autoregressive, batch: Batch, rope: Rope, vocabulary: Vocabulary, steps: int
) -> tuple[Tensor, list[float]]:
    """Training-time test with step weights 0.8^i (normalised); and each step's cross-entropy."""
    losses = []
    for depth, state in enumerate(unrolled_states(model, batch, rope, steps), start=1):
        at, source = _asked(batch, depth)
        logits = model.logits(state[at], vocabulary.among)
        losses.append(soft_cross_entropy(logits, batch.teacher_ids[source], batch.teacher_probs[source], vocabulary))
    weights = torch.tensor([STEP_DECAY**i for i in range(steps)], device=rope.cos.device)
    loss = (torch.stack(losses) * weights).sum() / weights.sum()
    return loss, [float(x.detach()) for x in losses]


@torch.inference_mode()
def agreement(model: Cascade | Autoregressive, batch: Batch, rope: Rope, depths: int) -> tuple[Tensor, Tensor]:
    """Per depth, how often the drafter's first choice is the target's, and of how many rows: two (depths,) counts.

    Teacher-forced: the tokens before the predicted one are those of the sequence.
    """
    rows = batch.tokens.shape[1] - 1
    if isinstance(model, Cascade):
        states = model(batch.taps[:, :rows], batch.embeddings[:, 1:], _rows(rope, rows, batch.embeddings))
    else:
        states = unrolled_states(model, batch, rope, depths)
    hits, counts = torch.zeros(depths), torch.zeros(depths)
    for depth, state in enumerate(states[:depths], start=1):
        at, source = _asked(batch, depth)
        if isinstance(model, Cascade):
            logits = model.head.logits(batch.pick(state)[at])
            if model.config.markov_rank and depth > 1:
                logits = logits + model.markov(batch.draft_tokens[source])
        else:
            logits = model.logits(state[at])
        best = batch.teacher_ids[source][:, 0]
        known = batch.teacher_probs[source][:, 0] > 0  # the target's choice may lie outside the draft vocabulary
        hits[depth - 1] = ((logits.argmax(-1) == best) & known).sum()
        counts[depth - 1] = len(best)
    return hits, counts
