"""Finding each document of a request: memory, then the store, then what ``on_missing`` asks for."""

import threading
from collections.abc import Sequence

from c2kv_core.compressor import Compressor
from c2kv_core.store import Miss, MissReason, ReadTiming, SourceText
from c2kv_core.text import content_hash
from serve_app.caller import Caller
from serve_app.errors import STORE_RETRY_AFTER_S, ApiError, Fault
from serve_app.fetching import LATE, SLOWER, STORE_FAILURES, DocumentFetcher
from serve_app.fitting import Fitting
from serve_app.plan import Extraction, LeftOut, OrdinaryText, PlannedDocument, Slots
from serve_app.protocol import DocumentRef, OnMissing
from serve_app.slot_memory import SlotMemory

EMPTY_DOCUMENT = "empty_document"
"""Reason of a document given in full without any text: there is nothing to see, so it takes no place."""


class LateError(ApiError):
    """A document did not come in the time there was for it."""


class DocumentResolver:
    """Plans documents; reads and tokenises, but leaves the model alone. Safe to share between threads."""

    def __init__(
        self,
        *,
        compressor: Compressor,
        fetcher: DocumentFetcher,
        memory: SlotMemory,
        tokenizer_lock: threading.Lock,
        fitting: Fitting,
    ) -> None:
        """Bind the places where documents are found.

        Args:
            compressor: renders and cuts text.
            fetcher: reads what is stored.
            memory: slots of texts given in full.
            tokenizer_lock: held while encoding.
            fitting: refuses text that no context can hold.
        """
        self._compressor = compressor
        self._fetcher = fetcher
        self._memory = memory
        self._tokenizer_lock = tokenizer_lock
        self._fitting = fitting

    def resolve(
        self,
        documents: Sequence[DocumentRef],
        on_missing: OnMissing,
        *,
        caller: Caller,
        until_s: float,
        timing: ReadTiming | None = None,
    ) -> list[PlannedDocument]:
        """A plan for each document, in the order given; ``timing`` adds up verification.

        An id is looked for in the caller's own namespace, then in those that are shared with it. What the store has not
        delivered at ``until_s`` (monotonic clock) is missing.

        Raises:
            ApiError: naming a document that cannot be had: 404, or 503 where the store is at fault.
            ContextLengthError: a text far beyond the model's positions.
        """
        wanted = [d.id for d in documents if d.id is not None]
        stored: dict[str, Slots | Miss] = {}
        texts: dict[str, SourceText] = {}
        has_text = on_missing in ("extract", "text")
        for namespace in caller.readable:
            found_here = self._fetcher.slots(
                wanted, namespace, until_s=until_s, timing=timing, may_refuse=has_text
            )
            missing = [doc_id for doc_id, found in found_here.items() if isinstance(found, Miss)]
            kept = self._texts(missing, namespace, on_missing, until_s)
            # Slow, but without their text there is no other way to have them.
            without = missing if isinstance(kept, Miss) else [i for i in missing if i not in kept]
            unread = [i for i in without if _is(found_here[i], SLOWER)]
            if isinstance(kept, Miss):
                # Without its text a document is as good as lost for now, and not unknown.
                found_here |= dict.fromkeys(set(missing) - set(unread), kept)
            else:
                texts = kept | texts
            found_here |= self._fetcher.slots(unread, namespace, until_s=until_s, timing=timing)
            # The first namespace that has a document says what is wrong with it.
            stored = found_here | {i: f for i, f in stored.items() if not _is(f, "not_found")}
            wanted = [doc_id for doc_id in wanted if _is(stored[doc_id], "not_found")]
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

    def _texts(
        self, ids: Sequence[str], namespace: str, on_missing: OnMissing, until_s: float
    ) -> dict[str, SourceText] | Miss:
        if not ids or on_missing not in ("extract", "text"):
            return {}
        return self._fetcher.texts(ids, namespace, until_s=until_s)

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
        held = self._memory.get(namespace, key)
        if held is not None:
            return Slots(parts=held, tier="memory")
        self._fitting.check(title, text)
        with self._tokenizer_lock:
            parts = self._compressor.part_ids(title, text)
        return Extraction(part_ids=tuple(map(tuple, parts)), namespace=namespace, content_hash=key)

    def _ordinary(self, title: str, text: str) -> OrdinaryText:
        self._fitting.check(title, text)
        with self._tokenizer_lock:
            return OrdinaryText(ids=tuple(self._compressor.renderer.document_ids(title, text)))


def _is(found: Slots | Miss, reason: MissReason) -> bool:
    return isinstance(found, Miss) and found.reason == reason


def _not_found(index: int, doc_id: str, miss: Miss, on_missing: OnMissing) -> ApiError:
    if miss.reason in STORE_FAILURES:
        fault = Fault(
            status=503,
            code="store_unavailable",
            message=f"document {doc_id!r} cannot be had now ({miss.reason}): {miss.detail}",
            param=f"documents.{index}.id",
            retry_after_s=STORE_RETRY_AFTER_S,
        )
        return LateError(fault) if miss.reason == LATE else ApiError(fault)
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
