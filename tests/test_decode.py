"""The round loop: every drafter, tree and budget gives the target's own output, and leaves true caches behind.

The checkers at the top are used twice: on the code, and on mutants of it, which they must catch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from fasteagle_lite import verify
from fasteagle_lite.decode import decode, prefill
from fasteagle_lite.drafters.base import Drafter, NoDrafter
from fasteagle_lite.drafters.checkpoint import Model
from fasteagle_lite.errors import UserError
from fasteagle_lite.llama import KVCache
from fasteagle_lite.race import race
from fasteagle_lite.sampling import Sampling, draw
from fasteagle_lite.target import Output, Target
from fasteagle_lite.trace import Round, mean_accepted_length
from fasteagle_lite.tree import DraftTree, TreeConfig
from fasteagle_lite.verify import Verdict, walk

decode_module = importlib.import_module("fasteagle_lite.decode")  # the package's `decode` is the function
PROMPT, COUNT = [3, 5, 7, 1], 40
GREEDY = Sampling()
SETTINGS = [GREEDY, Sampling(1.0, seed=3), Sampling(0.7, top_p=0.9, top_k=9, seed=4)]
BUDGETS = (1, 2, 5, 9, 30)


def tokens_of(rounds: list[Round]) -> list[int]:
    return [token for r in rounds for token in r.committed]


def run(
    target: Target, drafter: Drafter, sampling: Sampling = GREEDY, prompt: list[int] = PROMPT, count: int = COUNT
) -> list[Round]:
    return list(decode(target, drafter, prefill(target, prompt, count), max_new_tokens=count, sampling=sampling))


# ---- checkers ---------------------------------------------------------------------------------------------------------


def gives_the_reference(model: Any, target: Target, sampling: Sampling) -> bool:
    """Whether plain decoding and half-right branching trees give transformers' output (greedy, or drawn by position)."""
    wanted = tiny.reference(model, PROMPT, COUNT, sampling)
    drafters = [NoDrafter(), *(tiny.adversary(kind, PROMPT, wanted, tiny.VOCAB) for kind in tiny.ADVERSARIES)]
    return all(tokens_of(run(target, drafter, sampling)) == wanted for drafter in drafters)


def greedy_is_identical(model: Any, target: Target) -> bool:
    return gives_the_reference(model, target, GREEDY)


def sampled_is_identical(model: Any, target: Target) -> bool:
    return gives_the_reference(model, target, Sampling(1.0, seed=3))


def leaves_true_caches(model: Any, target: Target) -> bool:
    """Whether, after every commit, the target's cache and the features handed out equal a fresh run's."""
    truth = tiny.greedy_reference(model, PROMPT, COUNT)
    for kind in ("mixed", "buried oracle"):
        drafter = tiny.adversary(kind, PROMPT, truth, tiny.VOCAB)
        for cache, _ in caches_after_rounds(target, drafter):
            fresh = prefill(target, drafter.tokens, 1)
            if cache.length != fresh.cache.length or len(drafter.taps) != cache.length:
                return False
            size = cache.length
            if not torch.allclose(cache.data[..., :size, :], fresh.cache.data[..., :size, :], atol=1e-4):
                return False
            if not torch.allclose(drafter.taps, fresh.taps, atol=1e-4):
                return False
    return True


def stops_at_the_end_token(model: Any, target: Target) -> bool:
    """Whether output ends with the first end-of-sequence token, wherever in a round that is."""
    truth = tiny.greedy_reference(model, PROMPT, COUNT)
    with pytest.MonkeyPatch.context() as patch:
        for eos in sorted(set(truth)):
            end = truth.index(eos) + 1
            patch.setattr(target, "eos", type(target.eos)([eos]))
            for kind in tiny.ADVERSARIES:
                rounds = run(target, tiny.adversary(kind, PROMPT, truth, tiny.VOCAB))
                if tokens_of(rounds) != truth[:end]:
                    return False
    return True


