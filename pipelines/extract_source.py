"""The documents to extract as a Ray Data source: tasks that read files and hand on a unit a row."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa
import ray
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from c2kv_core.text import content_hash
from pipelines.corpus import Columns, CorpusFile, read_rows
from pipelines.extract_units import UNIT_SCHEMA, UnitDocument, gather, unit_row
from pipelines.plan import Pending

TASK_BYTES = 16 * 2**20
"""Bytes on disk that one read task takes on, at least one file."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a corpus is read and cut into units."""

    columns: Columns
    limit: int | None
    shard_tokens: int
    max_documents: int


class PendingDocuments(Datasource):
    """Reads the documents of a plan's ``pending``, and no others, from their files."""

    def __init__(self, files: Iterable[CorpusFile], pending: Pending, reading: Reading) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._files = list(files)
        self._reading = reading
        # Arrays: all readers of a machine see the same memory.
        self._pending = ray.put(pending)

    def estimate_inmemory_data_size(self) -> int | None:
        """Bytes on disk, for Ray's scheduling."""
        return sum(f.size_bytes for f in self._files)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Consecutive files, about ``TASK_BYTES`` a task: neither a task a tiny file nor one for everything."""
        if self._reading.limit is not None:
            # A limit cuts the corpus in file order, so one task must read the files in turn.
            return [self._task(self._files)]
        groups: list[list[CorpusFile]] = []
        filled = TASK_BYTES
        for file in self._files:
            if filled >= TASK_BYTES:
                groups.append([])
                filled = 0
            groups[-1].append(file)
            filled += file.size_bytes
        return [self._task(group) for group in groups]

    def _task(self, files: list[CorpusFile]) -> ReadTask:
        metadata = BlockMetadata(
            num_rows=None,
            size_bytes=sum(f.size_bytes for f in files),
            input_files=tuple(f.path for f in files),
            exec_stats=None,
        )
        return ReadTask(_reader(files, self._pending, self._reading), metadata, schema=UNIT_SCHEMA)


def _reader(
    files: list[CorpusFile], pending: "ray.ObjectRef[Pending]", reading: Reading
) -> Callable[[], Iterable[pa.Table]]:
    def read() -> Iterable[pa.Table]:
        wanted = _wanted(files, ray.get(pending), reading)
        for group in gather(wanted, shard_tokens=reading.shard_tokens, max_documents=reading.max_documents):
            yield unit_row(group)

    return read


def _wanted(files: list[CorpusFile], pending: Pending, reading: Reading) -> Iterator[UnitDocument]:
    rows = (row for file in files for row in read_rows(file, reading.columns))
    # Not a document further than the plan: what lies behind the limit was never checked.
    for (doc_id, title, text), metadata in islice(rows, reading.limit):
        place = pending.place(doc_id)
        if place is None:
            continue
        yield UnitDocument(
            doc_id=doc_id,
            title=title,
            text=text,
            metadata=metadata,
            content_hash=content_hash(title, text),
            ratios=pending.ratios_at(place),
            stored=bool(pending.stored[place]),
        )
