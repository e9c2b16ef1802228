"""Rows of a micro-batch in one context: each row's questions over the documents of all of them.

A document costs its extraction once, however many rows read it, so contexts of many documents come at the price of few.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipelines.train.prepare import Prepared
from pipelines.train.sampler import draw_gaps


def shared_rows(
    rows: Sequence[Prepared], *, max_row_tokens: int, gap_tokens: int, random: np.random.Generator
) -> list[Prepared]:
    """The rows, each with the documents of all, in an order and with free positions of its own.

    Documents are joined row by row as long as the longest row stays within the limit; the rows that no longer fit stay
    as they were. One that stands in several rows (by its id) is there once, as the first of them has it.

    Args:
        rows: of one micro-batch.
        max_row_tokens: most tokens of documents with the longest question and its answer.
        gap_tokens: most positions that a row leaves free.
        random: decides orders and gaps.
    """
    joined = list(rows[:1])
    for row in rows[1:]:
        if _tokens([*joined, row]) <= max_row_tokens:
            joined.append(row)
    if len(joined) < 2:
        return list(rows)
    documents = _documents(joined)
    kept = {id(row) for row in joined}
    return [_over(row, documents, gap_tokens, random) if id(row) in kept else row for row in rows]


def _documents(rows: Sequence[Prepared]) -> list[tuple[Prepared, int]]:
    """All documents: their row and place in it."""
    found: dict[str, tuple[Prepared, int]] = {}
    for row in rows:
        for place, document in enumerate(row.sample.documents):
            found.setdefault(f"{row.sample.dataset}/{document.doc_id}", (row, place))
    return list(found.values())


def _tokens(rows: Sequence[Prepared]) -> int:
    sources = sum(len(part) for row, place in _documents(rows) for part in row.parts[place])
    return sources + max(len(asked.ids) for row in rows for asked in row.asked)


def _over(
    row: Prepared,
    documents: Sequence[tuple[Prepared, int]],
    gap_tokens: int,
    random: np.random.Generator,
) -> Prepared:
    order = [documents[i] for i in random.permutation(len(documents))]
    views = len(row.sample.ratios)
    sample = replace(
        row.sample,
        documents=tuple(owner.sample.documents[place] for owner, place in order),
        ratios=tuple(
            tuple(owner.sample.ratios[view][place] for owner, place in order) for view in range(views)
        ),
        gaps=draw_gaps(gap_tokens, len(order) + 1, random),
    )
    return replace(row, sample=sample, parts=tuple(owner.parts[place] for owner, place in order))
