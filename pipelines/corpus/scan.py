"""One pass over a corpus: what each document is called, what it holds and where it stands, in a few bytes each."""

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice, repeat
from multiprocessing import get_context

import numpy as np
import xxhash
from numpy.typing import NDArray

from c2kv_core.errors import C2KVError, CorpusError
from c2kv_core.text import content_hash
from pipelines.corpus.columns import Columns, CorpusRow
from pipelines.corpus.files import CorpusFile
from pipelines.corpus.formats import OnBadRow, read_rows

KEY_BYTES = 16
BYTES_PER_DOCUMENT = KEY_BYTES + 8 + 8 + 4 + 4 + 4
"""Of a scan: key, content, metadata, size, file and place in it."""
TOLD = 10
"""Rows that are no documents, told of together."""
NAMED = 1000
"""Documents of a kind that are named; the others are counted."""

Keys = NDArray[np.bytes_]
"""(N,) of 16 bytes: digests of document ids."""
Digests = NDArray[np.uint64]
"""(N,): the first 8 bytes of content hashes."""


def key_of(doc_id: str) -> bytes:
    """xxh3-128 of an id: 1e8 ids collide with a chance of 1e-23."""
    return xxhash.xxh3_128_digest(doc_id.encode("utf-8", "surrogatepass"))


def keys_of(doc_ids: Sequence[str]) -> Keys:
    """Keys of ids, in their order."""
    return _as_keys(b"".join(map(key_of, doc_ids)))


def ids_beyond(doc_ids: Sequence[str], keys: Keys, known: Keys) -> list[str]:
    """Those of the ids, with their keys, whose keys are not among the known ones."""
    return [doc_ids[place] for place in np.flatnonzero(~np.isin(keys, known)).tolist()]


def digest_of(hexadecimal: str) -> int:
    """First 8 bytes of a SHA-256 given as hex: enough to tell whether one document changed."""
    return int(hexadecimal[:16], 16)


def metadata_digest(metadata: str | None) -> int:
    """64 bits of what is carried along; 0 where nothing is."""
    return xxhash.xxh3_64_intdigest(metadata.encode()) if metadata is not None else 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan:
    """The documents of a corpus in its order; N of them."""

    keys: Keys
    contents: Digests
    metadata: Digests
    sizes: NDArray[np.uint32]
    """Bytes of title and text; at most 2**32 - 1 are told."""
    files: NDArray[np.uint32]
    """Number of the file."""
    numbers: NDArray[np.uint32]
    """Place in the file, from 1."""
    empty: NDArray[np.bool_]
    """Whether there is no text."""
    empty_ids: tuple[str, ...]
    """The first ``NAMED`` of those."""
    read: int
    """Documents that were read, those that ``keep`` left out among them."""
    unseen_metadata: frozenset[str]
    """Columns to be carried along that none of these has."""

    @property
    def documents(self) -> int:
        """N."""
        return len(self.keys)


@dataclass
class _Growing:
    """Columns that grow; plain arrays, no object a document."""

    keys: bytearray = field(default_factory=bytearray)
    contents: "array[int]" = field(default_factory=lambda: array("Q"))
    metadata: "array[int]" = field(default_factory=lambda: array("Q"))
    sizes: "array[int]" = field(default_factory=lambda: array("I"))
    files: "array[int]" = field(default_factory=lambda: array("I"))
    numbers: "array[int]" = field(default_factory=lambda: array("I"))
    empty: "array[int]" = field(default_factory=lambda: array("b"))
    empty_ids: list[str] = field(default_factory=list)
    read: int = 0
    unseen_metadata: set[str] = field(default_factory=set)

    def see(self, row: CorpusRow) -> None:
        self.read += 1
        if self.unseen_metadata and row.metadata is not None:
            self.unseen_metadata -= json.loads(row.metadata).keys()

    def add(self, row: CorpusRow, file: int, number: int) -> None:
        doc_id, title, text = row.document
        is_empty = not text.strip()
        self.keys += key_of(doc_id)
        self.contents.append(digest_of(content_hash(title, text)))
        self.metadata.append(metadata_digest(row.metadata))
        self.sizes.append(min(2**32 - 1, len(title.encode()) + len(text.encode())))
        self.files.append(file)
        self.numbers.append(number)
        self.empty.append(is_empty)
        if is_empty and len(self.empty_ids) < NAMED:
            self.empty_ids.append(doc_id)

    def finish(self) -> Scan:
        return Scan(
            keys=_as_keys(bytes(self.keys)),
            contents=np.asarray(self.contents, np.uint64),
            metadata=np.asarray(self.metadata, np.uint64),
            sizes=np.asarray(self.sizes, np.uint32),
            files=np.asarray(self.files, np.uint32),
            numbers=np.asarray(self.numbers, np.uint32),
            empty=np.asarray(self.empty, np.int8).astype(bool),
            empty_ids=tuple(self.empty_ids),
            read=self.read,
            unseen_metadata=frozenset(self.unseen_metadata),
        )


