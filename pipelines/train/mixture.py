"""Which row stands at which place of a run: a function of seed and place alone, so that resuming needs no position."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from pipelines.train.ingest import RowFile
from pipelines.train.row import TrainRow


class Mixture:
    """An endless sequence of rows: files by weight, each file's rows in a new order every epoch."""

    def __init__(self, files: Sequence[RowFile], *, seed: int) -> None:
        weights = np.array([f.source.weight or len(f.rows) for f in files], dtype=np.float64)
        self._bounds = np.cumsum(weights / weights.sum())
        self._files = files
        self._seed = seed
        self._choices = np.empty(0, dtype=np.int64)
        self._ranks = np.empty(0, dtype=np.int64)
        self._order = cache(self._permutation)

    def row(self, place: int) -> tuple[int, TrainRow]:
        """File and row at a place from 0."""
        if place >= len(self._choices):
            self._grow(place + 1)
        file = int(self._choices[place])
        return file, self._nth(file, int(self._ranks[place]))

    def substitute(self, place: int, attempt: int) -> tuple[int, TrainRow]:
        """Another row for a place whose row cannot be used; ``attempt`` counts from 1."""
        random = np.random.default_rng([self._seed, 2, place, attempt])
        file = int(np.searchsorted(self._bounds, random.random(), side="right"))
        file = min(file, len(self._files) - 1)
        return file, self._files[file].rows[int(random.integers(len(self._files[file].rows)))]

    def _grow(self, needed: int) -> None:
        # Drawn from the start every time: a prefix of a longer sequence is the shorter sequence.
        count = max(1024, 2 * needed)
        drawn = np.random.default_rng([self._seed, 0]).random(count)
        self._choices = np.minimum(np.searchsorted(self._bounds, drawn, side="right"), len(self._files) - 1)
        self._ranks = np.empty(count, dtype=np.int64)
        for file in range(len(self._files)):
            places = self._choices == file
            self._ranks[places] = np.arange(int(places.sum()))

    def _nth(self, file: int, rank: int) -> TrainRow:
        rows = self._files[file].rows
        epoch, index = divmod(rank, len(rows))
        return rows[int(self._order(file, epoch)[index])]

    def _permutation(self, file: int, epoch: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.random.default_rng([self._seed, 1, file, epoch]).permutation(len(self._files[file].rows))
