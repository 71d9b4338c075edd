"""Training: losses against plain references, data against hand-made examples, and runs that learn, stop and go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from torch.nn import functional as F

from fasteagle_lite.decode import decode, prefill
from fasteagle_lite.drafters.autoregressive import Autoregressive
from fasteagle_lite.drafters.cascade import Cascade
from fasteagle_lite.drafters.checkpoint import load_checkpoint
from fasteagle_lite.drafters.features import unit_taps
from fasteagle_lite.errors import UserError
from fasteagle_lite.llama import KVCache, Rows, attention_bias
from fasteagle_lite.target import Target
from fasteagle_lite.trace import mean_accepted_length
from fasteagle_lite.training import losses
from fasteagle_lite.training.batches import Batches
from fasteagle_lite.training.data import Corpus, Features, length_batches
from fasteagle_lite.training.generate import LONGEST_ANSWER, LONGEST_QUESTION, Generator, generate_corpus, save_corpus
from fasteagle_lite.training.losses import Batch, Vocabulary, agreement, soft_cross_entropy, unrolled_states
from fasteagle_lite.training.trainer import TrainConfig, Trainer
from fasteagle_lite.tree import TreeConfig

KINDS = ("cascade", "autoregressive")

# ---- losses -----------------------------------------------------------------------------------------------------------

WHOLE = Vocabulary(None, None, None)


def teacher(rows: int, size: int, k: int) -> tuple[Tensor, Tensor]:
    """Random teacher ids (different ones in a row) and probabilities that leave some mass out."""
    ids = torch.stack([torch.randperm(size)[:k] for _ in range(rows)])
    return ids, torch.rand(rows, k) * 0.9 / k


def test_soft_cross_entropy_is_its_definition() -> None:
    torch.manual_seed(0)
    logits, (ids, probs) = torch.randn(7, 30), teacher(7, 30, 4)
    dense = torch.zeros(7, 30).scatter(1, ids, probs)
    wanted = -(dense * torch.log_softmax(logits, -1)).sum(-1).mean()
    assert soft_cross_entropy(logits, ids, probs, WHOLE) == pytest.approx(float(wanted), abs=1e-5)


def batch_of(ids: Tensor, probs: Tensor) -> Batch:
    """A batch of which only the teacher matters."""
    none = torch.zeros(1)
    return Batch(none, none, none, none, none, ids[None], probs[None], none)


def test_a_sampled_vocabulary_holds_every_teacher_token() -> None:
    torch.manual_seed(0)
    ids, probs = teacher(5, 200, 4)
    vocabulary = Vocabulary.sample(batch_of(ids, probs), 200, 30)
    among = vocabulary.among.tolist()
    assert set(ids.flatten().tolist()) <= set(among)
    assert len(among) == len(set(among)) == len(set(ids.flatten().tolist())) + 30
    assert vocabulary.among[vocabulary.place[ids]].equal(ids)


def test_a_sampled_denominator_is_right_on_average() -> None:
    torch.manual_seed(0)
    size, logits = 200, torch.randn(5, 200)
    ids, probs = teacher(5, size, 4)
    sums = []
    for _ in range(3000):
        vocabulary = Vocabulary.sample(batch_of(ids, probs), size, 30)
        sums.append((logits[:, vocabulary.among] + vocabulary.log_weight).exp().sum(-1))
    estimate, exact = torch.stack(sums), logits.exp().sum(-1)
    error = estimate.std(0) / len(sums) ** 0.5
    assert ((estimate.mean(0) - exact).abs() < 4 * error).all()
    assert (estimate.std(0) > 0).all()


def test_a_sampled_loss_uses_that_denominator() -> None:
    torch.manual_seed(0)
    logits, (ids, probs) = torch.randn(5, 200), teacher(5, 200, 4)
    vocabulary = Vocabulary.sample(batch_of(ids, probs), 200, 30)
    normaliser = (logits[:, vocabulary.among] + vocabulary.log_weight).exp().sum(-1).log()
    wanted = -(probs * (logits.gather(1, ids) - normaliser[:, None])).sum(-1).mean()
    got = soft_cross_entropy(logits[:, vocabulary.among], ids, probs, vocabulary)
    assert got == pytest.approx(float(wanted), abs=1e-5)


@pytest.mark.parametrize("negatives", [0, 500])
def test_the_whole_vocabulary_is_used_where_sampling_saves_nothing(negatives: int) -> None:
    assert Vocabulary.sample(batch_of(*teacher(5, 200, 4)), 200, negatives) == WHOLE


# ---- corpora ----------------------------------------------------------------------------------------------------------


def corpus_file(folder: Path, sequences: list[tuple[int, list[int]]], name: str = "corpus.npz") -> Path:
    save_corpus(folder / name, sequences)
    return folder / name


def test_a_corpus_of_several_files(tmp_path: Path) -> None:
    corpus_file(tmp_path, [(2, [1, 2, 3, 4]), (1, [5, 6])], "a.npz")
    corpus_file(tmp_path, [(1, [7, 3, 3])], "b.npz")
    corpus = Corpus.load([tmp_path], 23)
    assert [corpus.sequence(i).tolist() for i in range(len(corpus))] == [[1, 2, 3, 4], [5, 6], [7, 3, 3]]
    assert corpus.starts.tolist() == [2, 1, 1]
    assert corpus.response_tokens == 2 + 1 + 2
    assert corpus.frequent_tokens(1).tolist() == [3]
    assert corpus.frequent_tokens(99).tolist() == [3, 4, 6]
    assert corpus.sha256 != Corpus.load([tmp_path / "a.npz"], 23).sha256


def arrays(**changes: Any) -> dict[str, Any]:
    return {"tokens": np.array([1, 2, 3]), "length": np.array([3]), "start": np.array([1])} | changes


def write(file: Path, content: Any) -> Path:
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif isinstance(content, np.ndarray):
        with file.open("wb") as stream:
            np.save(stream, content)
    else:
        np.savez(file, **content)
    return file


def truncated(folder: Path) -> bytes:
    return corpus_file(folder, [(1, list(range(20)))], "whole.npz").read_bytes()[:-40]


BAD_CORPORA: dict[str, Any] = {
    "text": b"not numbers",
    "empty file": b"",
    "truncated": truncated,
    "a single array": np.array([1, 2, 3]),
    "no start": {"tokens": np.array([1]), "length": np.array([1])},
    "words": arrays(tokens=np.array(["a", "b", "c"])),
    "lengths do not add up": arrays(length=np.array([2])),
    "start behind the end": arrays(start=np.array([3])),
    "start at the first token": arrays(start=np.array([0])),
    "more starts": arrays(start=np.array([1, 1])),
    "token beyond the vocabulary": arrays(tokens=np.array([1, 23, 3])),
    "negative token": arrays(tokens=np.array([1, -2, 3])),
    "no sequences": {name: np.array([], dtype=np.int64) for name in ("tokens", "length", "start")},
}


@pytest.mark.parametrize("content", BAD_CORPORA.values(), ids=BAD_CORPORA.keys())
def test_bad_corpora_are_explained(content: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "bad.npz", content(tmp_path) if callable(content) else content)
    with pytest.raises(UserError, match=r"bad\.npz"):
        Corpus.load([file], 23)


def test_missing_corpora_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.npz"):
        Corpus.load([tmp_path / "missing.npz"], 23)
    with pytest.raises(UserError, match=r"expected \.npz files"):
        Corpus.load([tmp_path], 23)


def test_an_unwritable_corpus_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="could not be written"):
        save_corpus(tmp_path / "file" / "corpus.npz", [(1, [1, 2])])


def test_batches_of_similar_length_stay_within_the_budget() -> None:
    lengths = np.array([9, 3, 50, 4, 3, 7])
    batches = list(length_batches(np.arange(6), lengths, 12))
    assert sorted(i for batch in batches for i in batch) == list(range(6))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[batch]) * len(batch) <= 12


# ---- features and batches ---------------------------------------------------------------------------------------------

SEQUENCES = [(3, [1, 2, 3, 4, 5, 6]), (2, [7, 8, 9, 10])]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return Corpus.load([corpus_file(tmp_path, SEQUENCES)], tiny.VOCAB)


def test_features_are_the_targets(corpus: Corpus, target: Target) -> None:
    features = Features(corpus, target)
    for i in range(len(corpus)):
        tokens = torch.from_numpy(corpus.sequence(i))[None]
        out, view = target(tokens, target.new_cache(9)), features.sequence(i)
        assert torch.allclose(torch.from_numpy(view["taps"]).float(), unit_taps(out.taps)[0], atol=4e-3)
        assert torch.allclose(torch.from_numpy(view["hidden"]).float(), out.hidden[0], atol=4e-3)
        best = torch.log_softmax(out.logits[0], -1).topk(16)
        asked = int(corpus.starts[i]) - 1
        assert view["top_ids"][asked:].tolist() == best.indices[asked:].tolist()
        assert torch.allclose(torch.from_numpy(view["top_logprobs"]).float()[asked:], best.values[asked:], atol=2e-2)
        assert (view["top_logprobs"][:asked] == -np.inf).all()


def test_features_are_computed_once(corpus: Corpus, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Features(corpus, target).sequence(1)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(Target, "forward", refuse)
    again = Features(corpus, target).sequence(1)
    assert all(np.array_equal(first[name], again[name]) for name in Features.NAMES)


def test_sequences_beyond_the_context_are_explained(tmp_path: Path, target: Target) -> None:
    corpus = Corpus.load([corpus_file(tmp_path, [(1, [1] * (target.context + 1))])], tiny.VOCAB)
    with pytest.raises(UserError, match="context"):
        Features(corpus, target)


def test_interrupted_features_leave_nothing_behind(
    corpus: Corpus, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Target, "forward", fail)
        Features(corpus, target)
    assert list((tmp_path / "cache" / "features").iterdir()) == []


def test_a_batch_by_hand(corpus: Corpus, target: Target) -> None:
    vocabulary = torch.tensor([2, 4, 5, 9])
    batch = Batches(corpus, Features(corpus, target), target, vocabulary).of([0, 1])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]]
    assert batch.draft_tokens.tolist() == [[4, 0, 4, 1, 2, 4], [4, 4, 3, 4, 4, 4]]  # 4: outside the draft vocabulary
    # True where the NEXT token is one of the response: x_3 .. x_5 of the first, x_2 .. x_3 of the second sequence.
    assert batch.scored.tolist() == [
        [False, False, True, True, True, False],
        [False, True, True, False, False, False],
    ]
    assert batch.visits == 5
    with torch.no_grad():
        probs = torch.softmax(target(torch.tensor([[1, 2, 3, 4]]), target.new_cache(4)).logits[0, 3], -1)
    known = dict(zip(batch.teacher_ids[0, 3].tolist(), batch.teacher_probs[0, 3].tolist(), strict=True))
    for i, token in enumerate(vocabulary.tolist()):
        if known.get(i):
            assert known[i] == pytest.approx(float(probs[token]), rel=2e-2)
    assert 0 < batch.teacher_probs[0, 3].sum() <= float(probs[vocabulary].sum()) + 1e-3


def test_rows_that_count_by_hand(corpus: Corpus, target: Target) -> None:
    """Depth i of row j predicts x_{j+1+i}; both that and the row's own next draw x_{j+2} must be of the response."""
    batch = Batches(corpus, Features(corpus, target), target, torch.arange(tiny.VOCAB)).of([0, 1])
    for depth in (1, 2, 3, 4):
        (sequences, columns), (_, positions) = losses._asked(batch, depth)
        rows = batch.drafted[0][sequences, columns]
        assert (positions - rows == depth).all()
        assert list(zip(sequences.tolist(), rows.tolist(), strict=True)) == [
            (s, row)
            for s, (start, tokens) in enumerate(SEQUENCES)
            for row in range(5)
            if row + 2 >= start and row + 1 + depth < len(tokens)
        ]


