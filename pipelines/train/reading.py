"""Data files to rows: JSON Lines, JSON or Parquet, local or in a bucket. Bad rows are counted, bad files stop."""

import json
import textwrap
import zlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from c2kv_core.errors import CorpusError
from pipelines.corpus.files import CorpusFile, Kind, object_bytes, open_file, open_text
from pipelines.train.adapters import UNREADABLE, to_row
from pipelines.train.config import Layout, TrainConfig
from pipelines.train.row import RowError, TrainRow

_PACKED = ("", ".gz", ".zst")
_LINES = tuple(f".{kind}{packed}" for kind in ("jsonl", "ndjson") for packed in _PACKED)
_LISTS = tuple(f".json{packed}" for packed in _PACKED)
SUFFIXES = (*_LINES, *_LISTS, ".parquet")
FAULT_CHARACTERS = 300
"""Most that is told of a fault of a row."""


class RowReader:
    """Rows of one file, in its order; counts those it leaves out."""

    def __init__(self, path: str, *, layout: Layout, limit: int | None) -> None:
        """What ``TrainConfig.data_path`` gives, and how its rows are laid out; at most ``limit`` are read."""
        self._path, self._layout, self._limit = path, layout, limit
        self.dropped: Counter[str] = Counter()
        self.first_fault: str | None = None

    def __iter__(self) -> Iterator[TrainRow]:
        """Usable rows.

        Raises:
            CorpusError: the file is missing or unreadable as a whole.
        """
        try:
            for place, record in islice(_records(locate(self._path)), self._limit):
                try:
                    yield to_row(record, self._layout)
                except RowError as fault:
                    self.dropped[fault.reason] += 1
                    self.first_fault = self.first_fault or _plain(f"{place}: {fault}")
        except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
            raise CorpusError(
                f"cannot read the data file {self._path}: {' '.join(str(error).split())}"
            ) from error


def check_files(config: TrainConfig) -> None:
    """Whether every data file can be opened, which costs little, before Ray and the model are brought up.

    Raises:
        CorpusError: the first that cannot; held-out files that tables could not tell apart.
    """
    names = [table_name(file.path) for file in config.dev]
    if len(set(names)) < len(names):
        raise CorpusError(f"expected held-out files of different names, got {', '.join(names)}; rename one")
    for file in (*config.data, *config.dev):
        path = config.data_path(file)
        try:
            open_file(locate(path)).close()
        except (OSError, ValueError) as error:
            # A ValueError is a path with a zero byte.
            below = f" (data_dir is {config.data_dir})" if config.is_below_data_dir(file) else ""
            reason = getattr(error, "strerror", None) or error
            raise CorpusError(
                f"cannot read the data file {path}: {reason}; give one that exists{below}"
            ) from error


def table_name(path: str) -> str:
    """File name without suffixes, for tables."""
    name = PurePosixPath(path).name
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        name = name.removesuffix(suffix)
    return name


def locate(path: str) -> CorpusFile:
    """A data file as the readers of corpora take it.

    Raises:
        CorpusError: its name has no known ending.
        OSError: it is not there.
    """
    name = PurePosixPath(path).name
    if not name.lower().endswith(SUFFIXES):
        raise CorpusError(f"{path}: expected a data file ending in {', '.join(SUFFIXES)}")
    kind: Kind = "parquet" if name.lower().endswith(".parquet") else "jsonl"
    return CorpusFile(path=path, name=name, size_bytes=_size(path), kind=kind)


def _size(path: str) -> int:
    if "://" not in path:
        return Path(path).stat().st_size
    size_bytes = object_bytes(path)
    if size_bytes is None:
        raise FileNotFoundError(2, "No such object", path)
    return size_bytes


def _records(file: CorpusFile) -> Iterator[tuple[str, Any]]:
    """Each record and its place; one that cannot be read comes as the reason."""
    name = file.name.lower()
    if file.kind == "parquet":
        yield from _parquet_records(file)
    elif name.endswith(_LISTS):
        yield from _list_records(file)
    else:
        # Broken bytes make one row unreadable, not the whole file.
        with open_text(file, encoding="utf-8-sig", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number}", _parsed(line)


def _parquet_records(file: CorpusFile) -> Iterator[tuple[str, Any]]:
    number = 0
    with open_file(file) as opened:
        for batch in pq.ParquetFile(opened).iter_batches(batch_size=256):
            for record in _rows_of(batch):
                number += 1
                yield f"row {number}", record


def _rows_of(batch: pa.RecordBatch) -> list[Any]:
    try:
        rows: list[Any] = batch.to_pylist()
    except (ValueError, ArithmeticError) as error:
        # A value that Python cannot hold: text that is no UTF-8, a time beyond its calendar.
        if batch.num_rows == 1:
            return [error]
        return [row for place in range(batch.num_rows) for row in _rows_of(batch.slice(place, 1))]
    return rows


def _list_records(file: CorpusFile) -> Iterator[tuple[str, Any]]:
    with open_text(file, encoding="utf-8-sig", errors="surrogateescape") as opened:
        whole = _parsed(opened.read())
    if not isinstance(whole, list):
        raise CorpusError(f"{file}: expected a JSON list of rows; for one object a line, name it .jsonl")
    for number, record in enumerate(whole, start=1):
        yield f"row {number}", record


def _plain(fault: str) -> str:
    """One line that can be printed and stored; ids and keys of a row may be of any length and no UTF-8."""
    return textwrap.shorten(fault, FAULT_CHARACTERS, placeholder=" ...").encode(errors="replace").decode()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        return ValueError(f"broken JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return error


__all__ = ["SUFFIXES", "UNREADABLE", "RowReader", "check_files", "locate", "table_name"]
