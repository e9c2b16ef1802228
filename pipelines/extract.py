"""The extraction job: a corpus through Ray Data into a store of compressed documents.

python -m pipelines.extract --config FILE.yaml key=value ...
"""

import json
import logging
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from c2kv_core.config import to_yaml
from c2kv_core.errors import C2KVError
from c2kv_core.identity import Identity
from c2kv_core.store import IndexRow, KVStore, SourceText, check_namespace, open_storage
from c2kv_core.text import content_hash
from pipelines.extract_config import ExtractConfig
from pipelines.extract_report import ExtractReport, Skipped
from pipelines.job import job_main
from pipelines.plan import ExtractPlan, plan_extraction
from pipelines.ray_session import ray_session

COMMIT_SECONDS = 20.0
"""Finished shards wait this long for company in one index commit."""
COMMIT_DOCUMENTS = 256
"""... or until this many documents wait."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    done: int
    """Documents finished, published or not."""
    pending: int
    """Documents to extract in this run."""
    source_tokens: int
    """Of the finished documents."""
    elapsed_s: float


OnProgress = Callable[[Progress], None]


def extract(config: ExtractConfig, *, progress: OnProgress | None = None) -> ExtractReport:
    """Extract what is new or changed in a corpus.

    The whole corpus is read and checked first; nothing is written when a row is bad. A run over an unchanged corpus
    starts no Ray and loads no model.

    Raises:
        InputError: a subclass that says what is wrong with corpus, model, sidecar, ratio or store.
        StoreError: the store failed.
        C2KVError: a document got lost on the way, or nothing finished for ``stall_timeout_s``.
    """
    spec = config.spec()
    check_namespace(config.namespace)
    identities = spec.identities()
    stored = {k: _stored_hashes(config, identity) for k, identity in identities.items()}
    plan = plan_extraction(config.corpus, stored, limit=config.limit)
    report = ExtractReport(
        run=f"extract-{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}",
        store=config.store,
        namespace=config.namespace,
        fingerprints={k: identity.fingerprint for k, identity in identities.items()},
        sidecar="trained" if spec.is_trained() else "untrained",
        documents=plan.documents,
        unchanged=plan.unchanged,
        skipped=[Skipped(doc_id=doc_id, reason="the document has no text") for doc_id in plan.empty],
    )
    if plan.pending:
        started = time.monotonic()
        KVStore.open(config.store, create=True)
        with ray_session():
            _run(config, plan, report, progress)
        report.elapsed_s = time.monotonic() - started
        _save_run(config, report)
    if report.unaccounted:
        raise C2KVError(
            f"{report.unaccounted} documents are unaccounted for in {report.run}; this is a fault of the job"
        )
    return report


def _stored_hashes(config: ExtractConfig, identity: Identity) -> Mapping[str, str]:
    """Content hashes under one identity; none where there is no store yet."""
    store = KVStore.find(config.store, identity=identity)
    return store.content_hashes(namespace=config.namespace) if store else {}


def _run(
    config: ExtractConfig, plan: ExtractPlan, report: ExtractReport, progress: OnProgress | None
) -> None:
    committer = _Committer(config, report)
    started = time.monotonic()
    tokens = 0
    for done, row in enumerate(_outcomes(config, plan, report), start=1):
        committer.take(row)
        tokens += row["source_tokens"]
        if progress is not None:
            elapsed_s = time.monotonic() - started
            progress(
                Progress(done=done, pending=len(plan.pending), source_tokens=tokens, elapsed_s=elapsed_s)
            )
    committer.commit()


def _outcomes(config: ExtractConfig, plan: ExtractPlan, report: ExtractReport) -> Iterator[dict[str, Any]]:
    """Rows of ``extract_stage.OUT_SCHEMA`` as they are finished."""
    import ray
    from ray.data import ActorPoolStrategy, DataContext
    from ray.exceptions import RayError

    from pipelines.corpus_datasource import PendingDocuments
    from pipelines.extract_stage import ExtractStage

    context = DataContext.get_current()
    context.enable_progress_bars = False
    # At errors it prints the trace of every failure, which is told on one line below.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context.execution_no_progress_timeout_s = config.stall_timeout_s
    _check_resources(config)
    source = PendingDocuments(
        config.corpus, plan.pending, limit=config.limit, block_documents=config.documents_per_shard
    )
    documents = ray.data.read_datasource(source, num_cpus=READER_CPUS)
    with warnings.catch_warnings():
        # Ray 2.60 has no other name for an actor's restarts yet.
        warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
        dataset = documents.map_batches(
            ExtractStage,
            fn_constructor_kwargs={
                "spec": config.spec(),
                "fingerprints": report.fingerprints,
                "store": config.store,
                "namespace": config.namespace,
                "run": report.run,
                "threads": config.threads(),
            },
            batch_size=config.documents_per_shard,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=config.actors),
            num_cpus=config.num_cpus_per_actor,
            num_gpus=config.num_gpus_per_actor,
            # Bounded, because a document that kills the process would otherwise restart its actor for ever.
            max_restarts=2,
            max_task_retries=2,
        )
    try:
        for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield from batch.to_pylist()
    except RayError as error:
        raise C2KVError(
            f"the job stopped: {_cause(error)}; what was published stays, run the same command again to go on"
        ) from error


def _cause(error: Exception) -> str:
    """What happened, on one line: the project's own error where Ray's report has one, else the report's end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Ray Data wraps what a task or an actor raised, and puts advice on its retries behind it.
    own = [line.partition(": ")[2] for line in lines if line.startswith(f"{C2KVError.__module__}.")]
    return (own or lines or [type(error).__name__])[-1]


