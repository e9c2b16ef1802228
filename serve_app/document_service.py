"""Documents that clients put, look at and delete, inside a replica and without Ray."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, NotRequired, TypeVar

from typing_extensions import TypedDict

from c2kv_core.document import SourceDocument, StoredDocument
from c2kv_core.store import IndexRow, Miss, SourceText
from c2kv_core.store.names import check_doc_id
from c2kv_core.text import content_hash
from serve_app.caller import Caller
from serve_app.config import ServeConfig
from serve_app.document_writer import DocumentWriter
from serve_app.edition import Edition, Editions
from serve_app.engine import Engine, answer_events
from serve_app.errors import ApiError, Fault, deadline_exceeded
from serve_app.jobs import Compressed, Compression, Failed
from serve_app.plan import Parts
from serve_app.protocol import DocumentBody
from serve_app.shared import Shared

T = TypeVar("T")


class DocumentStatus(TypedDict):
    """A stored document."""

    id: str
    object: str
    """``document``."""
    namespace: str
    title: str
    """Empty where its text is not stored."""
    content_hash: str
    """SHA-256 hex of title and text."""
    ratio: int
    """Source tokens per slot."""
    parts: int
    slots: int
    source_tokens: int
    bytes: int
    """Of the stored record."""
    created_at: str
    """ISO 8601, UTC."""
    metadata: NotRequired[dict[str, Any]]
    """What extraction carried along with the text; only when a document that has any is looked at."""


class DocumentDeleted(TypedDict):
    """A document that is no more."""

    id: str
    object: str
    """``document``."""
    deleted: bool


class DocumentService:
    """Writes go through one thread, reads beside it; the model's work is the engine's."""

    def __init__(self, *, config: ServeConfig, editions: Editions, engine: Engine, shared: Shared) -> None:
        self._config = config
        self._editions = editions
        self._engine = engine
        self._shared = shared
        # Apart from the readers of answers: while the store hangs, requests for it are no reason to answer none.
        self._threads = ThreadPoolExecutor(config.fetch_threads, thread_name_prefix="c2kv-documents")
        self._writer = DocumentWriter(
            gather_s=config.commit_gather_s, max_documents=config.commit_max_documents
        )

    async def put(self, caller: Caller, doc_id: str, body: DocumentBody) -> DocumentStatus:
        """Compress a document and store it with its text, replacing an earlier one of the same id.

        One that is stored already as it is, is left alone.

        Raises:
            ApiError: it cannot be compressed in time, or there is no room for it.
            InputError: id or text cannot be stored.
            StoreError: the store cannot be written.
        """
        check_doc_id(doc_id)
        deadline_s = time.monotonic() + self._config.max_request_s
        source = SourceDocument(doc_id, body.title, body.text)
        served = await self._in_thread(lambda: self._editions.of(caller.namespace))
        # Under the others too, or whatever is served next would have an older version of it.
        editions = [served, *(edition for edition in self._editions.all if edition is not served)]
        held = await self._in_thread(lambda: [_unchanged(edition, caller, source) for edition in editions])
        if (row := held[0]) is not None and all(held):
            return _status(served, row, source.title)
        documents = [await self._stored(edition, caller, source, deadline_s) for edition in editions]
        # What memory keeps is what others have from the store.
        read = await self._in_thread(lambda: _as_read(editions, documents))
        # Handed over at once: several puts of one id come in the same order under every edition.
        written = [
            self._writer.put(edition.store, document, _source_text(source, document))
            for edition, document in zip(editions, documents, strict=True)
        ]
        rows = await self._written(written, deadline_s, "the document was written")
        for edition, document, parts in zip(editions, documents, read, strict=True):
            edition.memory.keep(caller.namespace, document.content_hash, parts)
        return _status(served, rows[0], source.title)

    async def get(self, caller: Caller, doc_id: str) -> DocumentStatus:
        """What is stored of a document.

        Raises:
            ApiError: 404.
            StoreError: the store cannot be read.
        """
        return await self._in_thread(lambda: self._get(caller, doc_id))

    async def delete(self, caller: Caller, doc_id: str) -> DocumentDeleted:
        """Remove a document and its text; ``gc`` of the store then frees their bytes.

        Raises:
            ApiError: 404, or it takes too long.
            StoreError: the store cannot be written.
        """
        deadline_s = time.monotonic() + self._config.max_request_s
        deletion = self._writer.delete(self._editions.all[0].store, caller.namespace, doc_id)
        (removed,) = await self._written([deletion], deadline_s, "the document was removed")
        for edition in self._editions.all:
            edition.store.invalidate()
        if not removed:
            raise unknown_document(doc_id)
        return DocumentDeleted(id=doc_id, object="document", deleted=True)

    def fault(self) -> str | None:
        """Why nothing can be written any more; None while it is well."""
        return self._writer.fault()

    def close(self) -> None:
        """Write what has been taken on, and stop."""
        self._writer.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.wait_for(future, self._config.max_request_s)
        except TimeoutError as error:
            raise deadline_exceeded("the store was asked") from error

    async def _stored(
        self, edition: Edition, caller: Caller, source: SourceDocument, deadline_s: float
    ) -> StoredDocument:
        ids = await self._in_thread(lambda: self._part_ids(edition, source))
        parts = await self._compress(edition, ids, deadline_s)
        return edition.compressor.stored(caller.namespace, source, parts)

    async def _written(self, work: "Sequence[Future[T]]", deadline_s: float, what: str) -> list[T]:
        """The results of what the writer was given; goes on in the store's own time, whoever leaves meanwhile."""
        all_of_it = asyncio.gather(*map(asyncio.wrap_future, work))
        try:
            return await asyncio.wait_for(asyncio.shield(all_of_it), max(0.0, deadline_s - time.monotonic()))
        except TimeoutError as error:
            raise deadline_exceeded(what) from error

    def _part_ids(self, edition: Edition, source: SourceDocument) -> tuple[tuple[int, ...], ...]:
        limit = self._config.max_document_tokens
        self._shared.fitting.check_document(source.title, source.text, max_tokens=limit)
        with self._shared.tokenizer_lock:
            ids = tuple(map(tuple, edition.compressor.part_ids(source.title, source.text)))
        if (tokens := sum(map(len, ids))) > limit:
            message = f"expected a document of at most {limit} tokens, got {tokens}; divide it"
            raise ApiError(Fault(status=413, code="document_too_long", message=message, param="text"))
        return ids

    async def _compress(
        self, edition: Edition, part_ids: tuple[tuple[int, ...], ...], deadline_s: float
    ) -> Parts:
        work = Compression(fingerprint=edition.fingerprint, part_ids=part_ids, deadline_s=deadline_s)
        async with aclosing(answer_events(self._engine, work)) as events:
            async for event in events:
                match event:
                    case Compressed(parts=parts):
                        return parts
                    case Failed(fault=fault):
                        raise ApiError(fault)
        raise AssertionError("a compression ends with its slots or with a fault")

    def _get(self, caller: Caller, doc_id: str) -> DocumentStatus:
        edition = self._editions.of(caller.namespace)
        for namespace in caller.readable:
            row = edition.store.lookup([doc_id], namespace=namespace)[doc_id]
            if isinstance(row, IndexRow):
                text = edition.store.text([doc_id], namespace=namespace).get(doc_id)
                status = _status(edition, row, text.title if text is not None else "")
                if text is not None and text.metadata:
                    status["metadata"] = json.loads(text.metadata)
                return status
        raise unknown_document(doc_id)


