"""The cascade: one pass a draft, the same numbers with a cache as without, and the Markov head's correction."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tiny
import torch
from torch import Tensor

from fasteagle_lite.decode import prefill
from fasteagle_lite.drafters.cascade import Cascade, CascadeDrafter
from fasteagle_lite.drafters.checkpoint import new_model
from fasteagle_lite.drafters.features import unit_taps
from fasteagle_lite.llama import Rows, attention_bias
from fasteagle_lite.target import Target
from fasteagle_lite.tree import DraftTree, TreeConfig

TOKENS = [3, 5, 7, 1, 0, 22, 4, 4, 9]


@torch.no_grad()
def full_logits(model: Cascade, target: Target, tokens: list[int]) -> Tensor:
    """(N, V) behind `tokens`, from one causal pass over everything, without a cache: as in training."""
    taps = unit_taps(prefill(target, tokens, 1).taps)[None]
    embeddings = target.embedding(torch.tensor([tokens[1:]]))
    count = len(tokens) - 1
    rows = Rows(target.rope(torch.arange(count)), attention_bias(None, count, count, embeddings))
    return model.head.logits(torch.stack([state[0, -1] for state in model(taps, embeddings, rows)]))


def drafted(model: Cascade, target: Target, config: TreeConfig, cuts: list[int]) -> DraftTree:
    """The tree behind TOKENS, which arrive in pieces that end at `cuts`; a draft after each piece."""
    drafter = CascadeDrafter(model, target, config)
    taps = prefill(target, TOKENS, 1).taps
    drafter.start(TOKENS[: cuts[0]], taps[: cuts[0] - 1], 20)
    tree = drafter.draft(room=9)
    for begin, end in pairwise(cuts):
        drafter.commit(TOKENS[begin:end], taps[begin - 1 : end - 1])
        tree = drafter.draft(room=9)
    return tree


@pytest.mark.parametrize("cuts", [[9], [4, 9], [2, 3, 4, 9], [1, 2, 5, 8, 9]], ids=str)
def test_drafts_from_a_growing_cache_are_those_of_a_full_pass(cuts: list[int], target: Target) -> None:
    model = tiny.drafter_model("cascade", target)
    logits, vocabulary = full_logits(model, target, TOKENS), model.head.vocabulary
    tree = drafted(model, target, TreeConfig("chain", 9, 4, 9), cuts)
    assert len(tree) == 1 + 3  # as deep as it has layers
    assert tree.passes == 1
    for node in range(1, 4):
        row = logits[node - 1]
        if node > 1:
            row = row + model.markov((vocabulary == tree.tokens[node - 1]).nonzero()[0])[0]
        wanted = torch.log_softmax(row, -1)
        assert tree.tokens[node] == vocabulary[wanted.argmax()]
        assert tree.logprobs[node] == pytest.approx(float(wanted.max()), abs=1e-4)


def test_every_node_of_a_tree_has_its_own_correction(target: Target) -> None:
    model = tiny.drafter_model("cascade", target)
    logits, vocabulary = full_logits(model, target, TOKENS), model.head.vocabulary.tolist()
    tree = drafted(model, target, TreeConfig("best_first", 25, 4, 9), [9])
    assert max(tree.depths) > 1
    for node in range(1, len(tree)):
        row, parent = logits[tree.depths[node] - 1], tree.parents[node]
        if parent:
            row = row + model.markov(torch.tensor([vocabulary.index(tree.tokens[parent])]))[0]
        logprob = torch.log_softmax(row, -1)[vocabulary.index(tree.tokens[node])]
        assert tree.logprobs[node] == pytest.approx(float(logprob), abs=1e-4)


def test_without_a_markov_head_depths_are_marginals(target: Target) -> None:
    torch.manual_seed(0)
    model = new_model("cascade", target, torch.arange(1, 23, 2), ffn=16, markov_rank=0, layers=3)
    tree = drafted(model.requires_grad_(False), target, TreeConfig("best_first", 30, 4, 9), [9])
    seen: dict[tuple[int, int], set[float]] = {}
    for node in range(1, len(tree)):
        seen.setdefault((tree.depths[node], tree.tokens[node]), set()).add(tree.logprobs[node])
    assert all(len(logprobs) == 1 for logprobs in seen.values())


def test_only_the_draft_vocabulary_is_drafted(target: Target, models: dict[str, Cascade]) -> None:
    tree = drafted(models["cascade"], target, TreeConfig("best_first", 40, 11, 3), [9])
    assert all(token % 2 == 1 for token in tree.tokens[1:])
