"""The documents to extract as a Ray Data source: one read task a file, streaming small blocks."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from pipelines.sources import corpus_root, read_documents, source_files

SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("title", pa.large_string()),
        ("text", pa.large_string()),
        ("ratios", pa.list_(pa.int32())),
    ]
)
"""Columns of a row: a document and the ratios it is to be extracted at."""


TASK_BYTES = 16 * 2**20
"""Bytes on disk that one read task takes on, at least one file."""


class PendingDocuments(Datasource):
    """Reads the documents of a plan's ``pending``, and no others, from their files."""

    def __init__(
        self, corpus: str, pending: Mapping[str, tuple[int, ...]], *, limit: int | None, block_documents: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._files = source_files(corpus)
        self._root = corpus_root(corpus)
        self._block_documents = block_documents
        self._limit = limit
        self._pending = ray.put(dict(pending))

    def estimate_inmemory_data_size(self) -> int | None:
        """Bytes on disk, for Ray's scheduling."""
        return sum(f.stat().st_size for f in self._files)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """Consecutive files, about ``TASK_BYTES`` a task: neither a task a tiny file nor one for everything."""
        if self._limit is not None:
            # A limit cuts the corpus in file order, so one task must read the files in turn.
            return [self._task(self._files)]
        groups: list[list[Path]] = []
        filled = TASK_BYTES
        for file in self._files:
            if filled >= TASK_BYTES:
                groups.append([])
                filled = 0
            groups[-1].append(file)
            filled += file.stat().st_size
        return [self._task(group) for group in groups]

    def _task(self, files: list[Path]) -> ReadTask:
        size = sum(f.stat().st_size for f in files)
        metadata = BlockMetadata(
            num_rows=None, size_bytes=size, input_files=tuple(str(f) for f in files), exec_stats=None
        )
        return ReadTask(
            _reader(files, self._root, self._pending, self._limit, self._block_documents),
            metadata,
            schema=SCHEMA,
        )


def _reader(
    files: list[Path],
    root: Path,
    pending: "ray.ObjectRef[dict[str, tuple[int, ...]]]",
    limit: int | None,
    block_documents: int,
) -> Callable[[], Iterable[pa.Table]]:
    def read() -> Iterable[pa.Table]:
        wanted: dict[str, tuple[int, ...]] = ray.get(pending)
        rows: list[dict[str, Any]] = []
        documents = (document for file in files for document in read_documents(file, root=root))
        # Not a document further than the plan: what lies behind the limit was never checked.
        for document in islice(documents, limit):
            ratios = wanted.get(document.doc_id)
            if ratios is None:
                continue
            rows.append({**document._asdict(), "ratios": list(ratios)})
            if len(rows) == block_documents:
                yield pa.Table.from_pylist(rows, schema=SCHEMA)
                rows = []
        if rows:
            yield pa.Table.from_pylist(rows, schema=SCHEMA)

    return read
