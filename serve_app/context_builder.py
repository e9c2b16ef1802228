"""From planned documents to the context that the question sees, in bounded pieces of model work."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from c2kv_core import hf_adapter
from c2kv_core.compose import PREFILL_CHUNK_TOKENS, ComposedContext, compose, prefill
from c2kv_core.compressor import Compressor
from c2kv_core.document import CompressedDocument
from serve_app.answers import DocumentReport
from serve_app.byte_lru import ByteLru
from serve_app.plan import Extraction, LeftOut, OrdinaryText, Parts, PlannedDocument, Slots, Tier
from serve_app.slot_memory import SlotMemory


@dataclass(kw_only=True)
class BuiltContext:
    """A context in the making and what it took."""

    context: ComposedContext | None = None
    """None where neither prefix nor documents take a place."""
    documents: list[DocumentReport] = field(default_factory=list)
    extract_s: float = 0.0
    """Seconds of compressing."""
    compose_s: float = 0.0
    """Seconds of placing, prefix and ordinary text included."""


Steps = Generator[None, None, BuiltContext]
"""Each ``next`` is one piece of work; the context is the return value."""


class ContextBuilder:
    """Builds contexts on the one thread that owns the model."""

    def __init__(
        self, *, compressor: Compressor, ratio: int, memory: SlotMemory, prefix_cache_bytes: int
    ) -> None:
        self._compressor = compressor
        self._model = compressor.model
        self._ratio = ratio
        self._memory = memory
        shape = hf_adapter.geometry(self._model.config)
        self.token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * self._model.dtype.itemsize
        """Bytes of keys and values of one ordinary token."""
        self.prefixes: ByteLru[tuple[int, ...], ComposedContext] = ByteLru(prefix_cache_bytes)

    def build(self, prefix_ids: tuple[int, ...], documents: Sequence[PlannedDocument]) -> Steps:
        """Prefix first, then each document behind the ones before it."""
        built = BuiltContext()
        if prefix_ids:
            started_s = time.monotonic()
            built.context = self._prefix(prefix_ids)
            built.compose_s += time.monotonic() - started_s
            yield
        pending: list[CompressedDocument] = []
        for document in documents:
            match document.work:
                case OrdinaryText(ids=ids):
                    self._compose(built, pending)
                    pending = []
                    yield from self._place_text(built, ids)
                    built.documents.append(document.report("text", kv_bytes=len(ids) * self.token_bytes))
                case LeftOut():
                    built.documents.append(document.report("skipped"))
                case Slots() | Extraction() as work:
                    parts, tier = yield from self._slots(work, built)
                    pending.extend(parts)
                    built.documents.append(document.report(tier, parts=parts))
        self._compose(built, pending)
        return built

    def _prefix(self, ids: tuple[int, ...]) -> ComposedContext:
        context = self.prefixes.get(ids)
        if context is None:
            context = prefill(self._model, ids)
            self.prefixes.put(ids, context, size_bytes=context.cache.nbytes)
        return context

    def _slots(
        self, work: Slots | Extraction, built: BuiltContext
    ) -> Generator[None, None, tuple[Parts, Tier]]:
        if isinstance(work, Slots):
            return work.parts, work.tier
        # Another request may have compressed the same text since this one was planned.
        held = self._memory.get(work.namespace, work.content_hash)
        if held is not None:
            return held, "memory"
        parts: list[CompressedDocument] = []
        for ids in work.part_ids:
            started_s = time.monotonic()
            parts.append(self.compress_part(ids))
            built.extract_s += time.monotonic() - started_s
            # One part a turn, so that others' answers go on while a long document is compressed.
            yield
        return self._memory.keep(work.namespace, work.content_hash, tuple(parts)), "extracted"

    def compress_part(self, ids: Sequence[int]) -> CompressedDocument:
        """Slots of one part of a document."""
        ((part,),) = self._compressor.compress([[ids]], [self._ratio])[self._ratio]
        return part

    def _compose(self, built: BuiltContext, parts: Sequence[CompressedDocument]) -> None:
        if not parts:
            return
        started_s = time.monotonic()
        built.context = compose(self._model, built.context, parts)
        built.compose_s += time.monotonic() - started_s

    def _place_text(self, built: BuiltContext, ids: Sequence[int]) -> Generator[None, None, None]:
        # A chunk a turn, for the same reason as one part a turn.
        for start in range(0, len(ids), PREFILL_CHUNK_TOKENS):
            started_s = time.monotonic()
            chunk = ids[start : start + PREFILL_CHUNK_TOKENS]
            built.context = prefill(self._model, chunk, built.context)
            built.compose_s += time.monotonic() - started_s
            yield