def test_epochs_visit_every_training_sequence_once(tmp_path: Path, target: Target) -> None:
    rng = np.random.default_rng(0)
    sequences = [(1, rng.integers(0, tiny.VOCAB, rng.integers(3, 9)).tolist()) for _ in range(45)]
    corpus = Corpus.load([corpus_file(tmp_path, sequences)], tiny.VOCAB)
    batches = Batches(corpus, Features(corpus, target), target, torch.arange(tiny.VOCAB))
    assert batches.held_out == [0, 20, 40]
    epoch, seen = batches.epochs(4, rng), []
    while len(seen) < 42:
        seen += next(epoch)
    assert sorted(seen) == [i for i in range(45) if i not in (0, 20, 40)]


# ---- training-time test is decoding -----------------------------------------------------------------------------------


@torch.no_grad()
def test_training_time_test_is_decoding_step_by_step(corpus: Corpus, target: Target) -> None:
    """State s of a drafted row j: rows up to j run on true features, then s forced tokens run through the cache."""
    model = tiny.drafter_model("autoregressive", target)
    assert isinstance(model, Autoregressive)
    batch = Batches(corpus, Features(corpus, target), target, torch.arange(tiny.VOCAB)).of([0])
    steps, rows = 4, 5
    states = unrolled_states(model, batch, target.rope, steps)
    drafted = batch.drafted[0][0].tolist()
    assert drafted == [1, 2, 3]
    for column, row in enumerate(drafted):
        cache = KVCache(1, 1, model.config.spec, 12, target.embedding.weight)
        count = row + 1
        place = Rows(target.rope(torch.arange(count)), attention_bias(None, count, count, batch.taps), cache, 0)
        hidden = model(model.fusion(batch.taps[:, :count]), batch.embeddings[:, 1 : count + 1], place)[:, -1:]
        assert torch.allclose(hidden[:, 0], states[0][:, column], atol=1e-4)
        for step in range(1, min(steps, rows - row)):
            token = batch.embeddings[:, row + 1 + step : row + 2 + step]
            place = Rows(target.rope(torch.tensor([row + step])), None, cache, row + step)
            hidden = model(hidden, token, place)
            assert torch.allclose(hidden[:, 0], states[step][:, column], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_all_depths_are_plain_cross_entropies(kind: str, corpus: Corpus, target: Target) -> None:
    model = tiny.drafter_model(kind, target)
    batch = Batches(corpus, Features(corpus, target), target, model.head.vocabulary).of([0])
    if isinstance(model, Cascade):
        rows = Rows(target.rope(torch.arange(5)), attention_bias(None, 5, 5, batch.taps))
        states = model(batch.taps[:, :5], batch.embeddings[:, 1:], rows)
        _, parts = losses.cascade_loss(model, batch, target.rope, WHOLE)
    else:
        states = unrolled_states(model, batch, target.rope, 3)
        _, parts = losses.autoregressive_loss(model, batch, target.rope, WHOLE, 3)
    start, tokens = SEQUENCES[0]
    for depth in (1, 2, 3):
        terms = []
        for row in range(start - 2, len(tokens) - 1 - depth):
            if isinstance(model, Cascade):
                logits = model.head.logits(states[depth - 1][0, row])
                if depth > 1:
                    logits = logits + model.markov(batch.draft_tokens[0, row + depth])
            else:
                logits = model.logits(states[depth - 1][0, batch.drafted[0][0].tolist().index(row)])
            logprobs = torch.log_softmax(logits, -1)
            place = row + depth
            terms.append(-(batch.teacher_probs[0, place] * logprobs[batch.teacher_ids[0, place]]).sum())
        assert parts[depth - 1] == pytest.approx(float(torch.stack(terms).mean()), abs=1e-4)


# ---- runs -------------------------------------------------------------------------------------------------------------

SMALL = {
    "visits": 24_000,
    "sequences": 2,
    "learning_rate": 1e-2,
    "warmup_steps": 20,
    "negatives": 0,
    "vocabulary": tiny.VOCAB,
    "depths": 3,
    "ffn": 64,
    "markov_rank": 8,
    "bf16": False,
}
PROMPTS = ([3, 5, 7, 1], [6, 2, 9])


@pytest.fixture
def answers(tmp_path: Path, model: Any) -> Path:
    """Two answers of the tiny target; the first one stands there twice, because the first sequence is held out."""
    texts = [(len(p), p + tiny.greedy_reference(model, p, 40)) for p in (PROMPTS[0], *PROMPTS)]
    return corpus_file(tmp_path, texts)


def trainer(target: Target, file: Path, kind: str, **changes: Any) -> Trainer:
    config = TrainConfig(kind, **(SMALL | changes))
    return Trainer(config, target, Corpus.load([file], target.vocab), state_folder=file.parent / "state")


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_learns_two_answers_by_heart(
    kind: str, answers: Path, model: Any, target: Target, tmp_path: Path
) -> None:
    run = trainer(target, answers, kind)
    records = list(run.train(evaluations=4))
    assert records[-1]["visits"] == run.visits >= SMALL["visits"]
    batch = run.batches.of([1, 2])
    hits, counts = agreement(run.model, batch, target.rope, 3)
    assert (hits / counts > 0.95).all()
    # What cannot be learnt away is the teacher's own entropy.
    probs = batch.teacher_probs[batch.scored]
    entropy = float(-(probs * probs.clamp(min=1e-9).log()).sum(-1).mean())
    assert max(records[-1]["loss"]) < entropy + 0.15
    assert max(records[-1]["loss"]) < records[0]["loss"][0]

    run.export(tmp_path / "out", "a command")
    loaded = load_checkpoint(tmp_path / "out", target)
    config = TreeConfig("chain", 8, 4, 3)
    for prompt in PROMPTS:
        rounds = list(
            decode(
                target,
                tiny.drafter(kind, {kind: loaded}, target, config),
                prefill(target, prompt, 40),
                max_new_tokens=40,
            )
        )
        assert [t for r in rounds for t in r.committed] == tiny.greedy_reference(model, prompt, 40)
        assert mean_accepted_length(rounds) > 3  # of at most 4
    card = (tmp_path / "out" / "README.md").read_text()
    assert "a command" in card
    assert "| depth 3 |" in card


@pytest.mark.parametrize("changes", [{"negatives": 4}, {"bf16": True}, {"feature_weight": 0.5}], ids=str)
def test_options_train_too(changes: dict[str, Any], answers: Path, target: Target) -> None:
    run = trainer(target, answers, "cascade", visits=3000, **changes)
    records = list(run.train(evaluations=2))
    assert records[-1]["loss"][0] < records[0]["loss"][0]


def test_an_own_head_is_trained_and_a_frozen_one_is_not(answers: Path, target: Target) -> None:
    for own in (False, True):
        run = trainer(target, answers, "autoregressive", visits=300, own_head=own)
        before = run.model.head.linear.weight.detach().clone()
        list(run.train())
        assert torch.equal(run.model.head.linear.weight, before) != own


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_exactly_where_it_stopped(
    kind: str, answers: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trainer(target, answers, kind, visits=1600)
    steps = first.train(evaluations=4)
    next(steps)  # a quarter, then the process dies having saved
    first.save_state()
    second = trainer(target, answers, kind, visits=1600)
    assert second.resume()
    assert (second.visits, second.step, second.history) == (first.visits, first.step, first.history)
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name])
    moments = zip(first.optimizers[0].state.values(), second.optimizers[0].state.values(), strict=True)
    assert all(torch.equal(a[k], b[k]) for a, b in moments for k in a)
    assert second.learning_rate() == first.learning_rate()
    list(second.train(evaluations=4))
    assert second.visits >= 1600
    assert len(second.history) == 4
    assert [h["visits"] for h in second.history] == sorted(h["visits"] for h in second.history)


