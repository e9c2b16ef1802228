"""The stage that computes: units of documents in, shards written to the store, what became of them out.

Columns in and out: ``extract_units.UNIT_SCHEMA`` and ``OUT_SCHEMA``. Slots leave the actor only into the store.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import pyarrow as pa
import ray
import torch

from c2kv_core import Compressor, CompressorSpec
from c2kv_core.errors import IdentityError, StoreError
from c2kv_core.store import Attempt, Attempts, KVStore, open_storage, require_store
from pipelines.extract_config import Attention
from pipelines.extract_metrics import RaySink
from pipelines.extract_units import Outcome, UnitDocument, documents_of, out_row
from pipelines.extract_work import Tally, Work
from pipelines.kernels import use_deterministic_kernels


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """What an actor needs to know; small and picklable."""

    spec: CompressorSpec
    fingerprints: Mapping[int, str]
    """Of the plan, by ratio."""
    store: str
    namespace: str
    run: str
    threads: int | None
    """Torch threads; None leaves them as they are."""
    keep_text: bool
    attention: Attention
    deterministic: bool
    max_attempts: int
    max_document_bytes: int
    suspects: Mapping[tuple[str, str], int]
    """Documents (id, content) that runs before this one died over, and how often while they were alone."""


class ExtractStage:
    """An actor's callable for ``map_batches``: loads once, then makes each unit one shard a ratio."""

    def __init__(self, settings: StageSettings) -> None:
        if settings.threads is not None:
            # Ray limits a worker's threads to its reserved CPUs, which are logical ones here.
            torch.set_num_threads(settings.threads)
        if settings.deterministic:
            use_deterministic_kernels()
        self._settings = settings
        compressor = Compressor.load(settings.spec)
        loaded = {ratio: identity.fingerprint for ratio, identity in compressor.identities.items()}
        if loaded != dict(settings.fingerprints):
            # Also after a restart: what was planned, and what others of this run write, is of another identity.
            raise IdentityError(
                f"the files of model {settings.spec.model!r} or of its sidecar changed since the run began; "
                "start it again"
            )
        stores = {
            ratio: KVStore.open(settings.store, identity=identity)
            for ratio, identity in compressor.identities.items()
        }
        self._storage = open_storage(settings.store)
        self._attempts = Attempts(self._storage, namespace=settings.namespace, run=settings.run)
        self._work = Work(
            compressor,
            stores,
            storage=self._storage,
            namespace=settings.namespace,
            run=settings.run,
            max_document_bytes=settings.max_document_bytes,
            attention=settings.attention,
        )
        self._reporting = threading.Lock()
        self._reported_cpu_s = time.process_time()
        self._sink = RaySink("actor", namespace=settings.namespace)
        context = ray.get_runtime_context()
        self._node, self._actor = str(context.get_node_id()), str(context.get_actor_id())

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Extract and write the documents of one unit; one bad document fails alone."""
        (row,) = batch.to_pylist()
        started_s, tally = time.perf_counter(), Tally()
        outcomes = list(self._outcomes(row["unit"], documents_of(row), tally))
        seconds = time.perf_counter() - started_s
        self._sink.add("c2kv_extract_source_tokens", sum(o.source_tokens for o in outcomes))
        self._sink.add("c2kv_extract_computed_tokens", tally.padded_tokens)
        self._sink.add("c2kv_extract_unit_seconds", seconds)
        return out_row(
            row["unit"],
            outcomes,
            actor=self._actor,
            seconds=seconds,
            cpu_s=self._cpu_s_since_last_report(),
            padded_tokens=tally.padded_tokens,
            keep_text=self._settings.keep_text,
        )

    def _cpu_s_since_last_report(self) -> float:
        # Units that overlap share the process's time: each second is told once.
        with self._reporting:
            now_s = time.process_time()
            spent_s, self._reported_cpu_s = now_s - self._reported_cpu_s, now_s
        return spent_s

    def _outcomes(self, unit: str, documents: Sequence[UnitDocument], tally: Tally) -> Iterable[Outcome]:
        suspicions = self._suspicions(unit)
        together = [d for d in documents if d.named not in suspicions]
        suspects = [d for d in documents if d.named in suspicions]
        if together:
            yield from self._noted(unit, together, tally)
        # The likeliest culprit first: what comes after it has not been computed in vain when it strikes again.
        for document in sorted(suspects, key=lambda d: -suspicions[d.named]):
            deaths = suspicions[document.named]
            if deaths >= self._settings.max_attempts:
                yield Outcome(
                    document=document,
                    kind="killed",
                    attempts=deaths,
                    reason=f"the extractor's process died {deaths} times while it worked on this document alone; "
                    "for lack of memory, or by a fault of a library (see Ray's logs)",
                )
            else:
                yield from self._noted(unit, [document], tally)

    def _noted(self, unit: str, documents: Sequence[UnitDocument], tally: Tally) -> list[Outcome]:
        require_store(self._storage)
        note = self._attempts.begin(unit, [d.named for d in documents], node=self._node, actor=self._actor)
        try:
            outcomes = self._work.extract(documents, tally)
        except StoreError:
            # The process lives: its documents are not to blame.
            with suppress(StoreError):
                self._attempts.end(note)
            raise
        self._attempts.end(note)
        return outcomes

    def _suspicions(self, unit: str) -> dict[tuple[str, str], int]:
        """Documents that a process died over, and how often while each was alone."""
        found = dict(self._settings.suspects)
        earlier = self._attempts.of_unit(unit)
        lost = _lost_nodes() if earlier else frozenset()
        for attempt in earlier:
            for named in attempt.documents:
                found[named] = found.get(named, 0) + _weight(attempt, lost)
        return found


def _weight(attempt: Attempt, lost_nodes: frozenset[str]) -> int:
    # A machine that was lost took its processes along, whatever they did.
    return int(attempt.is_alone and attempt.node not in lost_nodes)


def _lost_nodes() -> frozenset[str]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return frozenset(node["NodeID"] for node in nodes if not node["Alive"])
