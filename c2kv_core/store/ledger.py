"""What a store holds, as columns and file by file: for plans over millions of documents.

Nothing here makes an object a row; a caller keeps what it needs of each table.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Self

import pyarrow as pa

from c2kv_core.store.backends import open_storage
from c2kv_core.store.index import Index
from c2kv_core.store.manifest import DEFAULT_BUCKETS, Manifest, read_manifest
from c2kv_core.store.names import check_namespace
from c2kv_core.store.storage import Storage
from c2kv_core.store.table import Table
from c2kv_core.store.texts import Texts


class Ledger:
    """Ids and content hashes of one namespace; empty where there is no store yet."""

    def __init__(self, storage: Storage, manifest: Manifest | None, namespace: str) -> None:
        """Use ``Ledger.open``."""
        self._storage, self._manifest = storage, manifest
        self._namespace = namespace

    @classmethod
    def open(cls, uri: str | os.PathLike[str], *, namespace: str) -> Self:
        """The ledger of a namespace as it is now.

        Raises:
            InputError: a URI that cannot hold a store, or a malformed namespace.
            StoreFormatError: something else is there, or a store of another format version.
            StoreError: I/O error.
        """
        storage = open_storage(uri)
        return cls(storage, read_manifest(storage), check_namespace(namespace))

    @property
    def buckets(self) -> int:
        """Partitions of the index; those of a new store where there is none."""
        return self._manifest.buckets if self._manifest else DEFAULT_BUCKETS

    def documents(self, fingerprint: str | None = None) -> Iterator[pa.Table]:
        """Columns ``doc_id`` and ``content_hash`` of the live rows, under one fingerprint or all of them.

        Raises:
            StoreError: the index cannot be read.
        """
        if self._manifest is not None:
            index = Index(self._storage, buckets=self.buckets)
            yield from self._tables(index.table, ["doc_id", "content_hash"], fingerprint)

    def metadata(self) -> Iterator[pa.Table]:
        """Columns ``doc_id`` and ``metadata`` of the documents whose text is kept.

        Raises:
            StoreError: the table cannot be read.
        """
        if self._manifest is not None:
            texts = Texts(self._storage, buckets=self.buckets)
            yield from self._tables(texts.table, ["doc_id", "metadata"], None)

    def set_metadata(self, metadata: Mapping[str, str | None]) -> int:
        """Replace what is carried along with documents whose text is kept, by id; how many there were.

        Raises:
            StoreError: I/O error or lasting write conflict.
        """
        if self._manifest is None:
            return 0
        return Texts(self._storage, buckets=self.buckets).set_metadata(self._namespace, metadata)

    def forget_texts(self, doc_ids: Iterable[str]) -> int:
        """Remove the kept texts of documents whose slots stay; how many there were.

        Raises:
            StoreError: I/O error or lasting write conflict.
        """
        if self._manifest is None:
            return 0
        return Texts(self._storage, buckets=self.buckets).delete(self._namespace, doc_ids)

    def _tables(self, table: Table, columns: list[str], fingerprint: str | None) -> Iterator[pa.Table]:
        where = {"namespace": [self._namespace]}
        if fingerprint is not None:
            where["fingerprint"] = [fingerprint]
        for paths in table.files().values():
            for path in paths:
                yield table.read([path], columns=columns, where=where)
