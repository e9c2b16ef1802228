"""Making a directory or a prefix of a bucket a store."""

from c2kv_core.errors import StoreError
from c2kv_core.store.failures import as_store_error
from c2kv_core.store.index import Index
from c2kv_core.store.manifest import Manifest, check_can_hold_store, read_manifest, write_manifest
from c2kv_core.store.storage import Storage
from c2kv_core.store.texts import Texts


def create_store(storage: Storage, *, buckets: int) -> Manifest:
    """Tables first, the manifest last. Of several that race all succeed, with the manifest of one.

    Raises:
        InputError: number of buckets out of range.
        StoreFormatError: other files are there.
        StoreError: I/O error.
    """
    check_can_hold_store(storage, buckets=buckets)
    with as_store_error(f"create the store at {storage.uri}"):
        Index(storage, buckets=buckets).table.create()
        Texts(storage, buckets=buckets).table.create()
    write_manifest(storage, buckets=buckets)
    manifest = read_manifest(storage)  # another creator's, if that was first
    if manifest is None:
        raise StoreError(f"cannot create the store at {storage.uri}: store.json is gone again")
    return manifest
