"""The round loop, the same for every method: draft -> verify -> commit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .drafters.base import Drafter
from .errors import UserError
from .llama import KVCache
from .sampling import Sampling
from .target import Target
from .text import Detokenizer
from .trace import Round
from .tree import MAX_BUDGET
from .verify import walk


@dataclass(frozen=True)
class Prefix:
    """A prompt that has been through the target, all but its last token: its cache and features, shared by all lanes.

    taps (t, 3h) are the features of the first t tokens of the t + 1 in `tokens`; `seconds` is what the forward took.
    """

    tokens: tuple[int, ...]
    cache: KVCache
    taps: Tensor
    seconds: float


def clock(device: torch.device) -> float:
    """Seconds, with the device's queue empty: everything that is timed is timed with this."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def check_length(target: Target, prompt: list[int], max_new_tokens: int) -> None:
    """Refuse an output length that is not positive, or a prompt that leaves no room for it."""
    if max_new_tokens < 1:
        raise UserError(f"max-new-tokens is {max_new_tokens}; it must be at least 1.")
    if not prompt:
        raise UserError("The prompt is empty.")
    if len(prompt) >= target.context:
        raise UserError(
            f"The prompt has {len(prompt):,} tokens; the model's context is {target.context:,}. Shorten the prompt."
        )
    if len(prompt) + max_new_tokens > target.context:
        raise UserError(
            f"{len(prompt):,} prompt tokens and {max_new_tokens:,} new ones exceed the model's context of "
            f"{target.context:,}. Ask for at most {target.context - len(prompt):,} new tokens."
        )


def prefill(target: Target, prompt: list[int], max_new_tokens: int) -> Prefix:
    """Run the prompt once; lanes fork its cache, which has room for the output and a tree."""
    check_length(target, prompt, max_new_tokens)
    begun = clock(target.device)
    cache = target.new_cache(len(prompt) + max_new_tokens + MAX_BUDGET)
    if len(prompt) == 1:
        taps = target.embedding.weight.new_zeros((0, 3 * target.spec.hidden))
    else:
        tokens = torch.tensor([prompt[:-1]], device=target.device)
        taps = target(tokens, cache, last_logits_only=True).taps[0]
        cache.keep(list(range(len(prompt) - 1)))
    return Prefix(tuple(prompt), cache, taps, clock(target.device) - begun)


def decode(
    target: Target, drafter: Drafter, prefix: Prefix, *, max_new_tokens: int, sampling: Sampling | None = None
) -> Iterator[Round]:
    """Decode up to `max_new_tokens` tokens behind `prefix`, yielding every round as it is done.

    The output is the target's own, greedy or drawn with `sampling.seed`, whatever the drafter; it ends at the first
    end-of-sequence token, which is included.
    """
    if len(prefix.tokens) + max_new_tokens + MAX_BUDGET > prefix.cache.capacity:
        raise UserError(f"The prefix has no room for {max_new_tokens:,} new tokens. Call prefill with that number.")
    check_length(target, list(prefix.tokens), max_new_tokens)
    sampling = sampling or Sampling()
    device, cache, detokenizer = target.device, prefix.cache.fork(), Detokenizer(target.tokenizer)
    drafter.start(list(prefix.tokens), prefix.taps, max_new_tokens)
    left, index, ended = max_new_tokens, 0, False
    while left and not ended:
        begun = clock(device)
        tree = drafter.draft(room=left - 1)  # the bonus token takes the last place

        drafted = clock(device)
        if len(tree) == 1:
            depths = mask = None
        else:
            depths, mask = torch.tensor(tree.depths, device=device), tree.mask().to(device)
        tokens = torch.tensor([tree.tokens], device=device)
        ready = clock(device)
        out = target(tokens, cache, depths=depths, mask=mask)
        verified = clock(device)

        verdict = walk(tree, out.logits[0], sampling, position=cache.length)
        committed = [tree.tokens[n] for n in verdict.path] + [verdict.bonus]
        ended = not target.eos.isdisjoint(committed)
        if ended:
            committed = committed[: next(i for i, token in enumerate(committed) if token in target.eos) + 1]
        # The root and the accepted nodes have been through the target, except a token that nothing follows.
        rows = [0, *verdict.path][: len(committed)]
        cache.keep(rows)
        drafter.commit(committed, out.taps[0, rows])
        left -= len(committed)
        done = clock(device)

        text = [detokenizer.push(token) for token in committed]
        if ended or not left:
            text[-1] += detokenizer.flush()
        yield Round(
            index=index,
            tokens=tree.tokens,
            parents=tree.parents,
            logprobs=tree.logprobs,
            node_text=tuple(detokenizer.one(token) for token in tree.tokens),
            passes=tree.passes,
            accepted=verdict.path[: len(committed)],
            bonus=verdict.bonus,
            bonus_text=detokenizer.one(verdict.bonus),
            committed=tuple(committed),
            text=tuple(text),
            draft_seconds=drafted - begun,
            verify_seconds=verified - ready,
            rest_seconds=(ready - drafted) + (done - verified),
        )
        index += 1
