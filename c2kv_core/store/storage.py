"""Where a store's files live, as a handful of operations that every back end can do.

All paths are relative to the store's root and use ``/``. Files are immutable once put:
nothing is ever appended to or changed in place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

import pyarrow as pa

from c2kv_core.errors import InputError

WRITTEN = (
    "shards/",
    "index/",
    "documents/",
    "fingerprints/",
    "quarantine/",
    "probes/",
    "leases/",
    "failures/",
    "attempts/",
    "runs/",
    "served/",
    "hot/",
    "store.json",
)
"""What a store consists of: whatever else lies beside is not ours to touch."""
TEMPORARY = ".tmp/"
"""Prefix of unfinished files. No reader looks there; ``gc`` empties it."""
ALIGNMENT_BYTES = 64
"""Records begin at multiples of this many bytes of a file, and are handed out at such addresses."""
GAP_BYTES = 256 * 1024
"""Largest gap between two ranges of a file that are read as one."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One entry of a listing."""

    path: str
    """Relative to the root."""
    size_bytes: int
    modified_s: float
    """Seconds since the epoch, by the storage's clock."""


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """Bytes of a file."""

    path: str
    """Relative to the root."""
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class RangeGroup:
    """Ranges that one request reads."""

    whole: FileRange
    places: tuple[int, ...]
    """Of the ranges, in the order they were asked for."""


def coalesce(ranges: Sequence[FileRange]) -> list[RangeGroup]:
    """Ranges of one file that nearly touch become one: a request costs more than a few bytes too many."""
    order = sorted(range(len(ranges)), key=lambda place: (ranges[place].path, ranges[place].offset))
    groups: list[RangeGroup] = []
    for place in order:
        wanted = ranges[place]
        last = groups[-1] if groups else None
        end = wanted.offset + wanted.length
        if last is not None and last.whole.path == wanted.path:
            so_far = last.whole.offset + last.whole.length
            if wanted.offset - so_far <= GAP_BYTES:
                whole = FileRange(
                    path=wanted.path,
                    offset=last.whole.offset,
                    length=max(so_far, end) - last.whole.offset,
                )
                groups[-1] = RangeGroup(whole=whole, places=(*last.places, place))
                continue
        groups.append(RangeGroup(whole=wanted, places=(place,)))
    return groups


def split_uri(uri: str) -> SplitResult:
    """The parts of a URI.

    Raises:
        InputError: it is none.
    """
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError as error:
        raise InputError(f"expected a URI, got {uri!r}: {error}") from error
    if not uri.isprintable():
        raise InputError(f"expected a URI of printable characters, got {uri!r}")
    return parts


def aligned_buffer(offset: int, length: int) -> tuple[pa.Buffer, memoryview]:
    """New memory for a range, and a writable view of it; its address and ``offset`` are congruent modulo 64."""
    lead = offset % ALIGNMENT_BYTES
    memory = pa.allocate_buffer(lead + length)
    # Arrow hands its own allocations out as multiples of 64.
    return memory.slice(lead, length), memoryview(memory).cast("B")[lead:]


def read_ranges(storage: "Storage", ranges: Sequence[FileRange]) -> list[pa.Buffer | OSError]:
    """Every range, in the order asked for, once all are here; what failed as its error."""
    found = dict(storage.stream_ranges(ranges))
    return [found[number] for number in range(len(ranges))]


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

    def stream_ranges(self, ranges: Sequence[FileRange]) -> Iterator[tuple[int, pa.Buffer | OSError]]:
        """``get_range`` of each with its number, all asked for at once, each given as soon as it is here.

        What fails is given as its error.
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