def test_another_run_is_not_resumed(answers: Path, target: Target) -> None:
    first = trainer(target, answers, "cascade", visits=300)
    list(first.train())
    assert trainer(target, answers, "cascade", visits=900).resume()  # the same run, made longer
    assert not trainer(target, answers, "cascade", visits=300, seed=1).resume()
    assert not trainer(target, answers, "autoregressive", visits=300).resume()


def test_training_goes_on_from_a_checkpoint(answers: Path, target: Target, tmp_path: Path) -> None:
    first = trainer(target, answers, "cascade", visits=300)
    list(first.train())
    first.export(tmp_path / "out", "")
    config = TrainConfig("cascade", **(SMALL | {"visits": 300}))
    corpus = Corpus.load([answers], target.vocab)
    second = Trainer(config, target, corpus, state_folder=tmp_path, start_from=tmp_path / "out")
    for name, weight in first.model.state_dict().items():
        assert torch.allclose(weight, second.model.state_dict()[name], atol=2e-3)
    list(second.train())
    with pytest.raises(UserError, match="cascade"):
        Trainer(
            replace(config, drafter="autoregressive"),
            target,
            corpus,
            state_folder=tmp_path,
            start_from=tmp_path / "out",
        )


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_drafter_has_the_trained_ones_logits(
    kind: str, answers: Path, target: Target, tmp_path: Path
) -> None:
    run = (
        trainer(target, answers, kind, visits=600, own_head=True)
        if kind != "cascade"
        else trainer(target, answers, kind, visits=600)
    )
    list(run.train())
    run.export(tmp_path / "out", "")
    loaded = load_checkpoint(tmp_path / "out", target, for_training=True)
    batch = run.batches.of([0])
    with torch.no_grad():
        outs = []
        for m in (run.model, loaded):
            if isinstance(m, Cascade):
                count = batch.tokens.shape[1] - 1
                rows = Rows(target.rope(torch.arange(count)), attention_bias(None, count, count, batch.taps))
                outs.append(m.head.logits(m(batch.taps[:, :count], batch.embeddings[:, 1:], rows)[-1]))
            else:
                outs.append(m.logits(unrolled_states(m, batch, target.rope, 2)[-1]))
    assert torch.allclose(*outs, atol=0.05, rtol=0.02)
    assert torch.equal(loaded.head.vocabulary, run.model.head.vocabulary)