def caches_after_rounds(target: Target, drafter: Drafter, **options: Any) -> Iterator[tuple[KVCache, Round]]:
    """The lane's own cache, round by round."""
    kept: list[KVCache] = []
    original = KVCache.keep

    def keep(cache: KVCache, rows: list[int]) -> None:
        kept.append(cache)
        original(cache, rows)

    prefix = prefill(target, PROMPT, COUNT)
    lane = decode(target, drafter, prefix, max_new_tokens=COUNT, **options)
    while True:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KVCache, "keep", keep)
            step = next(lane, None)
        if step is None:
            return
        yield kept[-1], step


CHECKERS = [greedy_is_identical, sampled_is_identical, leaves_true_caches, stops_at_the_end_token]


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_loop_is_right(checker: Callable[[Any, Target], bool], model: Any, target: Target) -> None:
    assert checker(model, target)


# ---- mutants: each must be caught by the checker named beside it -------------------------------------------------------


def trust_the_first_child(patch: pytest.MonkeyPatch, target: Target) -> None:
    patch.setattr(decode_module, "walk", tiny.first_child_accepted)


def take_the_bonus_from_the_root(patch: pytest.MonkeyPatch, target: Target) -> None:
    patch.setattr(decode_module, "walk", tiny.bonus_from_the_root)


def take_the_bonus_from_the_last_node(patch: pytest.MonkeyPatch, target: Target) -> None:
    def mutant(tree: DraftTree, logits: Tensor, sampling: Sampling, position: int) -> Verdict:
        path = walk(tree, logits, sampling, position).path
        return Verdict(path, draw(logits[-1], sampling, position + len(path) + 1))

    patch.setattr(decode_module, "walk", mutant)


def draw_one_position_early(patch: pytest.MonkeyPatch, target: Target) -> None:
    patch.setattr(verify, "draw", lambda logits, sampling, position: draw(logits, sampling, position - 1))


def draw_at_one_position(patch: pytest.MonkeyPatch, target: Target) -> None:
    patch.setattr(verify, "draw", lambda logits, sampling, position: draw(logits, sampling, 5))


def draw_a_round_at_one_position(patch: pytest.MonkeyPatch, target: Target) -> None:
    def mutant(tree: DraftTree, logits: Tensor, sampling: Sampling, position: int) -> Verdict:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(verify, "draw", lambda logits, sampling, _: draw(logits, sampling, position + 1))
            return walk(tree, logits, sampling, position)

    patch.setattr(decode_module, "walk", mutant)


def forget_to_compact(patch: pytest.MonkeyPatch, target: Target) -> None:
    def mutant(cache: KVCache, rows: list[int]) -> None:
        cache.length += len(rows)

    patch.setattr(KVCache, "keep", mutant)


def keep_one_row_too_few(patch: pytest.MonkeyPatch, target: Target) -> None:
    original = KVCache.keep
    patch.setattr(KVCache, "keep", lambda cache, rows: original(cache, rows[:-1] if len(rows) > 1 else rows))


def let_siblings_see_each_other(patch: pytest.MonkeyPatch, target: Target) -> None:
    patch.setattr(DraftTree, "mask", lambda tree: torch.ones(len(tree), len(tree)).tril().bool())


def number_nodes_instead_of_depths(patch: pytest.MonkeyPatch, target: Target) -> None:
    patch.setattr(DraftTree, "depths", property(lambda tree: tuple(range(len(tree)))))


def ignore_the_end_token(patch: pytest.MonkeyPatch, target: Target) -> None:
    class Deaf(frozenset):  # type: ignore[type-arg]
        def isdisjoint(self, other: object) -> bool:
            return True

    patch.setattr(target, "eos", Deaf())


def hand_out_wrong_features(patch: pytest.MonkeyPatch, target: Target) -> None:
    original = Target.forward

    def mutant(self: Target, tokens: Tensor, cache: KVCache, **options: Any) -> Output:
        out = original(self, tokens, cache, **options)
        taps = out.taps.roll(1, dims=1) if options.get("mask") is not None else out.taps
        return Output(out.logits, taps, out.hidden)

    patch.setattr(Target, "forward", mutant)


