"""What a run trains on, taken in once: data files to row tables in the run folder, by Ray Data where workers are.

A run goes on with the rows it began with, whatever becomes of the files, and every worker sees the same. Pieces come
first and the list that names them last, so that a run that was cut off while it read starts to read anew.
"""

import tempfile
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from c2kv_core.errors import CorpusError, InputError, TrainingError
from c2kv_core.store import Storage, open_storage
from c2kv_core.store.checksum import digest
from pipelines.ray_data import quiet_datasets
from pipelines.train.config import DataFile, Layout, TrainConfig
from pipelines.train.folder import RunFolder
from pipelines.train.reading import RowReader, table_name
from pipelines.train.row_table import RowTable, row_pieces

ROWS = "rows.json"
"""List of all tables; where it is, they are whole."""
ROW_FOLDER = "rows/"
"""Below the run folder; holds the pieces."""
READER_CPUS = 0.5
"""Logical CPUs of a task that reads a file."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One Arrow file of a table."""

    path: str
    """Below the run folder."""
    rows: int
    checksum: str
    """xxh3-128 of its bytes, in hexadecimal."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a data file came to."""

    path: str
    """Of the data file."""
    pieces: tuple[Piece, ...]
    dropped: dict[str, int]
    """Rows left out, by reason."""
    first_fault: str | None
    """Place and reason of the first row left out."""


@dataclass(frozen=True, kw_only=True)
class ReadTask:
    """One data file to take in; small and picklable."""

    number: int
    """Among all of the run, which names its pieces."""
    path: str
    layout: Layout
    limit: int | None
    location: str
    """Of the run folder."""


class RowFile:
    """The usable rows of one data file."""

    def __init__(self, source: DataFile, table: Table, rows: RowTable) -> None:
        self.source, self.rows = source, rows
        self.name = table_name(table.path)
        """File name without suffixes, for tables."""
        self.dropped, self.first_fault = table.dropped, table.first_fault


_TABLES = TypeAdapter(list[Table])


def is_taken_in(folder: RunFolder) -> bool:
    """Whether the run has its rows.

    Raises:
        TrainingError: the run folder cannot be reached.
    """
    with folder.reading():
        return folder.storage.exists(ROWS)


def take_in(config: TrainConfig, folder: RunFolder, *, on_ray: bool = False) -> None:
    """Read all data files into the run folder, unless that was done; on Ray in parallel, by Ray Data.

    Raises:
        CorpusError: a file is missing, unreadable as a whole, or has no usable row.
        TrainingError: the run folder cannot be written, or readers were lost more than ``max_failures`` times.
    """
    if is_taken_in(folder):
        return
    tasks = [
        ReadTask(
            number=number,
            path=config.data_path(file),
            layout=file.layout,
            limit=file.limit,
            location=folder.location,
        )
        for number, file in enumerate((*config.data, *config.dev))
    ]
    with folder.writing():
        if on_ray:
            tables = _by_ray_data(tasks, config.max_failures)
        else:
            tables = [read_table(task, folder.storage) for task in tasks]
        # Of two drivers that read at once the first decides, as they may have found different files.
        folder.storage.create(ROWS, _TABLES.dump_json(tables, indent=2) + b"\n")
        _remove_leftovers(folder.storage, _listed(folder, len(tasks)))


def _remove_leftovers(storage: Storage, tables: list[Table]) -> None:
    """Pieces of a reading that was cut off or came second, and those whose list was removed."""
    listed = {piece.path for table in tables for piece in table.pieces}
    for file in storage.list_files(ROW_FOLDER):
        if file.path not in listed:
            storage.delete(file.path)


def read_table(task: ReadTask, storage: Storage) -> Table:
    """Read one data file and put its pieces.

    Raises:
        CorpusError: it is missing, unreadable as a whole, or has no usable row.
        OSError: the pieces cannot be put.
    """
    reader = RowReader(task.path, layout=task.layout, limit=task.limit)
    pieces = []
    for number, (data, rows) in enumerate(row_pieces(reader)):
        checksum = digest(data).hex()
        # Named by content, so that nobody who reads other files puts theirs in this place.
        path = f"{ROW_FOLDER}{task.number:03d}/{number:05d}-{checksum}.arrow"
        storage.put(path, data)
        pieces.append(Piece(path=path, rows=rows, checksum=checksum))
    if not pieces:
        found = f"none; the first fault: {reader.first_fault}" if reader.first_fault else "no row at all"
        raise CorpusError(f"expected usable rows in {task.path}, found {found}")
    return Table(
        path=task.path, pieces=tuple(pieces), dropped=dict(reader.dropped), first_fault=reader.first_fault
    )


