"""The files of a corpus, local or in a bucket, and their bytes."""

import gzip
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn, cast
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from c2kv_core.errors import CorpusError
from c2kv_core.store import Storage, open_storage

Kind = Literal["jsonl", "csv", "parquet", "text"]

SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "jsonl": tuple(f".{kind}{packed}" for kind in ("jsonl", "ndjson") for packed in ("", ".gz", ".zst")),
    "csv": (".csv", ".csv.gz", ".csv.zst"),
    "parquet": (".parquet",),
    "text": (".md", ".txt"),
}
"""Endings by which files are told apart."""
ALL_SUFFIXES = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)

_DELTA_LOG = "_delta_log/"
_READ_AHEAD_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class CorpusFile:
    """One file of a corpus. Small and picklable: readers on other machines open it anew."""

    path: str
    """Local path, or ``s3://`` URI."""
    name: str
    """Path below the corpus's root."""
    size_bytes: int
    kind: Kind
    constants: tuple[tuple[str, Any], ...] = ()
    """Columns that are the same in all its rows and not written there: the partition of a Delta table."""

    def __str__(self) -> str:
        return self.path


def corpus_files(corpus: str) -> list[CorpusFile]:
    """Files of a corpus: the file itself, the newest version of a Delta table, or all readable files below a folder.

    In order of path.

    Raises:
        CorpusError: nothing there, nothing readable in it, or something that cannot be listed.
    """
    if not corpus:
        raise CorpusError("expected the path of a corpus, got ''")
    try:
        files = _in_bucket(corpus) if corpus.startswith("s3://") else _on_disk(_expanded(corpus))
    except (OSError, DeltaError) as error:
        raise CorpusError(f"cannot list the corpus {corpus}: {' '.join(str(error).split())}") from error
    if not files:
        raise CorpusError(f"expected {', '.join(ALL_SUFFIXES)} files in {corpus}, found none")
    return files


def open_file(file: CorpusFile) -> BinaryIO:
    """A file's bytes, to be read in any order.

    Raises:
        OSError: it cannot be read.
    """
    if not file.path.startswith("s3://"):
        return open(file.path, "rb")
    folder, _, name = file.path.rpartition("/")
    raw = _Ranges(open_storage(folder), name, file.size_bytes)
    return cast(BinaryIO, io.BufferedReader(raw, buffer_size=_READ_AHEAD_BYTES))


@contextmanager
def open_text(file: CorpusFile, **options: Any) -> Iterator[io.TextIOWrapper]:
    """A file as text, with compression by ``.gz`` or ``.zst`` taken off; ``options`` are those of TextIOWrapper.

    Raises:
        OSError: it cannot be read.
        EOFError: packed, and without a byte.
    """
    with open_file(file) as opened:
        unpacked: Any = opened
        if file.size_bytes == 0 and file.path.lower().endswith((".gz", ".zst")):
            # Both libraries take it for the packed form of nothing.
            raise EOFError(
                "expected packed data, got an empty file: it was cut off, or is still being written"
            )
        if file.path.lower().endswith(".gz"):
            unpacked = gzip.GzipFile(fileobj=opened)
        elif file.path.lower().endswith(".zst"):
            unpacked = io.BufferedReader(cast(Any, pa.CompressedInputStream(opened, "zstd")))
        with io.TextIOWrapper(unpacked, **options) as text:
            yield text


def object_bytes(uri: str) -> int | None:
    """Size of one object of a bucket; None where there is none.

    Raises:
        OSError: the bucket cannot be listed.
    """
    folder, _, name = uri.rpartition("/")
    # Of a prefix, all keys that begin with it are listed.
    for found in open_storage(folder).list_files(name) if folder != "s3:/" else ():
        if found.path == name:
            return found.size_bytes
    return None


def _on_disk(path: Path) -> list[CorpusFile]:
    if path.is_file():
        return [_file(str(path), path.name, path.stat().st_size)]
    if not path.is_dir():
        raise CorpusError(
            f"expected a corpus at {path}, found nothing; give a JSONL, CSV or Parquet file, a folder or a Delta table"
        )
    if (path / _DELTA_LOG).is_dir():
        return _of_table(str(path), path.resolve().as_uri(), {})
    found = []
    for file in sorted(_readable_below(path)):
        # Not is_file(): of a link to nothing it says no, as if its documents were gone.
        status = file.stat()
        if stat.S_ISREG(status.st_mode):
            found.append(_file(str(file), file.relative_to(path).as_posix(), status.st_size))
    return found


