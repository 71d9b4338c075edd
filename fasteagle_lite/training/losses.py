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


def _scored(batch: Batch, depth: int, rows: int) -> Tensor:
    """(B, rows) bool: the rows that decoding can draft from and whose prediction at `depth` is of a response token."""
    wanted = batch.scored[:, depth : depth + rows]
    return F.pad(wanted, (0, rows - wanted.shape[1])) & batch.scored[:, 1 : 1 + rows]


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
        at = _scored(batch, depth, rows).nonzero(as_tuple=True)
        source = (at[0], at[1] + depth)  # where the target stated the distribution
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
    """Training-time test: the states (B, rows, h) after 1 .. `steps` steps, each fed the state before it.

    A step's query sees the first step's keys causally, and of each later step the one key of its own row, exactly what
    the drafter would have in its cache; so no (steps*T)^2 mask is needed.
    """
    rows = batch.tokens.shape[1] - 1
    attention = model.attention
    groups, scale = attention.heads // attention.kv_heads, attention.dim**-0.5
    bias = attention_bias(None, rows, rows, batch.embeddings)
    hidden, states = model.fusion(batch.taps[:, :rows]), []
    keys: list[Tensor] = []  # of each step, repeated for the query heads: (B, H, rows, D)
    values: list[Tensor] = []
    for step in range(steps):
        # Teacher forcing: at step s row j reads x_{j+1+s}; behind the end nothing is scored, any token will do.
        embeddings = F.pad(batch.embeddings[:, 1 + step :], (0, 0, 0, step))
        positions = torch.arange(rows, device=hidden.device) + step
        q, k, v = attention.project(model.inputs(hidden, embeddings), rope(positions))
        q = q.transpose(1, 2)
        keys.append(k.transpose(1, 2).repeat_interleave(groups, dim=1))
        values.append(v.transpose(1, 2).repeat_interleave(groups, dim=1))
        scores = [q @ keys[0].transpose(-1, -2) * scale + bias]
        scores += [(q * later).sum(-1, keepdim=True) * scale for later in keys[1:]]
        weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1, dtype=torch.float32).to(v.dtype)
        out = weights[..., :rows] @ values[0]
        for i, later in enumerate(values[1:]):
            out = out + weights[..., rows + i, None] * later
        hidden = hidden + attention.output(out.transpose(1, 2).flatten(2))
        hidden = hidden + model.mlp(model.mlp_norm(hidden))
        states.append(hidden)
    return states


def autoregressive_loss(
    model: Autoregressive, batch: Batch, rope: Rope, vocabulary: Vocabulary, steps: int
) -> tuple[Tensor, list[float]]:
    """Training-time test with step weights 0.8^i (normalised); and each step's cross-entropy."""
    rows = batch.tokens.shape[1] - 1
    losses = []
    for depth, state in enumerate(unrolled_states(model, batch, rope, steps), start=1):
        at = _scored(batch, depth, rows).nonzero(as_tuple=True)
        source = (at[0], at[1] + depth)
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
        at = _scored(batch, depth, rows).nonzero(as_tuple=True)
        source = (at[0], at[1] + depth)
        if isinstance(model, Cascade):
            logits = model.head.logits(state[at])
            if model.config.markov_rank and depth > 1:
                logits = logits + model.markov(batch.draft_tokens[source])
        else:
            logits = model.logits(state[at])
        best = batch.teacher_ids[source][:, 0]
        known = batch.teacher_probs[source][:, 0] > 0  # the target's choice may lie outside the draft vocabulary
        hits[depth - 1] = ((logits.argmax(-1) == best) & known).sum()
        counts[depth - 1] = len(best)
    return hits, counts
