"""From logits to tokens: greedy, seeds, temperature and the nucleus."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from c2kv_core.errors import InputError
from c2kv_core.sampling import Sampler, SamplingParams

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]))


def draws(count: int = 400, *, logits: torch.Tensor = LOGITS, **params: float) -> Counter[int]:
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 7, **params}))  # type: ignore[arg-type]
    return Counter(sampler.draw(logits) for _ in range(count))


def test_temperature_0_takes_the_largest() -> None:
    assert set(draws(20, temperature=0.0)) == {1}
    assert Sampler(SamplingParams()).draw(LOGITS) == 1


def test_a_low_temperature_is_nearly_greedy_and_a_high_one_nearly_even() -> None:
    assert draws(temperature=0.02)[1] == 400
    assert min(draws(temperature=100.0)[token] for token in range(5)) > 40


@pytest.mark.parametrize("tiny", [1e-30, 1e-40, 1e-300, 5e-324])
def test_the_smallest_temperature_and_nucleus_are_greedy(tiny: float) -> None:
    far = 1000 * LOGITS
    assert set(draws(20, logits=far, temperature=tiny)) == {1}
    assert set(draws(20, logits=-far, temperature=tiny, top_p=0.5)) == {2}
    assert set(draws(20, top_p=tiny)) == {1}


def test_draws_follow_the_probabilities() -> None:
    counts = draws(4000)
    for token, share in enumerate(LOGITS.exp().tolist()):
        # five standard deviations
        assert abs(counts[token] / 4000 - share) < 5 * math.sqrt(share * (1 - share) / 4000)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.1, {1}),
        (0.39, {1}),
        (0.5, {1, 3}),
        (0.69, {1, 3}),
        (0.75, {1, 3, 4}),
        (0.9, {0, 1, 3, 4}),
        (1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    assert set(draws(2000, top_p=top_p)) == kept


@settings(max_examples=40, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12),
    top_p=st.floats(0.01, 1.0),
    seed=st.integers(0, 2**64),
)
def test_a_draw_is_always_of_the_nucleus(logits: list[float], top_p: float, seed: int) -> None:
    values = torch.tensor(logits)
    token = Sampler(SamplingParams(temperature=1.0, top_p=top_p, seed=seed)).draw(values)
    # Logits that differ in their last bits are equally likely.
    likely = values.softmax(-1)
    more_likely = likely[likely > likely[token]].sum()
    assert float(more_likely) < top_p + 1e-5


def test_one_seed_one_sequence_whatever_others_draw() -> None:
    one, other, noise = (Sampler(SamplingParams(temperature=1.0, seed=seed)) for seed in (5, 5, 6))
    first = [one.draw(LOGITS) for _ in range(30)]
    torch.manual_seed(123)
    second = []
    for _ in range(30):
        noise.draw(LOGITS)
        second.append(other.draw(LOGITS))
    assert first == second
    assert first != [Sampler(SamplingParams(temperature=1.0, seed=6)).draw(LOGITS) for _ in range(30)]


def test_without_a_seed_requests_differ() -> None:
    runs = {
        tuple(sampler.draw(LOGITS) for _ in range(30))
        for sampler in (Sampler(SamplingParams(temperature=1.0)) for _ in range(3))
    }
    assert len(runs) == 3


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -0.1},
        {"temperature": 101.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
    ],
)
def test_values_out_of_range_are_refused(params: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(params))):
        SamplingParams(**params)  # type: ignore[arg-type]
