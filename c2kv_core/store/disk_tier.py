"""Records of a remote store, kept on a local disk: a copy that can be lost, and is checked like the original.

``<folder>/<digest of store, shard and offset>.record`` holds a record's bytes as the shard has them. A shard never
changes, so a copy is never stale; it is read only for a live index row, whose checksums it must match. Several
processes may share a folder, and its bytes.
"""

import hashlib
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from c2kv_core.document import StoredDocument
from c2kv_core.errors import InputError
from c2kv_core.identity import Identity
from c2kv_core.store.failures import first_line
from c2kv_core.store.row import IndexRow

logger = logging.getLogger(__name__)

SUFFIX = ".record"
DEFAULT_MAX_AGE_S = 86_400.0
_PENDING_BYTES = 64 * 2**20
"""Of records that wait to be written; what comes on top is not kept."""
_SWEPT_TO = 0.9
"""Share of the room that is filled after a sweep, so that not every write needs one."""
_UNSEEN = 1 / 16
"""Share of the room that is written before the next sweep at the latest: what other processes wrote is seen by it."""
_SWEEP_S = 600.0
"""Between two sweeps at most, also while nothing is written."""
_UNFINISHED_S = 600.0
"""Age after which an unfinished file is nobody's."""


class DiskTier:
    """Least recently used records go first when the bytes run out. Safe to share between threads."""

    def __init__(
        self, folder: str | os.PathLike[str], *, max_bytes: int, max_age_s: float = DEFAULT_MAX_AGE_S
    ) -> None:
        """Make the folder, for this user only, and sweep it.

        Args:
            folder: holds nothing else.
            max_bytes: of all records in it.
            max_age_s: seconds after which a copy is removed whatever its use, at most ten minutes later, so that bytes
                of documents that were erased in the store do not stay here.

        Raises:
            InputError: the folder cannot be made or written.
        """
        self._folder = Path(folder).expanduser().absolute()
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._used_bytes = 0
        self._unseen_bytes = 0
        """Written since the last sweep."""
        self._failure = ""
        self.evictions = 0
        """Records removed for lack of room or for their age."""
        self.damaged = 0
        """Records that did not match their checksums, and were removed."""
        try:
            self._make_folder()
            with tempfile.TemporaryFile(dir=self._folder):
                pass
            self._sweep()
        except OSError as error:
            raise InputError(f"cannot keep records in {self._folder}: {error.strerror or error}") from error
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="c2kv-disk")
        self._closed = threading.Event()
        threading.Thread(target=self._sweep_now_and_then, name="c2kv-disk-sweep", daemon=True).start()

    @property
    def used_bytes(self) -> int:
        """Of all records, as far as this process knows."""
        return self._used_bytes

    def holds(self, uri: str, row: IndexRow) -> bool:
        """Whether a copy of a row's record is there; it may still prove damaged."""
        try:
            return self._path(uri, row).exists()
        except OSError:  # a folder that can no longer be read holds nothing
            return False

    def get(self, uri: str, row: IndexRow, *, identity: Identity) -> StoredDocument | None:
        """The verified document at a row's place in a store; None when there is no sound copy."""
        path = self._path(uri, row)
        try:
            with pa.memory_map(str(path)) as file:
                record = file.read_buffer(file.size())
            now_ns, told = time.time_ns(), path.stat()
            if now_ns - told.st_mtime_ns > self._max_age_s * 1e9:
                return None
            # Time of access is that of use here, whatever the mount options; that of modification tells the age.
            os.utime(path, ns=(now_ns, told.st_mtime_ns))
        except OSError:  # not there, or removed by a sweep between two steps
            return None
        # Imported late, as torch is by it: looking at a store needs none of it.
        from c2kv_core.store.decode import decode_record

        outcome = decode_record(record, row=row, identity=identity)
        if isinstance(outcome, StoredDocument):
            return outcome
        logger.warning("a record in %s was damaged and is removed: %s", self._folder, outcome.detail)
        self.damaged += 1
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return None

    def keep(self, uri: str, row: IndexRow, record: pa.Buffer) -> None:
        """Keep a verified record; written beside the caller, or not at all when the disk is too slow or full."""
        with self._lock:
            if record.size + self._pending_bytes > _PENDING_BYTES or record.size > self._max_bytes:
                return
            self._pending_bytes += record.size
        try:
            self._writer.submit(self._write, self._path(uri, row), record)
        except RuntimeError:  # closed
            with self._lock:
                self._pending_bytes -= record.size

    def flush(self) -> None:
        """Wait until what was kept so far is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Stop writing; what is written stays for the next process."""
        self._closed.set()
        self._writer.shutdown(wait=True, cancel_futures=True)

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _sweep_now_and_then(self) -> None:
        """Also while nothing is written: copies get old all the same."""
        while not self._closed.wait(_SWEEP_S):
            with suppress(RuntimeError):  # closed
                self._writer.submit(self._try, self._sweep)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._failure = ""
        except OSError as error:
            if self._failure != first_line(error):  # a full disk is told of once
                self._failure = first_line(error)
                logger.warning("cannot keep records in %s: %s", self._folder, self._failure)

    def _path(self, uri: str, row: IndexRow) -> Path:
        key = hashlib.sha256(f"{uri}\0{row.shard}\0{row.offset}\0{row.length}".encode()).hexdigest()
        return self._folder / f"{key}{SUFFIX}"

    def _write(self, path: Path, record: pa.Buffer) -> None:
        try:
            self._try(lambda: self._copy(path, record))
        finally:
            with self._lock:
                self._pending_bytes -= record.size

    def _copy(self, path: Path, record: pa.Buffer) -> None:
        if path.exists():
            return
        self._make_folder()  # somebody may have tidied up
        # No fsync: a copy torn by a crash does not match its checksums.
        descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(record)
            os.replace(name, path)
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise
        self._used_bytes += record.size
        self._unseen_bytes += record.size
        if self._used_bytes > self._max_bytes or self._unseen_bytes > _UNSEEN * self._max_bytes:
            self._sweep()

    def _sweep(self) -> None:
        """Remove what is too old, then the least recently used, and count what is left."""
        now_s = time.time()
        found: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process sweeps too
                told = path.lstat()
                if not stat.S_ISREG(told.st_mode):
                    continue  # nobody of ours made it
                age_s = now_s - told.st_mtime
                if path.suffix == SUFFIX and age_s <= self._max_age_s:
                    found.append((told.st_atime, told.st_size, path))
                elif path.suffix == SUFFIX or (path.suffix == ".tmp" and age_s > _UNFINISHED_S):
                    path.unlink()
                    self.evictions += path.suffix == SUFFIX
        used = sum(size for _, size, _ in found)
        room = self._max_bytes if used <= self._max_bytes else _SWEPT_TO * self._max_bytes
        for _, size, path in sorted(found):
            if used <= room:
                break
            path.unlink(missing_ok=True)
            used -= size
            self.evictions += 1
        self._used_bytes = used
        self._unseen_bytes = 0
