"""From a place in the mixture to what is asked there: documents in their order, and a ratio for each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from c2kv_core.text import document_content
from pipelines.train.ingest import RowFile
from pipelines.train.row import Passage, TrainRow


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A row as one step asks it."""

    row: TrainRow
    dataset: str
    """Name of the row's file."""
    documents: tuple[Passage, ...]
    """Supporting ones and distractors, shuffled; several may be packed into one."""
    ratios: tuple[tuple[int, ...], ...]
    """Source tokens per slot of each document, one tuple a view."""
    others: tuple[TrainRow, ...] = ()
    """Rows whose questions these documents answer too."""
    passages: tuple[Passage, ...] = ()
    """Documents, as they were before packing, that reconstruction asks for, and ..."""
    places: tuple[float, ...] = ()
    """... where in each, from 0 to 1."""
    gaps: tuple[int, ...] = ()
    """Positions left free before each document, and before the questions; empty where none are."""

    @property
    def characters(self) -> int:
        """Size of the sample before it is tokenised, for balancing."""
        return sum(len(d.title) + len(d.text) for d in self.documents)


class DocumentSampler:
    """Draws documents for rows: their supporting ones, their own others, then others of the same file."""

    def __init__(
        self,
        files: Sequence[RowFile],
        *,
        questions: int = 1,
        passages: int = 0,
        pack_words: int = 0,
        gap_tokens: int = 0,
    ) -> None:
        """Args:
        files: rows to draw strangers and further questions from.
        questions: most questions of a row.
        passages: passages of a row that reconstruction asks for.
        pack_words: most words of documents that are joined into one.
        gap_tokens: most positions that a row leaves free.
        """
        self._files, self._pack_words, self._gap_tokens = files, pack_words, gap_tokens
        self._questions, self._passages = questions, passages

    def sample(
        self,
        file: int,
        row: TrainRow,
        ratios: Sequence[int],
        *,
        counts: tuple[int, int],
        random: np.random.Generator,
        views: int = 1,
    ) -> Sample:
        """Documents (fewest and most of ``counts``) and ratios for a row of a file, all drawn from ``random``."""
        fewest, most = counts
        wanted = int(random.integers(fewest, most + 1))
        needed = [d for d in row.documents if d.doc_id in row.supporting]
        others = [d for d in row.documents if d.doc_id not in row.supporting]
        chosen = needed[:most] + self._others(others, wanted - len(needed), random)
        chosen += self._strangers(file, chosen, wanted - len(chosen), random)
        single = [chosen[i] for i in random.permutation(len(chosen))]
        documents = self._packed(single, random)
        drawn = random.integers(len(ratios), size=(views, len(documents)))
        retold = random.integers(len(single), size=self._passages)
        return Sample(
            row=row,
            dataset=self._files[file].name,
            documents=documents,
            ratios=tuple(tuple(ratios[i] for i in view) for view in drawn),
            others=self._further(file, row, single, random),
            passages=tuple(single[i] for i in retold),
            places=tuple(random.random(self._passages).tolist()),
            gaps=draw_gaps(self._gap_tokens, len(documents) + 1, random),
        )

    def _packed(self, documents: Sequence[Passage], random: np.random.Generator) -> tuple[Passage, ...]:
        """Neighbours joined while they stay within a number of words that is drawn for the row."""
        if not self._pack_words:
            return tuple(documents)
        most = self._pack_words * random.random()
        groups: list[list[Passage]] = []
        room = 0.0
        for document in documents:
            words = len(document.text.split())
            if groups and words <= room:
                groups[-1].append(document)
                room -= words
            else:
                groups.append([document])
                room = most - words
        return tuple(map(_joined, groups))

    def _further(
        self, file: int, row: TrainRow, documents: Sequence[Passage], random: np.random.Generator
    ) -> tuple[TrainRow, ...]:
        if self._questions == 1:
            return ()
        there = {d.doc_id for d in documents}
        rows = self._files[file].rows
        asking = [pair for d in documents for pair in rows.asking(d.doc_id, within=there)]
        fitting = [n for n, row_id in asking if row_id != row.row_id or rows[n] != row]
        order = random.permutation(len(fitting))[: self._questions - 1]
        return tuple(rows[fitting[i]] for i in order)

    @staticmethod
    def _others(others: list[Passage], count: int, random: np.random.Generator) -> list[Passage]:
        picked = random.permutation(len(others))[: max(count, 0)]
        return [others[i] for i in picked]

    def _strangers(
        self, file: int, chosen: list[Passage], count: int, random: np.random.Generator
    ) -> list[Passage]:
        pool = self._files[file].rows.pool
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


def draw_gaps(most: int, count: int, random: np.random.Generator) -> tuple[int, ...]:
    """``count`` numbers of free positions, together at most ``most``; none where that is 0.

    Small totals are the likelier ones: near documents are to be found as well as far ones.
    """
    if not most:
        return ()
    total = int(most * random.random() ** 2)
    cuts = np.sort(random.integers(total + 1, size=count - 1))
    return tuple(np.diff(cuts, prepend=0, append=total).tolist())


def _joined(documents: Sequence[Passage]) -> Passage:
    first, *more = documents
    if not more:
        return first
    text = "\n\n".join([first.text, *(document_content(d.title, d.text) for d in more)])
    return Passage("+".join(d.doc_id for d in documents), first.title, text)
