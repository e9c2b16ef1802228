"""Data files to rows: JSONL(.gz), JSON or Parquet. A bad row is left out and counted, a bad file stops the run."""

import gzip
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from c2kv_core.errors import CorpusError
from pipelines.train.adapters import UNREADABLE, to_row
from pipelines.train.config import DataFile, TrainConfig
from pipelines.train.row import RowError, TrainRow

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


@dataclass(frozen=True, kw_only=True)
class RowFile:
    """The usable rows of one data file."""

    name: str
    """File name without suffixes, for tables."""
    source: DataFile
    rows: tuple[TrainRow, ...]
    dropped: dict[str, int]
    """Rows left out, by reason."""
    first_fault: str | None
    """Place and reason of the first row left out."""


def check_files(config: TrainConfig) -> None:
    """Whether every data file can be opened, which costs nothing, before Ray and the model are brought up.

    Raises:
        CorpusError: the first that cannot.
    """
    for file in (*config.data, *config.dev):
        if "://" in file.path or "://" in config.data_dir:
            raise CorpusError(
                f"expected data files in a folder that every worker sees, got {file.path} in {config.data_dir}; "
                "copy them there"
            )
        path = config.data_path(file)
        _check_suffix(path)
        try:
            path.open("rb").close()
        except OSError as error:
            below = "" if Path(file.path).expanduser().is_absolute() else f" (data_dir is {config.data_dir})"
            raise CorpusError(
                f"cannot read the data file {path}: {error.strerror}; give one that exists{below}"
            ) from error


def read_files(config: TrainConfig, files: tuple[DataFile, ...]) -> list[RowFile]:
    """The rows of all files.

    Raises:
        CorpusError: a file is missing, unreadable as a whole, or has no usable row.
    """
    return [_read(config.data_path(file), file) for file in files]


def _read(path: Path, source: DataFile) -> RowFile:
    rows: list[TrainRow] = []
    dropped: Counter[str] = Counter()
    first_fault = None
    try:
        for place, record in islice(_records(path), source.limit):
            try:
                rows.append(to_row(record, source.layout))
            except RowError as fault:
                dropped[fault.reason] += 1
                first_fault = first_fault or f"{place}: {fault}"
    except (OSError, EOFError, pa.ArrowException) as error:
        raise CorpusError(f"cannot read the data file {path}: {error}") from error
    if not rows:
        raise CorpusError(f"expected usable rows in {path}, found none; the first fault: {first_fault}")
    name = path.name
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        name = name.removesuffix(suffix)
    return RowFile(name=name, source=source, rows=tuple(rows), dropped=dict(dropped), first_fault=first_fault)


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Each record and its place; one that is not JSON comes as None."""
    _check_suffix(path)
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from _parquet_records(path)
    elif name.endswith((".json", ".json.gz")):
        yield from _json_records(path)
    else:
        with _open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"line {number}", _parsed(line)


def _check_suffix(path: Path) -> None:
    if not path.name.lower().endswith(SUFFIXES):
        raise CorpusError(f"{path}: expected a data file ending in {', '.join(SUFFIXES)}")


def _parquet_records(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    for batch in pq.ParquetFile(path).iter_batches(batch_size=256):
        for record in batch.to_pylist():
            number += 1
            yield f"row {number}", record


def _json_records(path: Path) -> Iterator[tuple[str, Any]]:
    with _open_text(path) as file:
        whole = _parsed(file.read())
    if not isinstance(whole, list):
        raise CorpusError(f"{path}: expected a JSON list of rows; for one object a line, name it .jsonl")
    for number, record in enumerate(whole, start=1):
        yield f"row {number}", record


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _open_text(path: Path) -> io.TextIOWrapper:
    # Broken bytes make one row unreadable, not the whole file.
    if path.name.lower().endswith(".gz"):
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8", errors="surrogateescape")
    return path.open(encoding="utf-8", errors="surrogateescape")


def dropped_rows(files: list[RowFile]) -> dict[str, int]:
    """Rows left out over all files, by reason."""
    total: Counter[str] = Counter()
    for file in files:
        total.update(file.dropped)
    return dict(total)


__all__ = ["UNREADABLE", "RowFile", "check_files", "dropped_rows", "read_files"]
