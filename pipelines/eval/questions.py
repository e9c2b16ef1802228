"""Rows to questions: which ones, with which documents, in which order; all drawn by the seed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from c2kv_core import SourceDocument
from pipelines.eval.config import EvalConfig
from pipelines.eval.rows import Row

MISSES = 8
"""Distractors in a row that may be too long for the rest of a context before it counts as full."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What every method is asked."""

    question_id: str
    text: str
    answers: tuple[str, ...]
    documents: tuple[SourceDocument, ...]
    """In the order they are placed."""
    group: tuple[str, ...]
    """Ids of the documents the answer needs: questions on the same ones are not independent."""


class QuestionMaker:
    """Chooses documents. What a question gets depends on seed and id alone, not on the limit or other questions."""

    def __init__(
        self, rows: Sequence[Row], config: EvalConfig, document_tokens: Callable[[SourceDocument], int]
    ) -> None:
        self._rows = rows
        self._config = config
        self._document_tokens = document_tokens
        self._pool = list({d.doc_id: d for row in rows for d in row.documents}.values())
        self._lengths: dict[str, int] = {}

    def questions(self) -> list[Question]:
        """The chosen questions. Rows on one passage stand together in a file, so a limit draws from all of it."""
        rows = list(self._rows)
        if self._config.limit is not None:
            Random(self._config.seed).shuffle(rows)
            rows = rows[: self._config.limit]
        return [self._question(row) for row in rows]

    def _question(self, row: Row) -> Question:
        random = Random(f"{self._config.seed}:{row.row_id}")
        if self._config.context_tokens is None:
            documents = [*row.documents, *self._distractors(row, random)]
        else:
            documents = self._filled(row, self._config.context_tokens, random)
        if self._config.shuffle:
            random.shuffle(documents)
        return Question(
            question_id=row.row_id,
            text=row.question,
            answers=row.answers,
            documents=tuple(documents),
            group=tuple(sorted(row.supporting)),
        )

    def _distractors(self, row: Row, random: Random) -> list[SourceDocument]:
        others = self._others(row, random)
        return [document for document, _ in zip(others, range(self._config.distractors), strict=False)]

    def _others(self, row: Row, random: Random) -> Iterator[SourceDocument]:
        """Documents of other rows, each once, in random order."""
        own = {d.doc_id for d in row.documents} | row.supporting
        for place in random.sample(range(len(self._pool)), len(self._pool)):
            if self._pool[place].doc_id not in own:
                yield self._pool[place]

    def _filled(self, row: Row, target_tokens: int, random: Random) -> list[SourceDocument]:
        chosen = [d for d in row.documents if d.doc_id in row.supporting]
        rest = [d for d in row.documents if d.doc_id not in row.supporting]
        random.shuffle(rest)
        room = target_tokens - sum(map(self._length, chosen))
        misses = 0
        for source in (rest, self._others(row, random)):
            for document in source:
                if misses == MISSES or room <= 0:
                    return chosen
                if self._length(document) <= room:
                    chosen.append(document)
                    room -= self._length(document)
                else:
                    misses += 1
        return chosen

    def _length(self, document: SourceDocument) -> int:
        if document.doc_id not in self._lengths:
            self._lengths[document.doc_id] = self._document_tokens(document)
        return self._lengths[document.doc_id]