def test_short_answers_do_not_break_training(tmp_path: Path, target: Target) -> None:
    """An answer of two tokens has no row at depth 3; a batch of such answers must not give a loss of 0/0."""
    file = corpus_file(tmp_path, [(3, [1, 2, 3, 4, 5]), (3, [3, 2, 1, 6, 7])])
    run = trainer(target, file, "cascade", visits=40)
    list(run.train())
    assert run.visits >= 40


def test_a_loss_that_explodes_is_explained(answers: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(target, answers, "cascade")
    monkeypatch.setattr(run, "loss", lambda batch: (torch.tensor(torch.nan), [0.0]))
    with pytest.raises(UserError, match="learning-rate"):
        next(run.train())


def test_an_unwritable_state_is_explained(answers: Path, target: Target, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = trainer(target, answers, "cascade")
    run.state_file = tmp_path / "file" / "state.pt"
    with pytest.raises(UserError, match="could not be written"):
        run.save_state()


def test_a_damaged_state_is_explained(answers: Path, target: Target) -> None:
    run = trainer(target, answers, "cascade")
    run.save_state()
    run.state_file.write_bytes(run.state_file.read_bytes()[:-100])
    with pytest.raises(UserError, match="state"):
        run.resume()


@pytest.mark.parametrize(
    "wrong", [{"visits": 0}, {"sequences": 0}, {"vocabulary": 0}, {"depths": 0}, {"learning_rate": 0.0}], ids=str
)
def test_wrong_settings_are_explained(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong)).replace("_", "-")):
        TrainConfig("cascade", **wrong)


