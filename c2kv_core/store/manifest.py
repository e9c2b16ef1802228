"""``store.json``: what makes a directory a store. Written last when one is made, never changed."""

import json
from dataclasses import asdict, dataclass

from c2kv_core.errors import InputError, StoreError, StoreFormatError
from c2kv_core.store.failures import as_store_error
from c2kv_core.store.names import ATTEMPTS, INDEX_TABLE, MANIFEST, TEXTS_TABLE
from c2kv_core.store.storage import TEMPORARY, Storage

FORMAT_VERSION = 1
"""Version of the record layout, the index's columns and the paths."""

DEFAULT_BUCKETS = 16
MAX_BUCKETS = 4096

_UNFINISHED = (TEMPORARY, ATTEMPTS, f"{INDEX_TABLE}/", f"{TEXTS_TABLE}/")
"""What an interrupted creation leaves behind, and a store that was removed under a running job; anything else is
somebody's data."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What every reader and writer of a store must agree on."""

    format_version: int
    buckets: int
    """Partitions of the index, fixed for the store's life."""


def read_manifest(storage: Storage) -> Manifest | None:
    """The store's manifest; None when there is no ``store.json``.

    Raises:
        StoreFormatError: not a manifest, or one of another format version.
        StoreError: I/O error.
    """
    with as_store_error(f"read {MANIFEST} at {storage.uri}"):
        try:
            text = storage.get(MANIFEST).to_pybytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        manifest = Manifest(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreFormatError(f"{MANIFEST} at {storage.uri} is not a store's manifest: {error}") from error
    if type(manifest.format_version) is not int or manifest.format_version != FORMAT_VERSION:
        raise StoreFormatError(
            f"expected a store of format version {FORMAT_VERSION} at {storage.uri}, "
            f"got {manifest.format_version}: use the release that wrote it, or extract again"
        )
    if type(manifest.buckets) is not int or not 1 <= manifest.buckets <= MAX_BUCKETS:
        raise StoreFormatError(
            f"expected 1 to {MAX_BUCKETS} buckets in the manifest {MANIFEST} at {storage.uri}, "
            f"got {manifest.buckets!r}"
        )
    return manifest


def require_store(storage: Storage) -> None:
    """That the store is still there: writing into a folder that was removed would make half of one.

    Raises:
        StoreError: it is gone, or I/O error.
    """
    with as_store_error(f"look for {MANIFEST} at {storage.uri}"):
        there = storage.exists(MANIFEST)
    if not there:
        raise StoreError(f"the store at {storage.uri} is gone: it was removed while a job wrote to it")


def write_manifest(storage: Storage, *, buckets: int) -> None:
    """Make the directory a store, unless another process does so first.

    Raises:
        StoreError: I/O error.
    """
    manifest = Manifest(format_version=FORMAT_VERSION, buckets=buckets)
    with as_store_error(f"create the store at {storage.uri}"):
        storage.create(MANIFEST, json.dumps(asdict(manifest), sort_keys=True).encode())


def check_can_hold_store(storage: Storage, *, buckets: int) -> None:
    """That a store can be made here: nothing there, or only what an interrupted creation left.

    Raises:
        InputError: number of buckets out of range.
        StoreFormatError: other files are there.
        StoreError: I/O error.
    """
    if type(buckets) is not int or not 1 <= buckets <= MAX_BUCKETS:
        raise InputError(f"expected 1 to {MAX_BUCKETS} buckets, got {buckets}")
    with as_store_error(f"list {storage.uri}"):
        if storage.exists(""):
            raise StoreFormatError(f"expected a directory at {storage.uri}, found a file")
        foreign = next((f.path for f in storage.list_files("") if not f.path.startswith(_UNFINISHED)), None)
    if foreign is not None:
        raise StoreFormatError(
            f"expected a store or an empty directory at {storage.uri}, found {foreign!r} "
            f"and no {MANIFEST}: choose another directory"
        )
