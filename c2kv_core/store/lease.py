"""Work that only one process may do at a time, by numbered objects that only one of several can create.

Merging a table's small files is such work: of two that merge the same files at once delta-rs refuses neither, and every
row is there twice. A lease ends when it is given back, or by the clock, so that a holder that died blocks nobody for
longer than ``LEASE_S``.
"""

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from c2kv_core.store.names import LEASES
from c2kv_core.store.storage import Storage

LEASE_S = 3600.0
"""Longer than the work ever takes, clocks that differ included."""


@contextmanager
def lease(storage: Storage, name: str) -> Iterator[bool]:
    """Hold the lease ``name`` for the time of a ``with`` block; gives False where another holds it.

    Raises:
        OSError: I/O error.
    """
    path = _take(storage, f"{LEASES}{name}/")
    try:
        yield path is not None
    finally:
        if path is not None:
            storage.put(path, _note(until_s=0.0))


def _take(storage: Storage, folder: str) -> str | None:
    """The path of the lease; None where another holds it or was faster."""
    before = sorted(file.path for file in storage.list_files(folder))
    if before and _is_held(storage, before[-1]):
        return None
    number = 1 + int(before[-1].removeprefix(folder).removesuffix(".json")) if before else 0
    path = f"{folder}{number:012}.json"
    if not storage.create(path, _note(until_s=time.time() + LEASE_S)):
        return None
    for old in before:
        storage.delete(old)
    return path


def _is_held(storage: Storage, path: str) -> bool:
    try:
        return float(json.loads(storage.get(path).to_pybytes())["until_s"]) > time.time()
    except FileNotFoundError:
        return True  # removed by one who holds a later lease
    except (ValueError, KeyError, TypeError):
        return False


def _note(*, until_s: float) -> bytes:
    return json.dumps({"holder": uuid.uuid4().hex, "until_s": until_s}).encode()
