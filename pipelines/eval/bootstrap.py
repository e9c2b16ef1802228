"""95 % intervals by the percentile bootstrap over groups of questions.

Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 13 (percentile intervals) and 8.3
(resampling whole groups where observations inside one are not independent: here, questions on one passage).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

TAIL = 0.025
"""Share of the resamples beyond each end."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


class Bootstrap:
    """Resamples drawn once, so that every method is judged on the same ones."""

    def __init__(self, groups: Sequence[Hashable], *, seed: int, resamples: int) -> None:
        """Draw the resamples.

        Args:
            groups: the group of each question.
            seed: of the draws.
            resamples: how many.
        """
        places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
        self._group = np.array([places[group] for group in groups], dtype=np.int64)
        count = len(places)
        random = np.random.default_rng(seed)
        # How often each group is in each resample, (resamples, groups).
        self._draws = random.multinomial(count, np.full(count, 1 / count), size=resamples).astype(np.float64)
        self._sizes = self._draws @ self._totals(np.ones(len(groups)))

    def interval(self, values: Sequence[float]) -> Interval:
        """Of the mean over questions; for a paired difference give the differences."""
        given = np.asarray(values, dtype=np.float64)
        mean = float(given.mean())
        low, high = np.quantile(self._draws @ self._totals(given) / self._sizes, [TAIL, 1 - TAIL])
        # Where all values are alike, rounding may put the mean outside by its last digit.
        return Interval(mean=mean, low=min(float(low), mean), high=max(float(high), mean))

    def _totals(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self._group, weights=values)