def test_the_learning_rate_warms_up_holds_and_falls(answers: Path, target: Target) -> None:
    run = trainer(target, answers, "cascade", visits=1000, warmup_steps=10)
    rates = {}
    for step, visits in ((0, 0), (9, 0), (50, 500), (50, 800), (50, 1000)):
        run.step, run.visits = step, visits
        rates[step, visits] = run.learning_rate() / 1e-2
    assert rates == pytest.approx({(0, 0): 0.1, (9, 0): 1.0, (50, 500): 1.0, (50, 800): 0.5, (50, 1000): 0.05})


# ---- writing a corpus -------------------------------------------------------------------------------------------------


def test_the_target_writes_a_corpus(tmp_path: Path) -> None:
    target, file = tiny.talking_target(), tmp_path / "deep" / "corpus.npz"
    said: list[str] = []
    generate_corpus(target, file, response_tokens=300, seed=1, batch=12, show=said.append)
    corpus = Corpus.load([file], target.vocab)
    assert corpus.response_tokens >= 300
    assert "300" in said[0]
    assert len({tuple(corpus.sequence(i)) for i in range(len(corpus))}) == len(corpus)
    opening, turn = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    for i in range(len(corpus)):
        tokens, start = corpus.sequence(i), corpus.starts[i]
        question = target.tokenizer.decode(tokens[:start])
        assert question.startswith(opening)
        assert question.endswith(turn)
        assert start <= len(opening) + LONGEST_QUESTION + len(turn)
        answer = tokens[start:]
        assert 1 <= len(answer) <= LONGEST_ANSWER
        assert not target.eos & set(answer[:-1].tolist())
        assert answer[-1] in target.eos or len(answer) == LONGEST_ANSWER