def scan_corpus(
    files: Sequence[CorpusFile],
    columns: Columns,
    *,
    limit: int | None = None,
    keep: Callable[[str], bool] | None = None,
    processes: int = 1,
) -> Scan:
    """Read all documents of a corpus, in order, and keep nothing of their texts.

    Args:
        files: of the corpus.
        columns: which is what.
        limit: documents to read.
        keep: which of them are kept, by id; all by default. Picklable where there are several processes.
        processes: that read files at the same time; with a limit one reads them in turn.

    Raises:
        CorpusError: unreadable rows, an id that occurs twice, or a column to be carried along that no document has.
        C2KVError: one of several processes died.
    """
    if processes == 1 or limit is not None or len(files) == 1:
        scan = _scan(files, columns, limit, keep)
    else:
        # Not forked: the caller may hold threads of Arrow, Ray or botocore.
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            several = pool.map(_scan, ([file] for file in files), repeat(columns), repeat(None), repeat(keep))
            try:
                scan = _joined(list(several))
            except BrokenProcessPool as error:
                raise C2KVError(
                    f"one of {processes} processes that read the corpus died, perhaps for lack of memory; "
                    "lower plan_processes and run the command again"
                ) from error
    _check_unique(scan, files, columns)
    if limit is None and scan.read and scan.unseen_metadata:
        # A slip of the pen would take the labels of every stored document away.
        raise CorpusError(
            f"expected {', '.join(sorted(scan.unseen_metadata))} in the corpus, as columns.metadata asks; none of its "
            f"{scan.read:,} documents has it (null says that there is no value)"
        )
    return scan


def _scan(
    files: Sequence[CorpusFile], columns: Columns, limit: int | None, keep: Callable[[str], bool] | None
) -> Scan:
    growing = _Growing(unseen_metadata=set(columns.metadata))
    bad = _BadRows()
    for file, number, row in islice(placed_rows(files, columns, bad.add), limit):
        growing.see(row)
        if keep is None or keep(row.document.doc_id):
            growing.add(row, file, number)
    bad.check()
    return growing.finish()


def _joined(scans: Sequence[Scan]) -> Scan:
    """Scans of one file each, in order, as one."""
    names = ("keys", "contents", "metadata", "sizes", "numbers", "empty")
    columns = {name: np.concatenate([getattr(scan, name) for scan in scans]) for name in names}
    files = np.concatenate([np.full(scan.documents, place, np.uint32) for place, scan in enumerate(scans)])
    empty_ids = tuple(islice((doc_id for scan in scans for doc_id in scan.empty_ids), NAMED))
    return Scan(
        **columns,
        files=files,
        empty_ids=empty_ids,
        read=sum(scan.read for scan in scans),
        unseen_metadata=frozenset.intersection(*(scan.unseen_metadata for scan in scans)),
    )


class _BadRows:
    """Rows that are no documents, so that all of them can be mended after one look at the corpus."""

    def __init__(self) -> None:
        self._told: list[str] = []

    def add(self, error: CorpusError) -> None:
        self._told.append(str(error))
        if len(self._told) == TOLD:
            self.check()

    def check(self) -> None:
        if self._told:
            more = " (and perhaps more)" if len(self._told) == TOLD else ""
            raise CorpusError("; ".join(self._told) + more)


def placed_rows(
    files: Sequence[CorpusFile], columns: Columns, on_bad: OnBadRow | None = None
) -> Iterator[tuple[int, int, CorpusRow]]:
    """Documents with the number of their file and their place in it, from 1; ``on_bad`` as for ``read_rows``."""
    for place, file in enumerate(files):
        for number, row in enumerate(read_rows(file, columns, on_bad), start=1):
            yield place, number, row


def _check_unique(scan: Scan, files: Sequence[CorpusFile], columns: Columns) -> None:
    order = np.argsort(scan.keys, kind="stable")
    ordered = scan.keys[order]
    (twice,) = np.nonzero(ordered[1:] == ordered[:-1])
    if not len(twice):
        return
    first, again = (int(order[twice[0] + step]) for step in (0, 1))
    doc_id = _id_at(scan, again, files, columns)
    where = [f"{files[scan.files[place]]} (document {scan.numbers[place]})" for place in (first, again)]
    raise CorpusError(
        f"document id {doc_id!r} occurs in {where[0]} and again in {where[1]}; ids must be unique"
    )


def _id_at(scan: Scan, place: int, files: Sequence[CorpusFile], columns: Columns) -> str:
    rows = read_rows(files[scan.files[place]], columns)
    row = next(islice(rows, int(scan.numbers[place]) - 1, None))
    return row.document.doc_id


def _as_keys(joined: bytes) -> Keys:
    return np.frombuffer(joined, dtype=f"S{KEY_BYTES}")
