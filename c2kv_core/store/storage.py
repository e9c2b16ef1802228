"""Where a store's files live, as a handful of operations that every back end can do.

All paths are relative to the store's root and use ``/``. Files are immutable once put:
nothing is ever appended to or changed in place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

TEMPORARY = ".tmp/"
"""Prefix of unfinished files. No reader looks there; ``gc`` empties it."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One entry of a listing."""

    path: str
    """Relative to the root."""
    size_bytes: int
    modified_s: float
    """Seconds since the epoch, by the storage's clock."""


class Storage(Protocol):
    """Operations on files. Absent files raise FileNotFoundError, any other failure OSError."""

    @property
    def uri(self) -> str:
        """The root, as a person would write it."""
        ...

    def table_uri(self, name: str) -> str:
        """Location of the Delta table ``name``, as delta-rs takes it."""
        ...

    def table_options(self) -> dict[str, str]:
        """Options that delta-rs needs to reach its tables here."""
        ...

    def get(self, path: str) -> pa.Buffer:
        """The whole file, mapped where the back end can."""
        ...

    def get_range(self, path: str, *, offset: int, length: int) -> pa.Buffer:
        """``length`` bytes from ``offset``, fewer where the file ends before.

        Without a copy where the back end can map files. The buffer's address and ``offset`` are
        congruent modulo 64, so what is aligned in the file is aligned in memory.
        """
        ...

    def put(self, path: str, data: pa.Buffer | bytes) -> None:
        """Write a whole file. On return it is durable; until then nobody sees any of it."""
        ...

    def create(self, path: str, data: pa.Buffer | bytes) -> bool:
        """``put`` unless the path exists. Of many that race exactly one gets True."""
        ...

    def list_files(self, prefix: str) -> Iterator[StoredFile]:
        """Every file whose path starts with the folder ``prefix`` (ends in ``/``; "" for all)."""
        ...

    def delete(self, path: str) -> bool:
        """Remove a file; False when it was not there."""
        ...

    def exists(self, path: str) -> bool:
        """Whether a file is there now."""
        ...

    def make_durable(self, paths: Sequence[str]) -> None:
        """Harden files that another library (delta-rs) has written; absent ones are passed over."""
        ...
