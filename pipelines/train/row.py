"""What a data file holds, whatever its layout: documents, a question and its answers."""

from dataclasses import dataclass
from typing import NamedTuple


class Passage(NamedTuple):
    """A document of a row."""

    doc_id: str
    """Same text, same id, within a file."""
    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class TrainRow:
    """A question with the documents its source gives."""

    row_id: str
    documents: tuple[Passage, ...]
    """At least one, all with text."""
    supporting: frozenset[str]
    """Ids of documents that the answer needs; all of them where the source does not say."""
    question: str
    answer: str
    """The first accepted answer, with no blanks around it."""


class RowError(ValueError):
    """A row that cannot be trained on; ``reason`` is what such rows are counted under."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