def _readable_below(root: Path) -> Iterator[Path]:
    """What is named like a file of a corpus; links to folders are not followed."""

    def fail(error: OSError) -> NoReturn:
        raise error

    # Path.rglob passes over folders that it may not read.
    for folder, folders, names in os.walk(root, onerror=fail):
        if _DELTA_LOG.rstrip("/") in folders:
            _refuse_table(str(root), folder)
        yield from (Path(folder, name) for name in names if name.lower().endswith(ALL_SUFFIXES))


def _refuse_table(corpus: str, table: str) -> NoReturn:
    raise CorpusError(
        f"expected files in {corpus}, found a Delta table or a store at {table}: without its log, "
        "deleted rows would be read as well; give the table itself as the corpus, or move it elsewhere"
    )


def _in_bucket(uri: str) -> list[CorpusFile]:
    uri = uri.rstrip("/")
    storage = open_storage(uri)
    below = list(storage.list_files(""))
    if any(found.path.startswith(_DELTA_LOG) for found in below):
        return _of_table(uri, storage.uri, storage.table_options())
    for found in below:
        table, log, _ = found.path.partition(f"/{_DELTA_LOG}")
        if log:
            _refuse_table(uri, f"{uri}/{table}")
    if below:
        readable = sorted((f for f in below if f.path.lower().endswith(ALL_SUFFIXES)), key=lambda f: f.path)
        return [_file(f"{uri}/{f.path}", f.path, f.size_bytes) for f in readable]
    size_bytes = object_bytes(uri)
    if size_bytes is None:
        raise CorpusError(f"expected a corpus at {uri}, found nothing")
    return [_file(uri, uri.rpartition("/")[2], size_bytes)]


def _of_table(corpus: str, uri: str, options: dict[str, str]) -> list[CorpusFile]:
    """The data files of a Delta table's newest version."""
    table = DeltaTable(uri, storage_options=options)
    if table.protocol().min_reader_version > 1:
        raise CorpusError(
            f"expected a Delta table of reader version 1 at {corpus}, got {table.protocol().min_reader_version}: "
            "deletion vectors and column mapping are not read; export it, or rewrite it without them"
        )
    partitions = table.metadata().partition_columns
    files = []
    for added in pa.table(table.get_add_actions(flatten=True)).to_pylist():
        name = unquote(added["path"])
        constants = tuple((column, added[f"partition.{column}"]) for column in partitions)
        files.append(
            CorpusFile(
                path=f"{corpus.rstrip('/')}/{name}",
                name=name,
                size_bytes=added["size_bytes"],
                kind="parquet",
                constants=constants,
            )
        )
    return sorted(files, key=lambda file: file.path)


def _file(path: str, name: str, size_bytes: int) -> CorpusFile:
    for kind, suffixes in SUFFIXES.items():
        if name.lower().endswith(suffixes):
            return CorpusFile(path=path, name=name, size_bytes=size_bytes, kind=kind)
    raise CorpusError(f"{path}: expected a file ending in {', '.join(ALL_SUFFIXES)}")


def _expanded(corpus: str) -> Path:
    try:
        return Path(corpus.removeprefix("file://")).expanduser()
    except RuntimeError as error:
        raise CorpusError(f"expected a corpus at {corpus}, found no such home directory") from error


class _Ranges(io.RawIOBase):
    """An object of a bucket as a file; every read is a range request."""

    def __init__(self, storage: Storage, path: str, size_bytes: int) -> None:
        self._storage, self._path, self._size = storage, path, size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        wanted = min(len(view), self._size - self._at)
        if wanted <= 0:
            return 0
        data = self._storage.get_range(self._path, offset=self._at, length=wanted)
        if data.size < wanted:
            raise EOFError(
                f"the object ends {wanted - data.size} bytes early: it was replaced while it was read"
            )
        view[:wanted] = memoryview(data).cast("B")
        self._at += wanted
        return wanted
