"""Slots of the rows of a micro-batch, differentiable: documents of one set of ratios go through the base together."""

from collections import defaultdict
from collections.abc import Sequence

from c2kv_core import CompressedDocument, Extractor
from c2kv_core.batching import length_batches
from pipelines.train.prepare import Prepared

View = list[CompressedDocument]
"""Parts of all documents of a row, in order, each at its document's ratio."""


def row_views(extractor: Extractor, rows: Sequence[Prepared]) -> list[list[View]]:
    """For each row, its views. A part is extracted once for all ratios its views ask for."""
    parts: list[list[int]] = []
    ratios: list[tuple[int, ...]] = []
    for row in rows:
        for place, document in enumerate(row.parts):
            asked = tuple(sorted({view[place] for view in row.sample.ratios}))
            parts += document
            ratios += [asked] * len(document)
    made = _extract(extractor, parts, ratios)
    views, start = [], 0
    for row in rows:
        counts = [len(document) for document in row.parts]
        views.append([_view(made, start, counts, chosen) for chosen in row.sample.ratios])
        start += sum(counts)
    return views


def _extract(
    extractor: Extractor, parts: list[list[int]], ratios: list[tuple[int, ...]]
) -> list[dict[int, CompressedDocument]]:
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, asked in enumerate(ratios):
        groups[asked].append(place)
    made: list[dict[int, CompressedDocument]] = [{} for _ in parts]
    for asked, places in groups.items():
        lengths = [len(parts[place]) for place in places]
        for batch in length_batches(lengths, max_tokens=extractor.max_batch_tokens):
            chosen = [places[i] for i in batch]
            for states in extractor.states([parts[place] for place in chosen], asked):
                for place, document in zip(chosen, states.documents(), strict=True):
                    made[place][states.ratio] = document
    return made


def _view(
    made: list[dict[int, CompressedDocument]], start: int, counts: list[int], ratios: tuple[int, ...]
) -> View:
    view = []
    for count, ratio in zip(counts, ratios, strict=True):
        view += [made[place][ratio] for place in range(start, start + count)]
        start += count
    return view
