"""Sums over the live records of one namespace and fingerprint."""

from dataclasses import dataclass

import pyarrow as pa

SUMMED = ("parts", "slots", "source_tokens", "length")
"""Columns of the index that are summed."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What a namespace holds under one fingerprint."""

    namespace: str
    fingerprint: str
    documents: int
    parts: int
    slots: int
    source_tokens: int
    bytes: int
    """Of the records, heads and padding included."""


def sum_up(rows: pa.Table) -> list[Totals]:
    """Totals of index rows, sorted by namespace and fingerprint; no row becomes an object."""
    keys = ["namespace", "fingerprint"]
    summed = rows.group_by(keys).aggregate([(name, "sum") for name in SUMMED] + [([], "count_all")])
    return [
        Totals(
            namespace=group["namespace"],
            fingerprint=group["fingerprint"],
            documents=group["count_all"],
            parts=group["parts_sum"],
            slots=group["slots_sum"],
            source_tokens=group["source_tokens_sum"],
            bytes=group["length_sum"],
        )
        for group in summed.sort_by([(key, "ascending") for key in keys]).to_pylist()
    ]