def _as_read(editions: Sequence[Edition], documents: Sequence[StoredDocument]) -> list[Parts]:
    return [
        edition.compressor.as_read(document.parts)
        for edition, document in zip(editions, documents, strict=True)
    ]


def _source_text(source: SourceDocument, document: StoredDocument) -> SourceText:
    return SourceText(
        namespace=document.namespace,
        doc_id=source.doc_id,
        title=source.title,
        text=source.text,
        content_hash=document.content_hash,
    )


def _unchanged(edition: Edition, caller: Caller, source: SourceDocument) -> IndexRow | None:
    row = edition.store.lookup([source.doc_id], namespace=caller.namespace)[source.doc_id]
    if isinstance(row, Miss) or row.content_hash != content_hash(source.title, source.text):
        return None
    kept = edition.store.text([source.doc_id], namespace=caller.namespace).get(source.doc_id)
    return row if kept is not None and kept.content_hash == row.content_hash else None


def _status(edition: Edition, row: IndexRow, title: str) -> DocumentStatus:
    return DocumentStatus(
        id=row.doc_id,
        object="document",
        namespace=row.namespace,
        title=title,
        content_hash=row.content_hash,
        ratio=edition.ratio,
        parts=row.parts,
        slots=row.slots,
        source_tokens=row.source_tokens,
        bytes=row.length,
        created_at=row.created_at.isoformat(),
    )


def unknown_document(doc_id: str) -> ApiError:
    """404, the same whether it never was or is another tenant's."""
    return ApiError(
        Fault(status=404, code="document_not_found", message=f"no document {doc_id!r}", param="id")
    )
