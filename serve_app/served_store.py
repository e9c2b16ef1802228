"""The store as a replica reads it: looking up apart from fetching, so that what is in memory costs no read."""

from collections.abc import Iterable

from c2kv_core.store import IndexRow, KVStore, Miss
from c2kv_core.store.names import check_namespace


class ServedStore(KVStore):
    """A ``KVStore`` that also tells what is live without reading it."""

    def lookup(self, ids: Iterable[str], *, namespace: str) -> dict[str, IndexRow | Miss]:
        """The live row of each document under the opened identity, or why there is none.

        As fresh as ``get``: other processes' commits are seen within ``index_refresh_s``.

        Raises:
            InputError: a malformed namespace.
            IdentityError: opened without an identity.
            StoreError: the index cannot be read.
        """
        identity = self._required_identity("look up documents")
        found = self._reader.lookup(check_namespace(namespace), ids)
        outcome: dict[str, IndexRow | Miss] = {}
        for doc_id, rows in found.items():
            own = next((row for row in rows if row.fingerprint == identity.fingerprint), None)
            if own is not None:
                outcome[doc_id] = own
            elif rows:
                outcome[doc_id] = Miss(reason="other_identity", detail="stored under another identity")
            else:
                outcome[doc_id] = Miss(reason="not_found", detail=f"no document {doc_id!r}")
        return outcome