MUTANTS = [
    (trust_the_first_child, greedy_is_identical),
    (trust_the_first_child, sampled_is_identical),
    (take_the_bonus_from_the_root, greedy_is_identical),
    (take_the_bonus_from_the_last_node, greedy_is_identical),
    (draw_one_position_early, sampled_is_identical),
    (draw_at_one_position, sampled_is_identical),
    (draw_a_round_at_one_position, sampled_is_identical),
    (forget_to_compact, greedy_is_identical),
    (forget_to_compact, leaves_true_caches),
    (keep_one_row_too_few, leaves_true_caches),
    (let_siblings_see_each_other, greedy_is_identical),
    (number_nodes_instead_of_depths, greedy_is_identical),
    (ignore_the_end_token, stops_at_the_end_token),
    (hand_out_wrong_features, leaves_true_caches),
]


@pytest.mark.parametrize(("mutant", "checker"), MUTANTS, ids=lambda f: f.__name__)
def test_mutants_are_caught(
    mutant: Callable[[pytest.MonkeyPatch, Target], None],
    checker: Callable[[Any, Target], bool],
    model: Any,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch, target)
    assert not checker(model, target)


# ---- every drafter, tree and budget -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda s: f"T{s.temperature}")
def wanted(request: pytest.FixtureRequest, model: Any) -> tuple[Sampling, list[int]]:
    """A way to sample, and what transformers' logits give with it."""
    return request.param, tiny.reference(model, PROMPT, COUNT, request.param)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("name", "kind"), tiny.TREES)
def test_output_is_the_targets_own(
    name: str, kind: str, budget: int, wanted: tuple[Sampling, list[int]], target: Target, models: dict[str, Model]
) -> None:
    sampling, tokens = wanted
    rounds = run(target, tiny.drafter(name, models, target, TreeConfig(kind, budget, 4, 5)), sampling)
    assert tokens_of(rounds) == tokens
    assert all(len(r.tokens) <= budget for r in rounds)
    assert [r.index for r in rounds] == list(range(len(rounds)))
    if name == "cascade":
        assert all(r.passes == (len(r.tokens) > 1) for r in rounds)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", tiny.ADVERSARIES)
def test_output_is_the_targets_own_whatever_is_drafted(
    kind: str, seed: int, wanted: tuple[Sampling, list[int]], target: Target
) -> None:
    sampling, tokens = wanted
    rounds = run(target, tiny.adversary(kind, PROMPT, tokens, tiny.VOCAB, seed), sampling)
    assert tokens_of(rounds) == tokens
    if kind in ("oracle", "buried oracle"):
        assert [len(r.committed) for r in rounds] == [6] * 6 + [4]
        assert mean_accepted_length(rounds) == pytest.approx(40 / 7)
    if kind == "wrong":
        assert len(rounds) == COUNT


@pytest.mark.parametrize(("name", "kind"), tiny.TREES)
def test_a_prompt_of_one_token(name: str, kind: str, model: Any, target: Target, models: dict[str, Model]) -> None:
    drafter = tiny.drafter(name, models, target, TreeConfig(kind, 9, 4, 5))
    assert tokens_of(run(target, drafter, prompt=[6], count=20)) == tiny.greedy_reference(model, [6], 20)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("name", "kind"), tiny.TREES)
def test_short_outputs(name: str, kind: str, count: int, model: Any, target: Target, models: dict[str, Model]) -> None:
    rounds = run(target, tiny.drafter(name, models, target, TreeConfig(kind, 9, 4, 5)), count=count)
    assert tokens_of(rounds) == tiny.greedy_reference(model, PROMPT, count)
    assert all(max(len(path) for path in [r.accepted]) < count for r in rounds)
    if count == 1:
        assert len(rounds[0].tokens) == 1  # nothing is drafted for a place the bonus takes


def test_the_output_may_fill_the_context(model: Any, target: Target, models: dict[str, Model]) -> None:
    prompt = torch.randint(0, tiny.VOCAB, (target.context - 20,), generator=torch.Generator().manual_seed(0)).tolist()
    wanted = tiny.greedy_reference(model, prompt, 20)
    for name, kind in tiny.TREES:
        drafter = tiny.drafter(name, models, target, TreeConfig(kind, 30, 4, 5))
        assert tokens_of(run(target, drafter, prompt=prompt, count=20)) == wanted


# ---- the end of the output --------------------------------------------------------------------------------------------


