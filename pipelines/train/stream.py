"""The rows of a step for one worker: a function of seed, step and world, never of what ran before."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from c2kv_core.errors import CorpusError
from pipelines.train.config import TrainConfig
from pipelines.train.ingest import RowFile
from pipelines.train.mixture import Mixture
from pipelines.train.prepare import Prepared, Preparer
from pipelines.train.row import RowError, TrainRow
from pipelines.train.sampler import DocumentSampler, Sample
from pipelines.train.sharing import shared_rows

MAX_SUBSTITUTES = 100
"""Rows tried for one place before the run gives up: then hardly any row of the data fits the limits."""


@dataclass(kw_only=True)
class StepRows:
    """What one worker trains on in one step."""

    micro_batches: list[list[Prepared]]
    """Of rows of similar length."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows replaced by others, by reason."""


class RowStream:
    """Rows of any step, in any order of asking."""

    def __init__(self, config: TrainConfig, files: Sequence[RowFile], preparer: Preparer) -> None:
        self._config, self._preparer = config, preparer
        self._mixture = Mixture(files, seed=config.seed)
        self._sampler = DocumentSampler(
            files,
            questions=config.questions_per_row,
            passages=config.reconstruction.passages if config.reconstruction.weight else 0,
            pack_words=config.pack_words,
            gap_tokens=config.gap_tokens,
        )

    def step(self, step: int, *, rank: int = 0, world: int = 1) -> StepRows:
        """Rows of an optimizer step (from 1) for one of ``world`` workers.

        Raises:
            CorpusError: no usable row was found for a place.
        """
        first = (step - 1) * self._config.batch_rows
        places = range(first, first + self._config.batch_rows)
        samples = {place: self._sample(step, place, 0) for place in places}
        rows = StepRows(micro_batches=[])
        # Rows that share documents are dealt out together: who meets whom is a matter of the places alone.
        meet = self._config.share_documents
        groups = {start: range(start, start + meet) for start in places[::meet]}
        sizes = {start: sum(samples[p].characters for p in group) for start, group in groups.items()}
        mine = _share(sizes, rank=rank, world=world)
        prepared = [
            [self._usable(step, place, samples[place], rows.dropped) for place in groups[start]]
            for start in mine
        ]
        if meet == 1:
            prepared = [[row for group in prepared for row in group]]
        else:
            prepared = [self._sharing(start, group) for start, group in zip(mine, prepared, strict=True)]
        rows.micro_batches = [batch for group in prepared for batch in micro_batches(group, **self.limits())]
        return rows

    def _sharing(self, start: int, group: list[Prepared]) -> list[Prepared]:
        return shared_rows(
            group,
            max_row_tokens=self._preparer.max_row_tokens,
            gap_tokens=self._config.gap_tokens,
            random=np.random.default_rng([self._config.seed, 7, start]),
        )

    def limits(self) -> dict[str, int]:
        """Largest micro-batch."""
        # Workers that share a base's layers must make equally many passes, so only rows may count.
        tokens = sys.maxsize if self._config.shard_base else self._config.micro_batch_tokens
        return {"max_rows": self._config.micro_batch_rows, "max_tokens": tokens}

    def _sample(self, step: int, place: int, attempt: int) -> Sample:
        file, row = self._mixture.substitute(place, attempt) if attempt else self._mixture.row(place)
        return self._draw(step, place, attempt, file, row)

    def _draw(self, step: int, place: int, attempt: int, file: int, row: TrainRow) -> Sample:
        random = np.random.default_rng([self._config.seed, 3, place, attempt])
        config = self._config
        return self._sampler.sample(
            file,
            row,
            config.ratios_at(step),
            counts=config.documents_at(step),
            random=random,
            views=config.views_per_row,
        )

    def _usable(self, step: int, place: int, sample: Sample, dropped: Counter[str]) -> Prepared:
        for attempt in range(1, MAX_SUBSTITUTES + 1):
            try:
                return self._preparer.prepare(sample)
            except RowError as fault:
                dropped[fault.reason] += 1
                last = fault
            sample = self._sample(step, place, attempt)
        raise CorpusError(
            f"{MAX_SUBSTITUTES} rows in turn cannot be used, the last: {last}; raise max_row_tokens or lower "
            "documents_per_row"
        )


def _share(sizes: dict[int, int], *, rank: int, world: int) -> list[int]:
    """Places of one worker: equally many for each, dealt back and forth by size so that the work is even."""
    by_size = sorted(sizes, key=lambda place: (sizes[place], place))
    mine = []
    for turn, start in enumerate(range(0, len(by_size), world)):
        dealt = by_size[start : start + world]
        mine.append(dealt[rank] if turn % 2 == 0 else dealt[-1 - rank])
    return mine


def micro_batches(rows: Sequence[Prepared], *, max_rows: int, max_tokens: int) -> list[list[Prepared]]:
    """Rows grouped by length, at most ``max_rows`` and ``max_tokens`` source tokens a group."""
    groups: list[list[Prepared]] = []
    tokens = 0
    for row in sorted(rows, key=lambda r: r.total_tokens):
        fits = groups and len(groups[-1]) < max_rows and tokens + row.source_tokens <= max_tokens
        if not fits:
            groups.append([])
            tokens = 0
        groups[-1].append(row)
        tokens += row.source_tokens
    return groups
