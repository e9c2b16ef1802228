"""From a place in the mixture to what is asked there: documents in their order, and a ratio for each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelines.train.reading import RowFile
from pipelines.train.row import Passage, TrainRow


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A row as one step asks it."""

    row: TrainRow
    dataset: str
    """Name of the row's file."""
    documents: tuple[Passage, ...]
    """Supporting ones and distractors, shuffled."""
    ratios: tuple[tuple[int, ...], ...]
    """Source tokens per slot of each document, one tuple a view."""
    retold: int
    """Place of the document that reconstruction asks for."""

    @property
    def characters(self) -> int:
        """Size of the sample before it is tokenised, for balancing."""
        return sum(len(d.title) + len(d.text) for d in self.documents)


class DocumentSampler:
    """Draws documents for rows: their supporting ones, their own others, then others of the same file."""

    def __init__(self, files: Sequence[RowFile], *, fewest: int, most: int) -> None:
        self._files = files
        self._fewest, self._most = fewest, most
        # Ids are unique, so that a paragraph with many questions counts once.
        self._pools = [list({d.doc_id: d for row in f.rows for d in row.documents}.values()) for f in files]

    def sample(
        self,
        file: int,
        row: TrainRow,
        ratios: Sequence[int],
        *,
        random: np.random.Generator,
        views: int = 1,
    ) -> Sample:
        """Documents and ratios for a row of a file, all drawn from ``random``."""
        wanted = int(random.integers(self._fewest, self._most + 1))
        needed = [d for d in row.documents if d.doc_id in row.supporting]
        others = [d for d in row.documents if d.doc_id not in row.supporting]
        chosen = needed[: self._most] + self._others(others, wanted - len(needed), random)
        chosen += self._strangers(file, chosen, wanted - len(chosen), random)
        order = random.permutation(len(chosen))
        documents = tuple(chosen[i] for i in order)
        drawn = random.integers(len(ratios), size=(views, len(documents)))
        return Sample(
            row=row,
            dataset=self._files[file].name,
            documents=documents,
            ratios=tuple(tuple(ratios[i] for i in view) for view in drawn),
            retold=int(random.integers(len(documents))),
        )

    @staticmethod
    def _others(others: list[Passage], count: int, random: np.random.Generator) -> list[Passage]:
        picked = random.permutation(len(others))[: max(count, 0)]
        return [others[i] for i in picked]

    def _strangers(
        self, file: int, chosen: list[Passage], count: int, random: np.random.Generator
    ) -> list[Passage]:
        pool = self._pools[file]
        seen = {d.doc_id for d in chosen}
        found: list[Passage] = []
        # A pool smaller than what is wanted gives fewer; the number of tries is bounded for that reason.
        for _ in range(4 * max(count, 0)):
            if len(found) == count:
                break
            passage = pool[int(random.integers(len(pool)))]
            if passage.doc_id not in seen:
                seen.add(passage.doc_id)
                found.append(passage)
        return found
