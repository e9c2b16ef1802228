"""The stage that computes: documents in, shards written to the store, small rows out.

Columns in: doc_id, title, text, ratios (``pipelines.corpus_datasource.SCHEMA``).
Columns out: ``OUT_SCHEMA``; the slots themselves never leave the actor but into the store.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import torch

from c2kv_core import Compressor, CompressorSpec, SourceDocument, StoredDocument
from c2kv_core.errors import IdentityError, InputError
from c2kv_core.store import KVStore

OUT_SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("title", pa.large_string()),
        ("text", pa.large_string()),
        ("failure", pa.string()),
        ("source_tokens", pa.int64()),
        ("index_rows", pa.string()),
    ]
)
"""A document and what became of it: ``failure`` is null when stored; ``index_rows`` is JSON of its index rows."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one document."""

    source: SourceDocument
    source_tokens: int = 0
    failure: str | None = None
    index_rows: tuple[dict[str, Any], ...] = ()


class ExtractStage:
    """An actor's callable for ``map_batches``: loads once, then writes each batch of documents as one shard a ratio."""

    def __init__(
        self,
        *,
        spec: CompressorSpec,
        fingerprints: Mapping[int, str],
        store: str,
        namespace: str,
        run: str,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            # Ray limits a worker's threads to its reserved CPUs, which are logical ones here.
            torch.set_num_threads(threads)
        self._compressor = Compressor.load(spec)
        loaded = {ratio: identity.fingerprint for ratio, identity in self._compressor.identities.items()}
        if loaded != dict(fingerprints):
            # Also after a restart: what was planned, and what others of this run write, is of another identity.
            raise IdentityError(
                f"the files of model {spec.model!r} or of its sidecar changed since the run began; start it again"
            )
        self._stores = {
            ratio: KVStore.open(store, identity=identity)
            for ratio, identity in self._compressor.identities.items()
        }
        self._namespace = namespace
        self._run = run

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Extract and write the documents of a batch; one bad document fails alone."""
        by_ratios: dict[tuple[int, ...], list[SourceDocument]] = defaultdict(list)
        for row in batch.to_pylist():
            source = SourceDocument(row["doc_id"], row["title"], row["text"])
            by_ratios[tuple(row["ratios"])].append(source)
        outcomes = [o for ratios, group in by_ratios.items() for o in self._extract(group, ratios)]
        return pa.Table.from_pylist([_out_row(o) for o in outcomes], schema=OUT_SCHEMA)

    def _extract(self, sources: Sequence[SourceDocument], ratios: tuple[int, ...]) -> list[Outcome]:
        parts: list[list[list[int]]] = []
        tokenized: list[SourceDocument] = []
        failed: list[Outcome] = []
        for source in sources:
            try:
                parts.append(self._compressor.part_ids(source.title, source.text))
                tokenized.append(source)
            except InputError as error:
                failed.append(Outcome(source=source, failure=str(error)))
        if not tokenized:
            return failed
        try:
            return failed + self._store(tokenized, parts, ratios)
        except (InputError, RuntimeError) as error:
            if len(tokenized) == 1:
                return [*failed, Outcome(source=tokenized[0], failure=f"{type(error).__name__}: {error}")]
        # One of several documents is to blame: each gets its own try.
        return failed + [o for source in tokenized for o in self._extract([source], ratios)]

    def _store(
        self, sources: list[SourceDocument], parts: list[list[list[int]]], ratios: tuple[int, ...]
    ) -> list[Outcome]:
        outcomes = {
            s.doc_id: Outcome(source=s, source_tokens=sum(map(len, p)))
            for s, p in zip(sources, parts, strict=True)
        }
        for ratio, slots in self._compressor.compress(parts, ratios).items():
            documents: list[StoredDocument] = [
                self._compressor.stored(self._namespace, source, made)
                for source, made in zip(sources, slots, strict=True)
            ]
            for row in self._stores[ratio].write_shard(documents, run=self._run):
                outcome = outcomes[row.doc_id]
                outcomes[row.doc_id] = replace(outcome, index_rows=(*outcome.index_rows, row.to_dict()))
        return list(outcomes.values())


def _out_row(outcome: Outcome) -> dict[str, Any]:
    return {
        **outcome.source._asdict(),
        "failure": outcome.failure,
        "source_tokens": outcome.source_tokens,
        "index_rows": json.dumps(outcome.index_rows),
    }