def open_rows(config: TrainConfig) -> tuple[list[RowFile], list[RowFile]]:
    """Tables of the run's ``data`` and of its ``dev``, taken in first where nobody has done so.

    Raises:
        CorpusError: as ``take_in``.
        TrainingError: the list or a piece is missing or not what was written.
    """
    folder = RunFolder(config)
    take_in(config, folder)
    sources = (*config.data, *config.dev)
    files = [
        RowFile(source, table, _open(folder, table.pieces))
        for source, table in zip(sources, _listed(folder, len(sources)), strict=True)
    ]
    return files[: len(config.data)], files[len(config.data) :]


def dropped_rows(files: Iterable[RowFile]) -> dict[str, int]:
    """Rows left out over all files, by reason."""
    total: dict[str, int] = {}
    for file in files:
        for reason, count in file.dropped.items():
            total[reason] = total.get(reason, 0) + count
    return total


def _listed(folder: RunFolder, count: int) -> list[Table]:
    try:
        with folder.reading():
            tables = _TABLES.validate_python(folder.get_json(ROWS))
    except ValueError as error:
        raise _damaged_list(folder, count) from error
    if len(tables) != count:
        raise _damaged_list(folder, count)
    return tables


def _damaged_list(folder: RunFolder, count: int) -> TrainingError:
    return TrainingError(
        f"expected {count} tables in {folder.location}/{ROWS}, got a damaged list; remove it to read the data "
        "files anew"
    )


def _open(folder: RunFolder, pieces: Iterable[Piece]) -> RowTable:
    buffers = []
    for piece in pieces:
        try:
            buffer = _mapped(folder.storage, piece.path)
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            advice = (
                f"remove {ROWS} there to read the data files anew" if gone else "run the same command again"
            )
            raise TrainingError(
                f"cannot read the run's rows in {folder.location}/{piece.path}: {error.strerror or error}; {advice}"
            ) from error
        if digest(buffer).hex() != piece.checksum:
            raise TrainingError(
                f"the run's rows in {folder.location}/{piece.path} are not those that were written; remove {ROWS} "
                "there to read the data files anew"
            )
        buffers.append(buffer)
    return RowTable(buffers)


def _mapped(storage: Storage, path: str) -> pa.Buffer:
    """A file's bytes outside of the process's own memory."""
    buffer = storage.get(path)
    if "://" not in storage.uri:
        return buffer
    with tempfile.NamedTemporaryFile(prefix="c2kv-rows-", suffix=Path(path).suffix) as copy:
        copy.write(memoryview(buffer))
        copy.flush()
        # The map outlives the name.
        return pa.memory_map(copy.name).read_buffer()


def _by_ray_data(tasks: list[ReadTask], max_failures: int) -> list[Table]:
    """A Ray Data task for each file; only what became of it comes back."""
    import ray.data
    from ray.exceptions import RayError

    numbered = {task.number: task for task in tasks}
    read = partial(_read_on_ray, tasks=numbered)
    with quiet_datasets(), warnings.catch_warnings():
        # Ray 2.60 has no other name for a task's tries yet; by default a file that ends its readers is read for ever.
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        dataset = ray.data.from_items([{"number": n} for n in numbered], override_num_blocks=len(tasks))
        try:
            done = dataset.map(read, num_cpus=READER_CPUS, max_retries=max_failures).take_all()
        except RayError as error:
            raise TrainingError(
                f"reading the data files stopped: {' '.join(str(error).split())[:500]}; give the nodes more "
                "memory or cut the largest file into several, then run the same command"
            ) from error
    reports = sorted(done, key=lambda row: int(row["number"]))
    for row in reports:
        if row["fault"]:
            raise CorpusError(row["fault"]) if row["input"] else TrainingError(row["fault"])
    return [TypeAdapter(Table).validate_json(row["table"]) for row in reports]


def _read_on_ray(row: dict[str, Any], tasks: dict[int, ReadTask]) -> dict[str, Any]:
    """Runs on any node. Faults are told in the row: raised, they would be tried again and come back as a trace."""
    task = tasks[int(row["number"])]
    report = {"number": task.number, "table": "", "fault": "", "input": False}
    try:
        table = read_table(task, open_storage(task.location))
    except InputError as error:
        return {**report, "fault": str(error), "input": True}
    except OSError as error:
        return {**report, "fault": f"cannot write the run folder {task.location}: {error.strerror or error}"}
    return {**report, "table": TypeAdapter(Table).dump_json(table).decode()}
