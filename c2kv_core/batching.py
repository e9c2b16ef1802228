"""Batches of documents of similar length, so that little of a batch is padding."""

from collections.abc import Sequence

MAX_PADDING = 0.1
"""Largest share of a batch's tokens that may be padding."""


def length_batches(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Places of documents, grouped by length; the padded size of a group stays within ``max_tokens``.

    A document longer than ``max_tokens`` is a group of its own. At most ``MAX_PADDING`` of a group is padding.
    """
    order = sorted(range(len(lengths)), key=lambda place: (lengths[place], place))
    batches: list[list[int]] = []
    real = 0
    for place in order:
        length = lengths[place]
        if batches:
            size = (len(batches[-1]) + 1) * length
            if size <= max_tokens and real + length >= (1 - MAX_PADDING) * size:
                batches[-1].append(place)
                real += length
                continue
        batches.append([place])
        real = length
    return batches
