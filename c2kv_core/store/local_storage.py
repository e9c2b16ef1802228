"""A store on a local (or mounted) directory."""

import errno
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import pyarrow as pa

from c2kv_core.errors import InputError
from c2kv_core.store.storage import TEMPORARY, FileRange, StoredFile

_FOLDER_ATTEMPTS = 20


class LocalStorage:
    """Files under one directory, published by rename and durable by fsync."""

    def __init__(self, root: Path) -> None:
        """``root`` need not exist yet; ``~`` is expanded.

        Raises:
            InputError: a path that delta-rs would read differently, or a home that does not exist.
        """
        try:
            # Links are followed now: delta-rs takes ".." out of a path before it follows any.
            self._root = root.expanduser().resolve()
        except (RuntimeError, OSError, ValueError) as error:
            raise InputError(f"expected a directory as store, got {str(root)!r}: {error}") from error
        if set(str(self._root)) & set("%\\") or not str(self._root).isprintable():
            raise InputError(
                f"expected a store path without '%', '\\' and unprintable characters, got {str(self._root)!r}: "
                "choose another directory"
            )

    @property
    def uri(self) -> str:
        return str(self._root)

    def table_uri(self, name: str) -> str:
        # As a URI: delta-rs takes a bare path's '#' and '?' for parts of an address.
        return (self._root / name).as_uri()

    def table_options(self) -> dict[str, str]:
        return {}

    def get(self, path: str) -> pa.Buffer:
        return self.get_range(path, offset=0, length=self._resolve(path).stat().st_size)

    def get_range(self, path: str, *, offset: int, length: int) -> pa.Buffer:
        file = self._resolve(path)
        if not 0 <= offset < file.stat().st_size:
            return pa.py_buffer(b"")
        # Closing drops the descriptor; the map itself lives as long as a buffer or tensor over it.
        with pa.memory_map(str(file), "r") as mapped:
            whole = mapped.read_buffer()
        # Arrow's own slice does not look at the end of the buffer.
        return whole.slice(offset, max(0, min(length, whole.size - offset)))

    def stream_ranges(self, ranges: Sequence[FileRange]) -> Iterator[tuple[int, pa.Buffer | OSError]]:
        for number, wanted in enumerate(ranges):
            try:
                yield number, self.get_range(wanted.path, offset=wanted.offset, length=wanted.length)
            except OSError as error:
                yield number, error

    def put(self, path: str, data: pa.Buffer | bytes) -> None:
        target = self._resolve(path)
        temporary = self._write_temporary(data)
        try:
            _into_folder(os.replace, temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def create(self, path: str, data: pa.Buffer | bytes) -> bool:
        target = self._resolve(path)
        if target.exists():
            return False
        temporary = self._write_temporary(data)
        try:
            _into_folder(os.link, temporary, target)  # unlike rename, fails when the target exists
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def list_files(self, prefix: str) -> Iterator[StoredFile]:
        for folder, _, names in os.walk(self._resolve(prefix)):
            for name in sorted(names):
                file = Path(folder, name)
                with suppress(FileNotFoundError):  # removed by someone while we list
                    status = file.stat()
                    yield StoredFile(
                        path=file.relative_to(self._root).as_posix(),
                        size_bytes=status.st_size,
                        modified_s=status.st_mtime,
                    )

    def delete(self, path: str) -> bool:
        file = self._resolve(path)
        try:
            file.unlink()
        except FileNotFoundError:
            return False
        # Folders are nothing to a store, as in a bucket; those that others put files into are not empty.
        with suppress(FileNotFoundError):
            _fsync(file.parent)
        with suppress(OSError):
            for folder in file.parents:
                if folder in (self._root, self._root / TEMPORARY):
                    break
                folder.rmdir()
        return True

    def exists(self, path: str) -> bool:
        return self._resolve(path).is_file()

    def make_durable(self, paths: Sequence[str]) -> None:
        files = [self._resolve(path) for path in paths]
        folders = {parent for file in files for parent in file.parents if parent.is_relative_to(self._root)}
        for path in [*files, *folders]:
            with suppress(FileNotFoundError):
                _fsync(path)

    def _resolve(self, path: str) -> Path:
        # Shard paths come out of the index: one that leaves the root is damage, not a request.
        relative = PurePosixPath(path)
        if relative.is_absolute() or ".." in relative.parts or "\0" in path:
            raise OSError(errno.EINVAL, "path leaves the store", path)
        return self._root / relative

    def _write_temporary(self, data: pa.Buffer | bytes) -> Path:
        temporary = self._root / TEMPORARY / uuid.uuid4().hex
        _make_folder(temporary.parent)
        try:
            with temporary.open("xb") as file:
                file.write(memoryview(data))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return temporary


def _into_folder(move: Callable[[Path, Path], None], temporary: Path, target: Path) -> None:
    """Move a file, durably, to where a deletion may take the folder away while it is still empty."""
    for attempts_left in reversed(range(_FOLDER_ATTEMPTS)):
        try:
            _make_folder(target.parent)
            move(temporary, target)
            with suppress(FileNotFoundError):  # the file was deleted already, and its folder with it
                _fsync(target.parent)
            break
        except FileNotFoundError:
            if not attempts_left or not temporary.exists():
                raise


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents so that the new entries survive a power loss."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if folder.is_file():  # else somebody else has made the folder, and perhaps removed it again
            raise
    _fsync(folder.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
