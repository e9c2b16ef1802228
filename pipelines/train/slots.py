"""Slots of the rows of a micro-batch, differentiable: documents of one set of ratios go through the base together."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from c2kv_core import CompressedDocument, Extractor
from c2kv_core.batching import length_batches
from c2kv_core.slot_stream import SlotStates
from pipelines.train.prepare import Prepared

View = list[CompressedDocument]
"""Parts of all documents of a row, in order, each at its document's ratio."""


def row_views(
    extractor: Extractor, rows: Sequence[Prepared], *, in_step: tuple[int, ...] | None = None
) -> list[list[View]]:
    """For each row, its views. A part is extracted once for all ratios its views ask for.

    Args:
        extractor: model and sidecar.
        rows: of a micro-batch.
        in_step: extract every part at all these ratios in one call. Workers that share a base's layers must call
            them equally often, whatever ratios their rows drew.
    """
    parts: list[list[int]] = []
    ratios: list[tuple[int, ...]] = []
    # Rows that share documents share their lists too.
    places: dict[int, int] = {}
    wanted: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        for place, document in enumerate(row.parts):
            for part in document:
                wanted[id(part)] |= {view[place] for view in row.sample.ratios}
    for row in rows:
        for document in row.parts:
            for part in document:
                if id(part) not in places:
                    places[id(part)] = len(parts)
                    parts.append(part)
                    ratios.append(in_step or tuple(sorted(wanted[id(part)])))
    made = _extract(extractor, parts, ratios, one_call=in_step is not None)
    return [[_view(made, places, row, chosen) for chosen in row.sample.ratios] for row in rows]


def _extract(
    extractor: Extractor, parts: list[list[int]], ratios: list[tuple[int, ...]], *, one_call: bool
) -> list[dict[int, CompressedDocument]]:
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place, asked in enumerate(ratios):
        groups[asked].append(place)
    made: list[dict[int, CompressedDocument]] = [{} for _ in parts]
    for asked, places in groups.items():
        lengths = [len(parts[place]) for place in places]
        whole = [list(range(len(places)))]
        for batch in whole if one_call else length_batches(lengths, max_tokens=extractor.max_batch_tokens):
            chosen = [places[i] for i in batch]
            states_by_ratio = extractor.states([parts[place] for place in chosen], asked)
            for states in _tied(states_by_ratio) if one_call else states_by_ratio:
                for place, document in zip(chosen, states.documents(), strict=True):
                    made[place][states.ratio] = document
    return made


def _tied(states: list[SlotStates]) -> list[SlotStates]:
    """The same slots, each depending on all: ratios that no row uses then take part in the backward pass too."""
    nothing = sum(((s.keys.sum() + s.values.sum()) * 0.0 for s in states), states[0].keys.new_zeros(()))
    return [replace(s, keys=s.keys + nothing) for s in states]


def _view(
    made: list[dict[int, CompressedDocument]], places: dict[int, int], row: Prepared, ratios: tuple[int, ...]
) -> View:
    return [
        made[places[id(part)]][ratio]
        for document, ratio in zip(row.parts, ratios, strict=True)
        for part in document
    ]
