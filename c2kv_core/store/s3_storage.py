"""A store in a bucket of S3, or of a server that speaks it. An object is seen whole or not at all."""

import errno
import re
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from c2kv_core.errors import InputError
from c2kv_core.store.s3_client import (
    ATTEMPTS,
    MISSING,
    POOL_CONNECTIONS,
    TAKEN,
    ObjectStorageError,
    S3Session,
    error_code,
    plain_errors,
)
from c2kv_core.store.storage import (
    TEMPORARY,
    WRITTEN,
    FileRange,
    StoredFile,
    aligned_buffer,
    coalesce,
    read_ranges,
    split_uri,
)

PART_BYTES = 16 * 2**20
"""Size of the parts in which larger objects are written, and of the ranges in which they are read."""

_BUCKET = re.compile(r"[a-zA-Z0-9._-]{3,255}")
_WRITER = "c2kv-writer"
"""Metadata of an object that ``create`` made: tells one's own lost answer from another's success."""


class S3Storage:
    """Objects under a prefix of a bucket. Safe to share between threads; each process makes its own."""

    def __init__(self, uri: str) -> None:
        """Take ``s3://bucket/prefix`` apart; nothing is asked of a server yet.

        Raises:
            InputError: no bucket, or a prefix that object storage or delta-rs would read differently.
        """
        parts = split_uri(uri)
        prefix = parts.path.strip("/")
        if not _BUCKET.fullmatch(parts.netloc) or parts.query or parts.fragment:
            raise InputError(f"expected s3://bucket/prefix as store, got {uri!r}")
        if set(prefix) & set("%\\") or ".." in PurePosixPath(prefix).parts or "//" in prefix:
            raise InputError(f"expected a store prefix without '%', '\\', '..' and '//', got {uri!r}")
        self._bucket, self._prefix = parts.netloc, f"{prefix}/" if prefix else ""
        self._session = S3Session()
        self._lock = threading.Lock()
        self._made: Any = None
        self._pool = ThreadPoolExecutor(max_workers=POOL_CONNECTIONS, thread_name_prefix="c2kv-s3")

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def table_uri(self, name: str) -> str:
        return f"{self.uri}/{name}"

    def table_options(self) -> dict[str, str]:
        return self._session.settings().delta_options()

    def get(self, path: str) -> pa.Buffer:
        with plain_errors(f"read {self._named(path)}"):
            # Not by HEAD: its errors have no body that would say what is wrong.
            answer = self._client.get_object(**self._place(path))
            size = int(answer["ContentLength"])
            if size > PART_BYTES:
                answer["Body"].close()
                return self.get_range(path, offset=0, length=size)
            buffer, view = aligned_buffer(0, size)
            try:
                _fill(view, answer)
            except _BrokenAnswerError:
                return self.get_range(path, offset=0, length=size)
        return buffer

    def get_range(self, path: str, *, offset: int, length: int) -> pa.Buffer:
        (found,) = read_ranges(self, [FileRange(path=path, offset=offset, length=length)])
        if isinstance(found, OSError):
            raise found
        return found

    def stream_ranges(self, ranges: Sequence[FileRange]) -> Iterator[tuple[int, pa.Buffer | OSError]]:
        """See ``Storage``. Neighbours share requests."""
        arriving = [(group, self._fetch(group.whole)) for group in coalesce(ranges)]
        for group, fetch in arriving:
            for number in group.places:
                start = ranges[number].offset - group.whole.offset
                try:
                    yield number, fetch.wait_for(start, ranges[number].length)
                except OSError as error:
                    yield number, error

    def put(self, path: str, data: pa.Buffer | bytes) -> None:
        buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
        with plain_errors(f"write {self._named(path)}"):
            if buffer.size <= PART_BYTES:
                self._client.put_object(**self._place(path), Body=buffer.to_pybytes())
            else:
                self._put_parts(path, buffer)

    def create(self, path: str, data: pa.Buffer | bytes) -> bool:
        body = data.to_pybytes() if isinstance(data, pa.Buffer) else bytes(data)
        writer = uuid.uuid4().hex
        with plain_errors(f"create {self._named(path)}"):
            try:
                self._client.put_object(
                    **self._place(path), Body=body, IfNoneMatch="*", Metadata={_WRITER: writer}
                )
            except ClientError as error:
                if error_code(error) not in TAKEN:
                    raise
                # The first answer may have been lost and the client have tried again.
                return self._writer_of(path) == writer
        return True

    def list_files(self, prefix: str) -> Iterator[StoredFile]:
        if prefix == TEMPORARY:
            yield from self._unfinished()
            return
        root = self._key(prefix) if prefix else self._prefix
        with plain_errors(f"list {self._named(prefix)}"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=root)
            for page in pages:
                for found in page.get("Contents", ()):
                    yield StoredFile(
                        path=found["Key"].removeprefix(self._prefix),
                        size_bytes=int(found["Size"]),
                        modified_s=found["LastModified"].timestamp(),
                    )

    def delete(self, path: str) -> bool:
        with plain_errors(f"delete {self._named(path)}"):
            if path.startswith(TEMPORARY):
                return self._abort(path)
            there = self.exists(path)
            self._client.delete_object(**self._place(path))
        return there

    def exists(self, path: str) -> bool:
        if not path:
            return False
        try:
            with plain_errors(f"look for {self._named(path)}"):
                self._client.head_object(**self._place(path))
        except FileNotFoundError:
            return False
        return True

    def make_durable(self, paths: Sequence[str]) -> None:
        """An object is durable once its write is acknowledged."""

    @property
    def _client(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._session.client()
        return self._made

    def _place(self, path: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._key(path)}

    def _key(self, path: str) -> str:
        # Shard paths come out of the index: one that leaves the prefix is damage, not a request.
        if path.startswith("/") or ".." in PurePosixPath(path).parts or "\0" in path:
            raise OSError(errno.EINVAL, "path leaves the store", path)
        return self._prefix + path

    def _named(self, path: str) -> str:
        return f"s3://{self._bucket}/{self._prefix}{path}"

    def _writer_of(self, path: str) -> str | None:
        try:
            found = self._client.head_object(**self._place(path))
        except ClientError as error:
            if error_code(error) in MISSING:
                return None
            raise
        writer: str | None = found.get("Metadata", {}).get(_WRITER)
        return writer

    # ---- reading

    def _fetch(self, wanted: FileRange) -> "_Fetch":
        """Start reading a range in pieces, cut where the parts of the object were: servers keep those apart."""
        buffer, view = aligned_buffer(wanted.offset, wanted.length)
        inside = wanted.offset % PART_BYTES
        ends = (
            [*range(PART_BYTES - inside, wanted.length, PART_BYTES), wanted.length] if wanted.length else []
        )
        pieces = [
            self._pool.submit(self._read_piece, wanted.path, wanted.offset + start, view[start:end])
            for start, end in pairwise([0, *ends])
        ]
        return _Fetch(buffer=buffer, ends=ends, pieces=pieces)

    def _read_piece(self, path: str, offset: int, into: memoryview) -> int:
        """Fill a view; how many bytes the object had for it. A broken answer is gone on with where it broke."""
        done = 0
        for attempt in range(1, ATTEMPTS + 1):
            with plain_errors(f"read {self._named(path)}"):
                try:
                    done += self._read_once(path, offset + done, into[done:])
                    return done
                except ClientError as error:
                    if error_code(error) in ("InvalidRange", "416"):
                        return done
                    raise
                except _BrokenAnswerError as broken:
                    done += broken.done
                    if attempt == ATTEMPTS:
                        raise ObjectStorageError(
                            f"read {self._named(path)}: the answer broke off {attempt} times: {broken}"
                        ) from broken
        raise AssertionError("the loop returns or raises")

    def _read_once(self, path: str, offset: int, into: memoryview) -> int:
        last = offset + len(into) - 1
        return _fill(into, self._client.get_object(**self._place(path), Range=f"bytes={offset}-{last}"))

    # ---- writing

    def _put_parts(self, path: str, buffer: pa.Buffer) -> None:
        upload = self._client.create_multipart_upload(**self._place(path))["UploadId"]
        sent: list[Future[dict[str, Any]]] = []
        whole = False
        try:
            for start in range(0, buffer.size, PART_BYTES):
                part = buffer.slice(start, min(PART_BYTES, buffer.size - start))
                sent.append(self._pool.submit(self._put_part, path, upload, len(sent) + 1, part))
            parts = [part.result() for part in sent]
            self._client.complete_multipart_upload(
                **self._place(path), UploadId=upload, MultipartUpload={"Parts": parts}
            )
            whole = True
        finally:
            if not whole:
                for one in sent:
                    one.cancel()
                self._client.abort_multipart_upload(**self._place(path), UploadId=upload)

    def _put_part(self, path: str, upload: str, number: int, part: pa.Buffer) -> dict[str, Any]:
        made = self._client.upload_part(
            **self._place(path), UploadId=upload, PartNumber=number, Body=part.to_pybytes()
        )
        return {"PartNumber": number, "ETag": made["ETag"]}

    def _unfinished(self) -> Iterator[StoredFile]:
        """Uploads in parts that were never completed, as files below ``.tmp/``: their parts take space unseen."""
        with plain_errors(f"list unfinished writes of {self.uri}"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            for page in pages:
                for upload in page.get("Uploads", ()):
                    key = upload["Key"].removeprefix(self._prefix)
                    if not key.startswith(WRITTEN):
                        continue  # another program's, in the same bucket
                    yield StoredFile(
                        path=f"{TEMPORARY}{upload['UploadId']}/{key}",
                        size_bytes=0,
                        modified_s=upload["Initiated"].timestamp(),
                    )

    def _abort(self, path: str) -> bool:
        upload, _, key = path.removeprefix(TEMPORARY).partition("/")
        try:
            self._client.abort_multipart_upload(**self._place(key), UploadId=upload)
        except ClientError as error:
            if error_code(error) in MISSING:
                return False
            raise
        return True


@dataclass(frozen=True, kw_only=True)
class _Fetch:
    """Memory that is being filled in pieces."""

    buffer: pa.Buffer
    ends: list[int]
    """Of each piece in the buffer."""
    pieces: list[Future[int]]
    """Bytes that each found: fewer than asked for at the object's end."""

    def wait_for(self, start: int, length: int) -> pa.Buffer:
        """Bytes of the buffer, once they are here; fewer where the object ends before."""
        here = 0
        for begin, end, piece in zip([0, *self.ends], self.ends, self.pieces, strict=False):
            if start < end and begin < start + length:
                here = begin + piece.result()
                if here < end:
                    break
        length = max(0, min(start + length, here) - start)
        return self.buffer.slice(start, length) if length else pa.py_buffer(b"")


class _BrokenAnswerError(Exception):
    """An answer ended before its length; ``done`` bytes of it arrived."""

    def __init__(self, done: int, message: str) -> None:
        super().__init__(message)
        self.done = done


def _fill(into: memoryview, answer: dict[str, Any]) -> int:
    """Read an answer's body whole; how long it is."""
    expected, done = int(answer["ContentLength"]), 0
    body = answer["Body"]
    try:
        while done < expected:
            got = body.readinto(into[done:])
            if not got:
                raise _BrokenAnswerError(done, f"{done} of {expected} bytes")
            done += got
    except (BotoCoreError, HTTPError, OSError) as error:
        raise _BrokenAnswerError(done, str(error)) from error
    finally:
        body.close()
    return done
