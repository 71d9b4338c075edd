"""Drawing tokens: warping against its definition, noise that is Gumbel's and depends on nothing but its key."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny
import torch

from fasteagle_lite import sampling as module
from fasteagle_lite.errors import UserError
from fasteagle_lite.sampling import Sampling, draw, gumbel, warp


@pytest.mark.parametrize("top_k", [0, 1, 3, 11, 12, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4, 1e-9])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_warp_is_its_definition(temperature: float, top_p: float, top_k: int) -> None:
    settings = Sampling(temperature, top_p, top_k)
    for seed in range(10):
        logits = torch.randn(12, generator=torch.Generator().manual_seed(seed)) * 2
        wanted = tiny.warp_reference(logits.tolist(), settings)
        assert warp(logits, settings).exp().numpy() == pytest.approx(wanted, abs=1e-9)


def test_top_p_reached_exactly_keeps_no_more() -> None:
    logits = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    assert (warp(logits, Sampling(1.0, 0.5)) > -torch.inf).tolist() == [True, False, False]
    assert (warp(logits, Sampling(1.0, 0.5000001)) > -torch.inf).tolist() == [True, True, False]
    assert (warp(logits, Sampling(1.0, 0.75)) > -torch.inf).tolist() == [True, True, False]


def test_a_tiny_top_p_keeps_the_best_token() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9])
    assert warp(logits, Sampling(1.0, 1e-12)).exp().tolist() == [0.0, 1.0, 0.0]


def test_top_k_keeps_k_even_among_equals() -> None:
    assert (warp(torch.zeros(6), Sampling(1.0, top_k=2)) > -torch.inf).sum() == 2


def test_top_p_counts_after_top_k() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    # After top-k 2 the best token has 4/7 of the mass, so it alone reaches 0.5.
    assert (warp(logits, Sampling(1.0, 0.5, 2)) > -torch.inf).tolist() == [True, False, False, False]
    assert (warp(logits, Sampling(1.0, 0.5)) > -torch.inf).tolist() == [True, True, False, False]


def test_logits_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.tensor([0.0, -torch.inf, 0.0])
    assert {draw(logits, Sampling(5.0, seed=seed), 3) for seed in range(200)} == {0, 2}


def splitmix(x: int) -> int:
    """SplitMix64's output function in plain Python integers."""
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 1, 8191])
def test_noise_is_splitmix_of_seed_position_and_token(seed: int, position: int) -> None:
    tokens = [0, 1, 2, 49151]
    key = splitmix((splitmix(seed) + position) % 2**64)
    uniform = [((splitmix((key + t * 0x9E3779B97F4A7C15) % 2**64) >> 12) + 0.5) / 2**52 for t in tokens]
    wanted = [-math.log(-math.log(u)) for u in uniform]
    assert gumbel(seed, position, torch.tensor(tokens)).tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("bits", [0, -1], ids=["zeros", "ones"])
def test_noise_is_finite_whatever_the_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_splitmix", lambda x: torch.full_like(x, bits))
    assert torch.isfinite(gumbel(0, 0, torch.tensor([0]))).all()


def test_noise_has_gumbels_mean_variance_and_shape() -> None:
    noise = torch.cat([gumbel(seed, 3, torch.arange(2000)) for seed in range(100)])
    assert float(noise.mean()) == pytest.approx(0.5772156649, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
    uniform = torch.exp(-torch.exp(-noise)).numpy()  # Gumbel's distribution function
    counts, _ = np.histogram(uniform, bins=50, range=(0, 1))
    assert tiny.chi_square_p(counts, np.full(50, 0.02)) > 1e-4


@pytest.mark.parametrize(
    ("one", "other"),
    [((0, 5), (0, 6)), ((0, 5), (1, 5)), ((0, 5), (1, 4)), ((7, 0), (8, 0)), ((3, 1), (1, 3))],
)
def test_noise_of_other_keys_is_independent(one: tuple[int, int], other: tuple[int, int]) -> None:
    tokens = torch.arange(40_000)
    pair = [torch.exp(-torch.exp(-gumbel(*key, tokens))).numpy() for key in (one, other)]
    counts, _, _ = np.histogram2d(*pair, bins=8, range=[(0, 1), (0, 1)])
    assert tiny.chi_square_p(counts.ravel(), np.full(64, 1 / 64)) > 1e-4


def test_noise_of_neighbouring_tokens_is_independent() -> None:
    uniform = torch.exp(-torch.exp(-gumbel(9, 9, torch.arange(40_001)))).numpy()
    counts, _, _ = np.histogram2d(uniform[:-1], uniform[1:], bins=8, range=[(0, 1), (0, 1)])
    assert tiny.chi_square_p(counts.ravel(), np.full(64, 1 / 64)) > 1e-4


def test_noise_does_not_depend_on_which_tokens_are_asked() -> None:
    whole = gumbel(4, 17, torch.arange(100))
    some = torch.tensor([99, 3, 41])
    assert torch.equal(gumbel(4, 17, some), whole[some])


@pytest.mark.parametrize("settings", [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.5, 0.8, 0), (1.0, 1.0, 3), (0.8, 0.9, 4)])
def test_draws_follow_the_distribution(settings: tuple[float, float, int]) -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(1))
    counts = np.zeros(6)
    for i in range(4000):  # every draw has another seed and another position
        counts[draw(logits, Sampling(*settings, seed=i), 3 * i)] += 1
    assert tiny.chi_square_p(counts, tiny.warp_reference(logits.tolist(), Sampling(*settings))) > 1e-4


def test_the_same_key_draws_the_same_token() -> None:
    logits = torch.randn(50)
    settings = Sampling(1.0, seed=3)
    assert draw(logits, settings, 8) == draw(logits, settings, 8)
    assert len({draw(logits, settings, position) for position in range(50)}) > 5


def test_greedy_takes_the_best_whatever_the_seed() -> None:
    assert {draw(torch.tensor([0.0, 2.0, 1.0]), Sampling(seed=seed), seed) for seed in range(20)} == {1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": math.nan},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**63},
    ],
    ids=str,
)
def test_wrong_settings_are_explained(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=str(next(iter(wrong.values())))):
        Sampling(**wrong)