READER_CPUS = 0.5
"""Logical CPUs of a task that reads the corpus."""


def _check_resources(config: ExtractConfig) -> None:
    """Actors and one reader must fit, or the job would wait for ever."""
    import ray

    have = ray.cluster_resources()  # type: ignore[no-untyped-call]
    need = {
        "CPU": config.actors * config.num_cpus_per_actor + READER_CPUS,
        "GPU": config.actors * config.num_gpus_per_actor,
    }
    for name, amount in need.items():
        if amount > have.get(name, 0.0):
            raise C2KVError(
                f"{config.actors} actors and the reader need {amount:g} {name}, the cluster has "
                f"{have.get(name, 0.0):g}; lower actors or num_{name.lower()}s_per_actor"
            )


class _Committer:
    """Gathers finished documents and publishes them, many in one commit."""

    def __init__(self, config: ExtractConfig, report: ExtractReport) -> None:
        self._store = KVStore.open(config.store)
        self._config = config
        self._report = report
        self._waiting: list[tuple[SourceText | None, list[IndexRow], int]] = []
        self._last = time.monotonic()

    def take(self, row: dict[str, Any]) -> None:
        """Take one row of ``OUT_SCHEMA``; commit when enough wait."""
        if row["failure"] is not None:
            self._report.failed.append(Skipped(doc_id=row["doc_id"], reason=row["failure"]))
            return
        text = None
        if self._config.keep_text:
            text = SourceText(
                namespace=self._config.namespace,
                doc_id=row["doc_id"],
                title=row["title"],
                text=row["text"],
                content_hash=content_hash(row["title"], row["text"]),
            )
        rows = [IndexRow.from_dict(values) for values in json.loads(row["index_rows"])]
        self._waiting.append((text, rows, row["source_tokens"]))
        if len(self._waiting) >= COMMIT_DOCUMENTS or time.monotonic() - self._last >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Publish what waits; only published documents are counted."""
        if not self._waiting:
            return
        rows = [row for _, group, _ in self._waiting for row in group]
        self._store.commit(rows, texts=[text for text, _, _ in self._waiting if text is not None])
        self._report.extracted += len(self._waiting)
        self._report.source_tokens += sum(tokens for _, _, tokens in self._waiting)
        self._report.parts += sum(row.parts for row in rows)
        self._report.slots += sum(row.slots for row in rows)
        self._report.stored_bytes += sum(row.length for row in rows)
        self._waiting = []
        self._last = time.monotonic()


def _save_run(config: ExtractConfig, report: ExtractReport) -> None:
    storage = open_storage(config.store)
    storage.put(f"runs/{report.run}/config.yaml", to_yaml(config).encode())
    storage.put(f"runs/{report.run}/report.json", json.dumps(report.to_dict(), indent=2).encode())


def main(arguments: list[str] | None = None) -> int:
    """``python -m pipelines.extract``: the report as JSON on stdout."""
    return job_main(ExtractConfig, lambda config: extract(config).to_dict(), arguments)


if __name__ == "__main__":
    raise SystemExit(main())
