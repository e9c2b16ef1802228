"""What an actor does to documents: tokens, slots, shards, and what to do when one of them goes wrong."""

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from c2kv_core import CompressedDocument, Compressor
from c2kv_core.batching import length_batches
from c2kv_core.errors import InputError
from c2kv_core.store import FailureKind, KVStore, Storage, require_store
from pipelines.extract_config import Attention
from pipelines.extract_reuse import Reusable, reusable_parts
from pipelines.extract_units import Outcome, UnitDocument
from pipelines.kernels import use_attention

FAULTS = (InputError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError)
"""What a document can make a tokenizer or a model raise. Other errors stop the job: they are the job's own."""


@dataclass(frozen=True, kw_only=True)
class Tokenized:
    """A document as token ids of its parts, and the parts whose slots are stored already."""

    document: UnitDocument
    parts: tuple[tuple[int, ...], ...]
    reusable: Reusable

    @property
    def tokens(self) -> int:
        """Over all parts."""
        return sum(map(len, self.parts))

    @property
    def to_compute(self) -> list[tuple[int, ...]]:
        """Parts without slots."""
        return [ids for ids in self.parts if ids not in self.reusable]

    @property
    def reused_tokens(self) -> int:
        """Tokens of the other parts."""
        return self.tokens - sum(map(len, self.to_compute))

    def assembled(self, ratio: int, computed: Sequence[CompressedDocument]) -> tuple[CompressedDocument, ...]:
        """All parts in order."""
        fresh = iter(computed)
        return tuple(self.reusable[ids][ratio] if ids in self.reusable else next(fresh) for ids in self.parts)


@dataclass
class Tally:
    """What a unit took."""

    padded_tokens: int = 0
    """Tokens computed, padding included."""


class Work:
    """A loaded model, and the stores its slots go to.

    Several threads may extract at the same time: one computes while others write.
    """

    def __init__(
        self,
        compressor: Compressor,
        stores: Mapping[int, KVStore],
        *,
        storage: Storage,
        namespace: str,
        run: str,
        max_document_bytes: int,
        attention: Attention = "auto",
    ) -> None:
        self._compressor, self._stores, self._storage = compressor, stores, storage
        self._namespace, self._run = namespace, run
        self._max_document_bytes = max_document_bytes
        self._attention: Attention = attention
        self._computing = threading.Lock()

    def extract(self, documents: Sequence[UnitDocument], tally: Tally) -> list[Outcome]:
        """Make slots and write them; outcomes in any order.

        Raises:
            StoreError: the store cannot be written.
        """
        outcomes: list[Outcome] = []
        by_ratios: defaultdict[tuple[int, ...], list[Tokenized]] = defaultdict(list)
        for document in documents:
            with self._computing:  # tokenizers are for one thread at a time
                made = self._tokenize(document)
            if isinstance(made, Outcome):
                outcomes.append(made)
            else:
                by_ratios[document.ratios].append(made)
        for ratios, group in by_ratios.items():
            outcomes += self._compute(group, ratios, tally)
        return outcomes

    def _tokenize(self, document: UnitDocument) -> Tokenized | Outcome:
        if document.size_bytes > self._max_document_bytes:
            reason = f"{document.size_bytes:,} bytes; max_document_bytes is {self._max_document_bytes:,}"
            return Outcome(document=document, kind="too_long", reason=reason)
        try:
            ids = self._compressor.part_ids(document.title, document.text)
            parts = tuple(map(tuple, ids))
            return Tokenized(document=document, parts=parts, reusable=self._reusable(document))
        except FAULTS as error:
            return _failed(document, error, "text" if isinstance(error, InputError) else "tokenizer")

    def _reusable(self, document: UnitDocument) -> Reusable:
        if not document.stored:
            return {}
        stores = {ratio: self._stores[ratio] for ratio in document.ratios}
        return reusable_parts(self._compressor, stores, self._namespace, document.doc_id)

    def _compute(self, group: Sequence[Tokenized], ratios: tuple[int, ...], tally: Tally) -> list[Outcome]:
        if not group:
            return []
        try:
            return self._store(group, ratios, tally)
        except FAULTS as error:
            if len(group) == 1:
                kind: FailureKind = (
                    "memory" if isinstance(error, MemoryError | torch.OutOfMemoryError) else "model"
                )
                return [_failed(group[0].document, error, kind)]
        # One of several documents is to blame, or they were too many: each gets its own try.
        return [outcome for one in group for outcome in self._compute([one], ratios, tally)]

    def _store(self, group: Sequence[Tokenized], ratios: tuple[int, ...], tally: Tally) -> list[Outcome]:
        wanted = [one.to_compute for one in group]
        with self._computing, use_attention(self._attention):
            started_s = time.perf_counter()
            made = self._compressor.compress(wanted, ratios)
            tally.padded_tokens += self._padded(wanted)
        # Again, because computing takes its time.
        require_store(self._storage)
        rows: defaultdict[str, list[dict[str, str | int]]] = defaultdict(list)
        for ratio in ratios:
            documents = [
                self._compressor.stored(self._namespace, one.document.source, one.assembled(ratio, computed))
                for one, computed in zip(group, made.pop(ratio), strict=True)
            ]
            for row in self._stores[ratio].write_shard(documents, run=self._run):
                rows[row.doc_id].append(row.to_dict())
        seconds = time.perf_counter() - started_s
        total = sum(one.tokens for one in group)
        return [
            Outcome(
                document=one.document,
                source_tokens=one.tokens,
                reused_tokens=one.reused_tokens,
                # A batch has one time; documents share it by their tokens.
                seconds=seconds * one.tokens / total,
                index_rows=tuple(rows[one.document.doc_id]),
            )
            for one in group
        ]

    def _padded(self, parts: Sequence[Sequence[Sequence[int]]]) -> int:
        lengths = [len(ids) for document in parts for ids in document]
        batches = length_batches(lengths, max_tokens=self._compressor.spec.max_batch_tokens)
        return sum(len(batch) * max(lengths[place] for place in batch) for batch in batches)


def _failed(document: UnitDocument, error: Exception, kind: FailureKind) -> Outcome:
    named = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    return Outcome(document=document, kind=kind, reason=" ".join(named.split())[:500])
