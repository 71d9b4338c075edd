"""The dynamic tree against EAGLE-2's own algorithm, without the pruning of what cannot survive."""

from __future__ import annotations

import pytest
import tiny
import torch

from fasteagle_lite.decode import Prefix, prefill
from fasteagle_lite.drafters.autoregressive import Autoregressive, AutoregressiveDrafter
from fasteagle_lite.drafters.features import unit_taps
from fasteagle_lite.llama import Rows, attention_bias
from fasteagle_lite.target import Target
from fasteagle_lite.tree import TreeConfig


@torch.no_grad()
def next_logprobs(model: Autoregressive, target: Target, prefix: Prefix, path: list[int]) -> torch.Tensor:
    """The drafter's distribution behind the committed tokens and `path`, from scratch and without any cache.

    The committed rows are run on true features; then, one pass a draft token, on the state of the row before.
    """
    hidden = model.fusion(unit_taps(prefix.taps))[None]
    tokens = [*prefix.tokens[1:], *path]
    committed = len(prefix.tokens) - 1
    for count in range(committed, len(tokens) + 1):
        embeddings = target.embedding(torch.tensor([tokens[:count]]))
        rows = Rows(target.rope(torch.arange(count)), attention_bias(None, count, count, embeddings))
        states = model(hidden, embeddings, rows)
        hidden = torch.cat([hidden, states[:, -1:]], 1)
    return torch.log_softmax(model.logits(states[0, -1]), -1)


def eagle_2(
    model: Autoregressive, target: Target, prefix: Prefix, budget: int, top_k: int, depth: int
) -> dict[tuple[int, ...], float]:
    """Expand the best `top_k` nodes of every depth by `top_k` children each; keep the best budget - 1 of everything."""
    vocabulary = model.head.vocabulary
    every: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(depth):
        fresh = []
        for path, above in frontier:
            top = next_logprobs(model, target, prefix, list(path)).topk(top_k)
            for i, logprob in zip(top.indices, top.values, strict=True):
                fresh.append(((*path, int(vocabulary[i])), above + float(logprob)))
        every |= dict(fresh)
        frontier = sorted(fresh, key=lambda item: -item[1])[:top_k]
    return dict(sorted(every.items(), key=lambda item: -item[1])[: budget - 1])


@pytest.mark.parametrize(("budget", "top_k", "depth"), [(3, 3, 3), (6, 2, 4), (9, 3, 4), (14, 4, 3), (40, 3, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_the_dynamic_tree_is_eagle_2s(seed: int, budget: int, top_k: int, depth: int, target: Target) -> None:
    model = tiny.drafter_model("autoregressive", target, seed=10 + seed)
    generator = torch.Generator().manual_seed(seed)
    prefix = prefill(target, torch.randint(0, tiny.VOCAB, (6,), generator=generator).tolist(), 10)
    wanted = eagle_2(model, target, prefix, budget, top_k, depth)
    drafter = AutoregressiveDrafter(model, target, TreeConfig("dynamic", budget, top_k, depth))
    drafter.start(list(prefix.tokens), prefix.taps, 10)
    tree = drafter.draft(room=9)

    paths, sums = [()], [0.0]
    for token, parent, logprob in zip(tree.tokens[1:], tree.parents[1:], tree.logprobs[1:], strict=True):
        paths.append((*paths[parent], token))
        sums.append(sums[parent] + logprob)
    assert set(paths[1:]) == set(wanted)
    assert dict(zip(paths[1:], sums[1:], strict=True)) == pytest.approx(wanted, abs=1e-4)
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert tree.passes <= depth


def test_a_chain_is_the_best_token_after_the_best_token(target: Target) -> None:
    model = tiny.drafter_model("autoregressive", target)
    prefix = prefill(target, [3, 5, 7, 1], 10)
    drafter = AutoregressiveDrafter(model, target, TreeConfig("chain", 5, 4, 8))
    drafter.start(list(prefix.tokens), prefix.taps, 10)
    path: list[int] = []
    for _ in range(4):
        best = next_logprobs(model, target, prefix, path).argmax()
        path.append(int(model.head.vocabulary[best]))
    tree = drafter.draft(room=9)
    assert tree.tokens == (1, *path)
    assert tree.passes == 4


def test_speculative_rows_are_forgotten(target: Target, models: dict[str, Autoregressive]) -> None:
    prefix = prefill(target, [3, 5, 7, 1], 10)
    drafter = AutoregressiveDrafter(models["autoregressive"], target, TreeConfig("dynamic", 9, 3, 4))
    drafter.start(list(prefix.tokens), prefix.taps, 10)
    assert drafter.draft(room=9).passes > 1
    assert drafter.cache.length == 3