def test_an_end_token_within_an_accepted_path(model: Any, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = tiny.greedy_reference(model, PROMPT, COUNT)
    eos = next(t for i, t in enumerate(truth) if truth.index(t) == i and i % 6 in (1, 2, 3) and i > 6)
    end = truth.index(eos) + 1
    monkeypatch.setattr(target, "eos", frozenset([eos]))
    rounds = run(target, tiny.adversary("oracle", PROMPT, truth, tiny.VOCAB))
    last = rounds[-1]
    assert tokens_of(rounds) == truth[:end] == tiny.greedy_reference(model, PROMPT, COUNT, eos)
    assert last.committed[-1] == eos
    assert set(last.origins) == {"draft"}
    assert len(last.accepted) == len(last.committed) == end % 6
    assert mean_accepted_length(rounds) == pytest.approx(end / len(rounds))


def test_an_end_token_as_the_bonus(model: Any, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = tiny.greedy_reference(model, PROMPT, COUNT)
    at = next(i for i, t in enumerate(truth) if truth.index(t) == i and i > 2)
    monkeypatch.setattr(target, "eos", frozenset([truth[at]]))

    def up_to_the_end(tokens: list[int], room: int) -> DraftTree:
        done = len(tokens) - len(PROMPT)
        return tiny.chain([tokens[-1], *truth[done : min(at, done + room)]])

    rounds = run(target, tiny.Scripted(up_to_the_end))
    assert len(rounds) == 1
    assert tokens_of(rounds) == truth[: at + 1]
    assert rounds[0].bonus == truth[at]
    assert rounds[0].origins == ("draft",) * at + ("bonus",)


def test_drafted_end_tokens_that_are_refused_end_nothing(
    model: Any, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = tiny.greedy_reference(model, PROMPT, COUNT)
    never = next(t for t in range(tiny.VOCAB) if t not in truth)
    monkeypatch.setattr(target, "eos", frozenset([never]))
    drafter = tiny.Scripted(lambda tokens, room: tiny.chain([tokens[-1], *[never] * min(room, 3)]))
    assert tokens_of(run(target, drafter)) == truth


def test_every_committed_token_is_counted_and_shown_once(target: Target, models: dict[str, Model]) -> None:
    drafter = tiny.drafter("lookup", models, target, TreeConfig("chain", 9))
    rounds = run(target, drafter)
    assert sum(len(r.committed) for r in rounds) == COUNT
    for r in rounds:
        assert len(r.text) == len(r.origins) == len(r.committed)
        assert [r.tokens[n] for n in r.accepted] == list(r.committed[: len(r.accepted)])
        assert len(r.node_text) == len(r.tokens)
        assert min(r.draft_seconds, r.verify_seconds, r.rest_seconds) >= 0


# ---- caches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SETTINGS, ids=lambda s: f"T{s.temperature}")
@pytest.mark.parametrize(("name", "kind"), tiny.TREES)
def test_the_targets_cache_is_a_fresh_prefill(
    name: str, kind: str, sampling: Sampling, target: Target, models: dict[str, Model]
) -> None:
    drafter, tokens = tiny.drafter(name, models, target, TreeConfig(kind, 9, 4, 5)), list(PROMPT)
    for cache, step in caches_after_rounds(target, drafter, sampling=sampling):
        tokens += step.committed
        fresh, size = prefill(target, tokens, 1).cache, len(tokens) - 1
        assert cache.length == fresh.length == size
        assert torch.allclose(cache.data[..., :size, :], fresh.data[..., :size, :], atol=1e-4)


@pytest.mark.parametrize("partner", ["itself", "mixed"])
@pytest.mark.parametrize(("name", "kind"), [tree for tree in tiny.TREES if tree[0] != "lookup"])
def test_the_drafters_cache_is_a_freshly_started_ones(
    name: str, kind: str, partner: str, model: Any, target: Target, models: dict[str, Model]
) -> None:
    """At every draft; also where another drafter's trees are accepted, so that commits are long ones."""
    config = TreeConfig(kind, 9, 4, 5)
    truth = tiny.greedy_reference(model, PROMPT, COUNT)
    drafter = tiny.drafter(name, models, target, config)
    other = tiny.adversary("mixed", PROMPT, truth, tiny.VOCAB)
    compared = []

    class Both(Drafter):
        name = "both"

        def start(self, tokens: list[int], taps: Tensor, capacity: int) -> None:
            other.start(tokens, taps, capacity)
            drafter.start(tokens, taps, capacity)

        def draft(self, room: int) -> DraftTree:
            tree = drafter.draft(room)
            fresh, prefix = tiny.drafter(name, models, target, config), prefill(target, other.tokens, 1)
            fresh.start(other.tokens, prefix.taps, COUNT)
            again = fresh.draft(room)
            size = drafter.cache.length
            if room:
                assert size == fresh.cache.length == len(other.tokens) - 1
                assert torch.allclose(drafter.cache.data[..., :size, :], fresh.cache.data[..., :size, :], atol=1e-4)
            assert (tree.tokens, tree.parents) == (again.tokens, again.parents)
            compared.append(size)
            return tree if partner == "itself" else other.draft(room)

        def commit(self, tokens: list[int], taps: Tensor) -> None:
            other.commit(tokens, taps)
            drafter.commit(tokens, taps)

    rounds = run(target, Both())
    assert tokens_of(rounds) == truth
    assert len(compared) == len(rounds) > 5


def test_a_prefix_is_left_as_it_was(target: Target, models: dict[str, Model]) -> None:
    prefix = prefill(target, PROMPT, COUNT)
    before, taps = prefix.cache.data.clone(), prefix.taps.clone()
    for name, kind in tiny.TREES:
        drafter = tiny.drafter(name, models, target, TreeConfig(kind, 9, 4, 5))
        for _ in decode(target, drafter, prefix, max_new_tokens=COUNT):
            pass
        assert prefix.cache.length == len(PROMPT) - 1
        assert torch.equal(prefix.cache.data, before)
        assert torch.equal(prefix.taps, taps)


@pytest.mark.parametrize("sampling", SETTINGS[:2], ids=lambda s: f"T{s.temperature}")
def test_lanes_of_a_race_do_not_touch_each_other(sampling: Sampling, target: Target, models: dict[str, Model]) -> None:
    prefix = prefill(target, PROMPT, COUNT)

    def lane(name: str, kind: str) -> Iterator[Round]:
        drafter = tiny.drafter(name, models, target, TreeConfig(kind, 9, 4, 5))
        return decode(target, drafter, prefix, max_new_tokens=COUNT, sampling=sampling)

    alone = {f"{name}:{kind}": list(lane(name, kind)) for name, kind in tiny.TREES}
    raced: dict[str, list[Round]] = {name: [] for name in alone}
    for name, step in race({f"{name}:{kind}": lane(name, kind) for name, kind in tiny.TREES}):
        raced[name].append(step)
    for name, rounds in alone.items():
        assert [(r.tokens, r.parents, r.committed) for r in raced[name]] == [
            (r.tokens, r.parents, r.committed) for r in rounds
        ]


# ---- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "count", "sentence"),
    [
        ([], 5, "prompt is empty"),
        ([1], 0, "max-new-tokens is 0"),
        ([1], -4, "max-new-tokens is -4"),
        ([1] * 160, 1, "160 tokens.*context is 160"),
        ([1] * 150, 11, "at most 10"),
        ([1], 10**9, "at most 159"),
    ],
)
def test_lengths_that_do_not_fit_are_explained(prompt: list[int], count: int, sentence: str, target: Target) -> None:
    with pytest.raises(UserError, match=sentence):
        prefill(target, prompt, count)


@pytest.mark.parametrize("count", [0, -4])
def test_a_lane_without_a_length_is_explained(count: int, target: Target) -> None:
    with pytest.raises(UserError, match=f"max-new-tokens is {count}"):
        list(decode(target, NoDrafter(), prefill(target, PROMPT, 5), max_new_tokens=count))


def test_a_lane_longer_than_its_prefix_allows_is_explained(target: Target) -> None:
    prefix = prefill(target, PROMPT, 5)
    with pytest.raises(UserError, match="room for 200"):
        list(decode(target, NoDrafter(), prefix, max_new_tokens=200))
