"""From planned documents to the context that the question sees, in bounded pieces of model work."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from c2kv_core import hf_adapter
from c2kv_core.compose import PREFILL_CHUNK_TOKENS, ComposedContext, prefill
from c2kv_core.compressor import Compressor
from c2kv_core.document import CompressedDocument
from c2kv_core.generate import Decoder
from c2kv_core.sidecar_config import SHARING
from serve_app.answers import DocumentReport
from serve_app.byte_lru import ByteLru
from serve_app.cost_gate import CostGate
from serve_app.jobs import Job, Step
from serve_app.plan import DocumentWork, Extraction, LeftOut, OrdinaryText, Parts, Slots, Tier
from serve_app.slot_memory import SlotMemory


@dataclass(kw_only=True)
class BuiltContext:
    """A context in the making and what it took."""

    decoder: Decoder
    """Holds what has been placed so far; its question is to be read next."""
    documents: list[DocumentReport] = field(default_factory=list)
    extract_s: float = 0.0
    """Seconds of compressing."""
    compose_s: float = 0.0
    """Seconds of placing, prefix and ordinary text included."""


Steps = Generator[Step | None, Tensor | None, BuiltContext]
"""As ``Turns``: None after each piece of work, steps for ordinary text. The context is the return value."""

Prefixes = ByteLru[tuple[str, tuple[int, ...]], ComposedContext]
"""Prefilled system messages by namespace and ids: the base's own, so the same under every identity of slots, but apart
for each tenant, who could otherwise find out by the clock what others tell the model."""


class ContextBuilder:
    """Builds contexts on the one thread that owns the model."""

    def __init__(
        self,
        *,
        compressor: Compressor,
        ratio: int,
        memory: SlotMemory,
        prefixes: Prefixes,
        gate: CostGate,
    ) -> None:
        """Bind the parts; ``gate`` learns how long compressions take."""
        self._compressor = compressor
        self._model = compressor.model
        self._ratio = ratio
        self._memory = memory
        self._gate = gate
        shape = hf_adapter.geometry(self._model.config)
        self.token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * self._model.dtype.itemsize
        """Bytes of keys and values of one ordinary token."""
        self._prefixes = prefixes
        self._shares = compressor.sidecar.config.selection == SHARING

    def _reserved_entries(self, work: DocumentWork) -> int:
        """Room that the cache must have for a document before it is placed."""
        # Slots that heads share out make their own room, for each head as much as it needs.
        if self._shares and not isinstance(work, OrdinaryText):
            return 0
        return work.entries(self._ratio)

    def build(self, job: Job) -> Steps:
        """Prefix first, then each document behind the ones before it, in the one cache that the answer uses."""
        compose_s, prefix = yield from self._prefix(job)
        started_s = time.monotonic()
        built = BuiltContext(
            decoder=Decoder(
                self._model,
                prefix,
                job.question_ids,
                max_new_tokens=job.max_new_tokens,
                more_entries=sum(self._reserved_entries(d.work) for d in job.documents),
                more_positions=sum(d.work.source_tokens for d in job.documents),
            )
        )
        built.compose_s += compose_s + time.monotonic() - started_s
        pending: list[CompressedDocument] = []
        for document in job.documents:
            match document.work:
                case OrdinaryText(ids=ids):
                    _place(built, pending)
                    pending = []
                    yield from _place_text(built, ids)
                    built.documents.append(document.report("text", kv_bytes=len(ids) * self.token_bytes))
                case LeftOut():
                    built.documents.append(document.report("skipped"))
                case Slots() | Extraction() as work:
                    parts, tier = yield from self._slots(work, built)
                    pending.extend(parts)
                    built.documents.append(document.report(tier, parts=parts))
        _place(built, pending)
        return built

    def _prefix(
        self, job: Job
    ) -> Generator[Step | None, Tensor | None, tuple[float, ComposedContext | None]]:
        """Seconds it took and the system message, read in pieces like all else; None where there is none."""
        key, ids = (job.namespace, job.prefix_ids), job.prefix_ids
        context = self._prefixes.get(key)
        taken_s = 0.0
        if context is None:
            for start in range(0, len(ids), PREFILL_CHUNK_TOKENS):
                if context is not None:
                    yield None
                started_s = time.monotonic()
                context = prefill(self._model, ids[start : start + PREFILL_CHUNK_TOKENS], context)
                taken_s += time.monotonic() - started_s
            if context is not None:
                self._prefixes.put(key, context, size_bytes=context.cache.nbytes)
        return taken_s, context

    def _slots(
        self, work: Slots | Extraction, built: BuiltContext
    ) -> Generator[Step | None, Tensor | None, tuple[Parts, Tier]]:
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
            yield None
        # One identity, one set of slots: another replica, or this one later, has them from the store.
        made = self._compressor.as_read(parts)
        return self._memory.keep(work.namespace, work.content_hash, made), "extracted"

    def compress_part(self, ids: Sequence[int]) -> CompressedDocument:
        """Slots of one part of a document."""
        started_s = time.monotonic()
        ((part,),) = self._compressor.compress([[ids]], [self._ratio])[self._ratio]
        self._gate.has_made(len(ids), time.monotonic() - started_s)
        return part


def _place(built: BuiltContext, parts: Sequence[CompressedDocument]) -> None:
    started_s = time.monotonic()
    built.decoder.place(parts)
    built.compose_s += time.monotonic() - started_s


def _place_text(built: BuiltContext, ids: Sequence[int]) -> Generator[Step | None, Tensor | None, None]:
    for start in range(0, len(ids), PREFILL_CHUNK_TOKENS):
        started_s = time.monotonic()
        yield Step(decoder=built.decoder, ids=tuple(ids[start : start + PREFILL_CHUNK_TOKENS]))
        built.compose_s += time.monotonic() - started_s