def test_greedy_answers_are_the_targets_own(tmp_path: Path) -> None:
    """Rows leave the batch while it is written; what is left must go on as if alone."""
    model = tiny.talking_model()
    target = Target.from_model(model, tiny.tokenizer(), name="tiny", fingerprint="f" * 64)
    file = tmp_path / "corpus.npz"
    generate_corpus(target, file, response_tokens=300, seed=1, batch=12, show=lambda _: None)
    corpus = Corpus.load([file], target.vocab)
    same = 0
    for i in range(len(corpus)):
        tokens, start = corpus.sequence(i).tolist(), int(corpus.starts[i])
        same += tiny.greedy_reference(model, tokens[:start], len(tokens) - start, eos=257) == tokens[start:]
    assert same > 0  # about every other answer is greedy


def test_a_batch_without_answers_is_followed_by_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original, calls = Generator.write, []

    def first_nothing(self: Generator) -> Any:
        calls.append(1)
        return original(self) if len(calls) > 1 else []

    monkeypatch.setattr(Generator, "write", first_nothing)
    target, file = tiny.talking_target(), tmp_path / "corpus.npz"
    generate_corpus(target, file, response_tokens=20, seed=1, batch=12, show=lambda _: None)
    assert Corpus.load([file], target.vocab).response_tokens >= 20


