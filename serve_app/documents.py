"""Finding each document of a request: memory, then the store, then what ``on_missing`` asks for."""

import threading
from collections.abc import Sequence

from c2kv_core.compressor import Compressor
from c2kv_core.document import StoredDocument
from c2kv_core.store import KVStore, Miss, ReadTiming, SourceText
from c2kv_core.text import content_hash
from serve_app.caller import Caller
from serve_app.errors import ApiError, Fault
from serve_app.fitting import Fitting
from serve_app.plan import Extraction, LeftOut, OrdinaryText, PlannedDocument, Slots
from serve_app.protocol import DocumentRef, OnMissing
from serve_app.slot_memory import SlotMemory

EMPTY_DOCUMENT = "empty_document"
"""Reason of a document given in full without any text: there is nothing to see, so it takes no place."""


class DocumentResolver:
    """Plans documents; reads and tokenises, but leaves the model alone. Safe to share between threads."""

    def __init__(
        self,
        *,
        compressor: Compressor,
        store: KVStore,
        memory: SlotMemory,
        tokenizer_lock: threading.Lock,
        fitting: Fitting,
    ) -> None:
        """Bind the places where documents are found.

        Args:
            compressor: renders and cuts text.
            store: opened under the served identity.
            memory: the tier before the store.
            tokenizer_lock: held while encoding.
            fitting: refuses text that no context can hold.
        """
        self._compressor = compressor
        self._store = store
        self._memory = memory
        self._tokenizer_lock = tokenizer_lock
        self._fitting = fitting

    def resolve(
        self,
        documents: Sequence[DocumentRef],
        on_missing: OnMissing,
        *,
        caller: Caller,
        timing: ReadTiming | None = None,
    ) -> list[PlannedDocument]:
        """A plan for each document, in the order given; ``timing`` adds up verification.

        An id is looked for in the caller's own namespace, then in those that are shared with it.

        Raises:
            ApiError: 404 naming a document that cannot be had.
            ContextLengthError: a text far beyond the model's positions.
            StoreError: the store's tables cannot be read.
        """
        wanted = [d.id for d in documents if d.id is not None]
        stored: dict[str, Slots | Miss] = {}
        texts: dict[str, SourceText] = {}
        for namespace in caller.readable:
            found_here = self._stored_slots(wanted, namespace, timing)
            missing = [doc_id for doc_id, found in found_here.items() if isinstance(found, Miss)]
            texts = self._missing_texts(missing, namespace, on_missing) | texts
            # The first namespace that has a document says what is wrong with it.
            stored = found_here | {i: f for i, f in stored.items() if not _is_unknown(f)}
            wanted = [doc_id for doc_id in wanted if _is_unknown(stored[doc_id])]
        plans = []
        for index, document in enumerate(documents):
            if document.id is None:
                plans.append(self._given(index, document, on_missing, caller.namespace))
                continue
            found = stored[document.id]
            if isinstance(found, Miss):
                plans.append(self._fallback(index, document.id, found, texts.get(document.id), on_missing))
            else:
                plans.append(PlannedDocument(index=index, doc_id=document.id, work=found))
        return plans

    def _stored_slots(
        self, ids: Sequence[str], namespace: str, timing: ReadTiming | None
    ) -> dict[str, Slots | Miss]:
        if not ids:
            return {}
        rows = self._store.lookup(ids, namespace=namespace)
        found: dict[str, Slots | Miss] = {}
        for doc_id, row in rows.items():
            held = row if isinstance(row, Miss) else self._in_memory(namespace, row.content_hash)
            if held is not None:
                found[doc_id] = held
        to_read = [doc_id for doc_id in rows if doc_id not in found]
        read = self._store.get(to_read, namespace=namespace, timing=timing)
        for doc_id, document in read.items():
            found[doc_id] = self._kept(document) if isinstance(document, StoredDocument) else document
        return found

    def _in_memory(self, namespace: str, key: str) -> Slots | None:
        parts = self._memory.get(namespace, key)
        return None if parts is None else Slots(parts=parts, tier="memory")

    def _kept(self, document: StoredDocument) -> Slots:
        parts = self._memory.keep(document.namespace, document.content_hash, document.parts)
        return Slots(parts=parts, tier="store")

    def _missing_texts(
        self, ids: Sequence[str], namespace: str, on_missing: OnMissing
    ) -> dict[str, SourceText]:
        if not ids or on_missing not in ("extract", "text"):
            return {}
        return self._store.text(ids, namespace=namespace)

    def _fallback(
        self, index: int, doc_id: str, miss: Miss, source: SourceText | None, on_missing: OnMissing
    ) -> PlannedDocument:
        work: Slots | Extraction | OrdinaryText | LeftOut
        if on_missing == "skip":
            work = LeftOut()
        elif source is None:
            raise _not_found(index, doc_id, miss, on_missing)
        elif on_missing == "text":
            work = self._ordinary(source.title, source.text)
        else:
            work = self._extraction(source.title, source.text, source.namespace)
        return PlannedDocument(index=index, doc_id=doc_id, work=work, fallback_reason=miss.reason)

    def _given(
        self, index: int, document: DocumentRef, on_missing: OnMissing, namespace: str
    ) -> PlannedDocument:
        text = document.text or ""
        if not text.strip():
            return PlannedDocument(index=index, doc_id=None, work=LeftOut(), fallback_reason=EMPTY_DOCUMENT)
        if on_missing == "text":
            return PlannedDocument(index=index, doc_id=None, work=self._ordinary(document.title, text))
        work = self._extraction(document.title, text, namespace)
        return PlannedDocument(index=index, doc_id=None, work=work)

    def _extraction(self, title: str, text: str, namespace: str) -> Slots | Extraction:
        key = content_hash(title, text)
        held = self._in_memory(namespace, key)
        if held is not None:
            return held
        self._fitting.check(title)
        self._fitting.check(text)
        with self._tokenizer_lock:
            parts = self._compressor.part_ids(title, text)
        return Extraction(part_ids=tuple(map(tuple, parts)), namespace=namespace, content_hash=key)

    def _ordinary(self, title: str, text: str) -> OrdinaryText:
        self._fitting.check(title)
        self._fitting.check(text)
        with self._tokenizer_lock:
            return OrdinaryText(ids=tuple(self._compressor.renderer.document_ids(title, text)))


def _is_unknown(found: Slots | Miss) -> bool:
    return isinstance(found, Miss) and found.reason == "not_found"


def _not_found(index: int, doc_id: str, miss: Miss, on_missing: OnMissing) -> ApiError:
    if miss.reason == "not_found":
        message = f"no document {doc_id!r}"
    elif on_missing == "error":
        message = (
            f"document {doc_id!r} has no usable slots ({miss.reason}); on_missing 'extract' makes new ones"
        )
    else:
        message = f"document {doc_id!r} has no usable slots ({miss.reason}) and its text is not stored"
    return ApiError(
        Fault(status=404, code="document_not_found", message=message, param=f"documents.{index}.id")
    )
