"""Marks of answers, and their intervals, against cases worked out by hand."""

import numpy as np
import pytest

from pipelines.eval.bootstrap import Bootstrap
from pipelines.eval.metrics import score, words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Quick, brown-fox!", ["quick", "brownfox"]),
        ("a AN the theatre", ["theatre"]),
        ("St. George's Church", ["st", "georges", "church"]),
        ("“Zürich” – 1,000 €", ["zürich", "1000", "€"]),
        ("北京，2008年", ["北", "京", "2008", "年"]),
        ("東京タワー", ["東", "京", "タ", "ワ", "ー"]),
        ("ไทย", ["ไ", "ท", "ย"]),
        ("...", []),
        ("", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("said", "accepted", "f1", "exact", "recall"),
    [
        ("The Eiffel Tower.", ["eiffel tower"], 1.0, 1.0, 1.0),
        ("It is the Eiffel Tower", ["Eiffel Tower"], 2 * (2 / 4) * 1 / (2 / 4 + 1), 0.0, 1.0),
        ("Tower Eiffel", ["Eiffel Tower"], 1.0, 0.0, 0.0),
        ("Eiffel", ["Eiffel Tower"], 2 * 1 * 0.5 / 1.5, 0.0, 0.0),
        ("tower tower", ["the tower"], 2 * 0.5 * 1 / 1.5, 0.0, 1.0),
        ("Berlin", ["Paris"], 0.0, 0.0, 0.0),
        ("1995", ["5"], 0.0, 0.0, 0.0),
        ("", ["Paris"], 0.0, 0.0, 0.0),
        ("Paris", ["..."], 0.0, 0.0, 0.0),
        ("Lyon", ["Paris", "lyon"], 1.0, 1.0, 1.0),
        ("在北京市", ["北京"], 2 * 0.5 * 1 / 1.5, 0.0, 1.0),
    ],
)
def test_marks_are_the_best_over_the_accepted_answers(
    said: str, accepted: list[str], f1: float, exact: float, recall: float
) -> None:
    marks = score(said, accepted)
    assert (marks.f1, marks.exact_match, marks.answer_recall) == (pytest.approx(f1), exact, recall)


def test_the_interval_holds_the_mean_and_is_the_same_every_time() -> None:
    values = np.random.default_rng(3).random(60).tolist()
    groups = list(range(60))
    found = Bootstrap(groups, seed=1, resamples=2000).interval(values)
    assert found.low < found.mean < found.high
    assert found.mean == pytest.approx(np.mean(values))
    assert found == Bootstrap(groups, seed=1, resamples=2000).interval(values)
    assert found != Bootstrap(groups, seed=2, resamples=2000).interval(values)


def test_the_interval_is_about_that_of_the_normal_approximation() -> None:
    values = np.random.default_rng(3).random(400)
    found = Bootstrap(range(400), seed=0, resamples=4000).interval(values.tolist())
    margin = 1.96 * values.std() / 20
    assert found.high - found.mean == pytest.approx(margin, rel=0.1)
    assert found.mean - found.low == pytest.approx(margin, rel=0.1)


def test_alike_values_have_no_spread() -> None:
    found = Bootstrap(range(7), seed=0, resamples=500).interval([0.1] * 7)
    assert (found.low, found.high) == (pytest.approx(0.1), pytest.approx(0.1))
    assert found.low <= found.mean <= found.high


def test_questions_on_one_passage_count_as_one_observation() -> None:
    """Ten copies of five observations say no more than the five."""
    five = [0.0, 0.2, 0.3, 0.9, 1.0]
    once = Bootstrap(range(5), seed=0, resamples=2000).interval(five)
    copied = Bootstrap([p for p in range(5) for _ in range(10)], seed=0, resamples=2000).interval(
        [v for v in five for _ in range(10)]
    )
    apart = Bootstrap(range(50), seed=0, resamples=2000).interval([v for v in five for _ in range(10)])
    assert (copied.low, copied.high) == (pytest.approx(once.low), pytest.approx(once.high))
    assert apart.high - apart.low < 0.5 * (copied.high - copied.low)


def test_groups_of_unequal_size_weigh_by_their_questions() -> None:
    found = Bootstrap(["a", "a", "a", "b"], seed=0, resamples=500).interval([1.0, 1.0, 1.0, 0.0])
    assert (found.low, found.mean, found.high) == (0.0, 0.75, 1.0)