def test_sequences_start_with_openers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fasteagle_lite.training.generate.OPENERS", ("Explain why",))
    target, file = tiny.talking_target(), tmp_path / "corpus.npz"
    generate_corpus(target, file, response_tokens=20, seed=0, batch=12, show=lambda _: None)
    corpus = Corpus.load([file], target.vocab)
    assert target.tokenizer.decode(corpus.sequence(0)).startswith("<|im_start|>user\nExplain why")


@pytest.mark.parametrize(
    "spoil", [lambda t: setattr(t, "tokenizer", None), lambda t: setattr(t.tokenizer, "chat_template", None)]
)
def test_without_a_chat_template_nothing_is_written(spoil: Callable[[Target], None], tmp_path: Path) -> None:
    target = tiny.talking_target()
    spoil(target)
    with pytest.raises(UserError, match="chat template"):
        generate_corpus(target, tmp_path / "c.npz", response_tokens=10, seed=0)


def test_nothing_to_write_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 1"):
        generate_corpus(tiny.talking_target(), tmp_path / "c.npz", response_tokens=0, seed=0)


def test_unit_taps_have_unit_size_whatever_the_stream() -> None:
    taps = torch.randn(5, 12) * torch.tensor([1e4, 1.0, 30.0]).repeat_interleave(4)
    assert torch.allclose(unit_taps(taps).view(5, 3, 4).square().mean(-1), torch.ones(5, 3), atol=1e-3)
    assert torch.equal(unit_taps(torch.zeros(1, 12)), torch.zeros(1, 12))
    assert F.cosine_similarity(unit_taps(taps)[:, :4], taps[:, :4]).min() > 0.999
