"""The rows of a data file in Arrow pieces that are mapped, not read: a worker holds in memory what it draws.

Beside each row stand 64-bit keys of its documents' ids, so that pools of documents are made without looking at texts.
"""

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from pipelines.train.row import Passage, TrainRow

BATCH_ROWS = 256
"""Rows of one record batch."""
PIECE_BYTES = 64 * 2**20
"""A piece ends with the batch that makes it this long."""
_DOCUMENT = pa.struct([("doc_id", pa.string()), ("title", pa.string()), ("text", pa.string())])
SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("question", pa.string()),
        ("answer", pa.string()),
        ("supporting", pa.list_(pa.string())),
        ("documents", pa.list_(_DOCUMENT)),
        ("document_keys", pa.list_(pa.uint64())),
        # Of the first of the supporting documents by id: the one a row is found under.
        ("asks_key", pa.uint64()),
    ]
)

T = TypeVar("T")
Keys = NDArray[np.uint64]
Places = NDArray[np.int64]


def row_pieces(
    rows: Iterable[TrainRow], *, piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[pa.Buffer, int]]:
    """Arrow IPC files that hold the rows in their order, and the rows of each; texts must be encodable."""
    source = iter(rows)
    while first := list(islice(source, BATCH_ROWS)):
        sink, count = pa.BufferOutputStream(), 0
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            batch = first
            while batch:
                writer.write_batch(pa.RecordBatch.from_pylist([_record(row) for row in batch], schema=SCHEMA))
                count += len(batch)
                batch = list(islice(source, BATCH_ROWS)) if sink.tell() < piece_bytes else []
        yield sink.getvalue(), count


class _Sequence(Sequence[T]):
    """A sequence of which a part is a list, so that a class gives one place after the other."""

    @overload
    def __getitem__(self, number: int) -> T: ...
    @overload
    def __getitem__(self, number: slice) -> list[T]: ...
    def __getitem__(self, number: int | slice) -> T | list[T]:
        if isinstance(number, slice):
            return [self._at(each) for each in range(*number.indices(len(self)))]
        return self._at(number)

    @abstractmethod
    def _at(self, number: int) -> T: ...


class RowTable(_Sequence[TrainRow]):
    """Rows by number; each is decoded when it is asked for."""

    def __init__(self, pieces: Iterable[pa.Buffer]) -> None:
        """Pieces of ``row_pieces``, mapped or in memory.

        Raises:
            pyarrow.ArrowInvalid: not such a piece.
        """
        self._batches: list[pa.RecordBatch] = []
        for piece in pieces:
            reader = pa.ipc.open_file(piece)
            self._batches += [reader.get_batch(number) for number in range(reader.num_record_batches)]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64).tolist()
        asks_R = self._column("asks_key")
        self._asking_rows: Places = np.argsort(asks_R, kind="stable")
        self._asking_keys: Keys = asks_R[self._asking_rows]
        self.pool = DocumentPool(self)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends else 0

    def _at(self, number: int) -> TrainRow:
        batch, place = self._find(number)
        return _row(batch.slice(place, 1).to_pylist()[0])

    def asking(self, doc_id: str, *, within: frozenset[str] | set[str]) -> list[tuple[int, str]]:
        """Numbers and ids of rows of which this is the first supporting document by id and that need none but those
        of ``within``, in their order. No text is decoded: a document can have any number of questions."""
        key = np.uint64(_key(doc_id))
        left, right = (int(np.searchsorted(self._asking_keys, key, side=side)) for side in ("left", "right"))
        numbers_R = self._asking_rows[left:right]
        batches_R = np.searchsorted(self._ends, numbers_R, side="right")
        found: list[tuple[int, str]] = []
        for mine_R in np.split(numbers_R, np.flatnonzero(np.diff(batches_R)) + 1) if len(numbers_R) else ():
            batch, first = self._find(int(mine_R[0]))
            places = pa.array(mine_R - mine_R[0] + first)
            needed, ids = (batch.column(name).take(places).to_pylist() for name in ("supporting", "row_id"))
            found += [
                (number, row_id)
                for number, row_id, supporting in zip(mine_R.tolist(), ids, needed, strict=True)
                # Two ids can share a key.
                if supporting[0] == doc_id and within.issuperset(supporting)
            ]
        return found

    def document(self, number: int, place: int) -> Passage:
        """One document of a row."""
        batch, row = self._find(number)
        return Passage(**batch.column("documents")[row][place].as_py())

    def document_keys(self) -> tuple[Keys, Places, Places]:
        """For all documents in their order: keys, row numbers, and places within the row."""
        counts_R = np.concatenate(
            [np.empty(0, dtype=np.int64)]
            + [
                b.column("document_keys").value_lengths().to_numpy(zero_copy_only=False)
                for b in self._batches
            ]
        ).astype(np.int64)
        keys = [b.column("document_keys").flatten().to_numpy() for b in self._batches]
        rows_D = np.repeat(np.arange(len(self), dtype=np.int64), counts_R)
        places_D = np.arange(len(rows_D), dtype=np.int64) - np.repeat(
            np.cumsum(counts_R) - counts_R, counts_R
        )
        return np.concatenate([np.empty(0, dtype=np.uint64), *keys]), rows_D, places_D

    def _find(self, number: int) -> tuple[pa.RecordBatch, int]:
        number = number + len(self) if number < 0 else number
        if not 0 <= number < len(self):
            raise IndexError(f"expected a row from 0 to {len(self) - 1}, got {number}")
        batch = bisect_right(self._ends, number)
        return self._batches[batch], number - (int(self._ends[batch - 1]) if batch else 0)

    def _column(self, name: str) -> Keys:
        return np.concatenate(
            [np.empty(0, dtype=np.uint64)] + [b.column(name).to_numpy() for b in self._batches]
        )


class DocumentPool(_Sequence[Passage]):
    """Every document of a table once, in the order of first appearance: a paragraph of many questions counts once."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        keys_D, rows_D, places_D = table.document_keys()
        first = np.sort(np.unique(keys_D, return_index=True)[1])
        self._rows, self._places = rows_D[first], places_D[first]

    def __len__(self) -> int:
        return len(self._rows)

    def _at(self, number: int) -> Passage:
        return self._table.document(int(self._rows[number]), int(self._places[number]))


def _record(row: TrainRow) -> dict[str, Any]:
    return {
        "row_id": row.row_id,
        "question": row.question,
        "answer": row.answer,
        "supporting": sorted(row.supporting),
        "documents": [document._asdict() for document in row.documents],
        "document_keys": [_key(document.doc_id) for document in row.documents],
        "asks_key": _key(min(row.supporting)),
    }


def _row(record: dict[str, Any]) -> TrainRow:
    return TrainRow(
        row_id=record["row_id"],
        documents=tuple(Passage(**document) for document in record["documents"]),
        supporting=frozenset(record["supporting"]),
        question=record["question"],
        answer=record["answer"],
    )


def _key(doc_id: str) -> int:
    return xxhash.xxh3_64_intdigest(doc_id.encode())
