"""Whether a store can be written, asked before work starts instead of found out in its middle."""

import uuid

from c2kv_core.errors import StoreError
from c2kv_core.store.failures import as_store_error
from c2kv_core.store.names import PROBES
from c2kv_core.store.storage import Storage


def probe(storage: Storage) -> None:
    """Create an object, fail to create it again, read it back and delete it.

    Raises:
        StoreError: says which step failed and why: place, credentials, permission, clock, space; or that the
            storage overwrites what it was asked to create only if absent, so that commits could be lost.
    """
    path, content = f"{PROBES}{uuid.uuid4().hex}", b"c2kv"
    with as_store_error(f"write to the store at {storage.uri}"):
        created = storage.create(path, content)
        again = storage.create(path, b"other")
    with as_store_error(f"read back from the store at {storage.uri}"):
        read = storage.get(path).to_pybytes()
    with as_store_error(f"delete from the store at {storage.uri}"):
        storage.delete(path)
    if not created or again or read != content:
        raise StoreError(
            f"the storage at {storage.uri} does not keep to `create only if absent` (If-None-Match: *), on which "
            "commits rest; use a server that does"
        )
