"""The extraction job: a corpus through Ray Data into a store of compressed documents.

python -m pipelines.extract --config FILE.yaml key=value ...
"""

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import numpy as np

from c2kv_core import CompressorSpec
from c2kv_core.errors import C2KVError, StoreError
from c2kv_core.store import Attempt, Attempts, KVStore, check_namespace, open_storage
from c2kv_core.store.attempts import HEARTBEAT_S
from pipelines.corpus.scan import keys_of
from pipelines.extract_commit import Committer, TooManyFailuresError
from pipelines.extract_config import ExtractConfig
from pipelines.extract_plan import plan_run, still_missing, still_there
from pipelines.extract_promote import check_and_promote
from pipelines.extract_report import ExtractReport, Skipped
from pipelines.extract_save import save_run
from pipelines.extract_upkeep import relabel, remove_missing
from pipelines.interrupts import sigterm_interrupts
from pipelines.job import job_main
from pipelines.plan import ExtractPlan
from pipelines.ray_session import ray_session

Phase = Literal["planning", "starting Ray", "loading the model", "extracting", "finishing"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    phase: Phase
    done: int = 0
    """Documents finished, published or not, failures included."""
    failed: int = 0
    pending: int = 0
    """Documents to extract in this run."""
    source_tokens: int = 0
    """Of the finished documents."""
    elapsed_s: float = 0.0
    """Since the first unit was begun."""
    eta_s: float | None = None
    """Seconds to go, by the bytes of the texts done and to do; None before anything is done."""

    @property
    def tokens_per_s(self) -> float:
        """Source tokens a second so far."""
        return self.source_tokens / self.elapsed_s if self.elapsed_s else 0.0


OnProgress = Callable[[Progress], None]


def extract(config: ExtractConfig, *, progress: OnProgress | None = None) -> ExtractReport:
    """Extract what is new or changed in a corpus.

    The whole corpus is read and checked first; nothing is written when a row is bad. A run over an unchanged corpus
    starts no Ray and loads no model.

    Raises:
        KeyboardInterrupt: Ctrl-C, or SIGTERM came; what is finished is published.
        InputError: a subclass that says what is wrong with corpus, model, sidecar, ratio or store.
        StoreError: the store failed.
        C2KVError: a document got lost on the way, too many failed, or nothing finished for ``stall_timeout_s``.
    """
    with sigterm_interrupts():
        return _extract(config, progress or (lambda _: None))


def _extract(config: ExtractConfig, tell: OnProgress) -> ExtractReport:
    tell(Progress(phase="planning"))
    spec = config.spec()
    check_namespace(config.namespace)
    planned = plan_run(config)
    plan = planned.plan
    report = _new_report(config, spec, plan)
    report.fingerprints = planned.fingerprints
    report.failed_before = planned.failed_before
    started = time.monotonic()
    try:
        if len(plan.pending):
            KVStore.open(config.store, create=True)
            tell(Progress(phase="starting Ray", pending=len(plan.pending)))
            with ray_session():
                _run(config, plan, report, tell)
        report.relabelled = relabel(config, plan)
        missing = planned.missing
        if missing and len(plan.pending):
            # Time has passed, and nothing is as final as this.
            missing = still_missing(config, missing)
        report.removed = remove_missing(config, missing, planned.missing_failures)
        if report.unaccounted:
            raise C2KVError(
                f"{report.unaccounted} documents are unaccounted for in {report.run}; this is a fault of the job"
            )
        if config.quality_check is not None or config.promote:
            report.quality = check_and_promote(config, report)
        report.state = "done"
    except C2KVError as error:
        report.state = f"stopped: {error}"
        raise
    except KeyboardInterrupt:
        report.state = "interrupted"
        raise
    finally:
        report.elapsed_s = time.monotonic() - started
        if config.price_per_hour is not None:
            report.cost = config.price_per_hour * config.actors * report.elapsed_s / 3600
        if len(plan.pending) or report.relabelled or report.removed or report.quality:
            with suppress(StoreError):
                save_run(config, report)
    return report


def _new_report(config: ExtractConfig, spec: CompressorSpec, plan: ExtractPlan) -> ExtractReport:
    return ExtractReport(
        run=f"extract-{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}",
        store=config.store,
        namespace=config.namespace,
        fingerprints={},
        hardware=config.hardware,
        sidecar="trained" if spec.is_trained() else "untrained",
        positions=spec.max_positions(),
        documents=plan.documents,
        not_in_corpus=plan.gone,
        unchanged=plan.unchanged,
        new=plan.new,
        changed=plan.changed,
        skipped_documents=plan.empty,
        skipped=[Skipped(doc_id=doc_id, reason="the document has no text") for doc_id in plan.empty_ids],
    )


def _run(config: ExtractConfig, plan: ExtractPlan, report: ExtractReport, tell: OnProgress) -> None:
    from pipelines.extract_stage import StageSettings
    from pipelines.extract_stream import finished_units

    attempts = Attempts(open_storage(config.store), namespace=config.namespace, run=report.run)
    with _heartbeat(attempts), _forgiven_when_interrupted(attempts):
        earlier = attempts.left_behind()
        suspects: Counter[tuple[str, str]] = Counter()
        for attempt in earlier.values():
            # Asked to try again, earlier deaths only say what is to be alone.
            counted = int(attempt.is_alone and not config.retry_failed)
            suspects.update(dict.fromkeys(attempt.documents, counted))
        settings = StageSettings(
            spec=config.spec(),
            fingerprints=report.fingerprints,
            store=config.store,
            namespace=config.namespace,
            run=report.run,
            threads=config.threads(),
            keep_text=config.keep_text,
            attention=config.attention,
            deterministic=config.deterministic,
            max_attempts=config.max_attempts,
            max_document_bytes=config.max_document_bytes,
            suspects=dict(suspects),
        )
        committer = Committer(config, plan, report)
        with closing(finished_units(config, plan, settings, attempts)) as units:
            _follow(units, committer, plan, report, tell)
        if len(committer.missing):
            report.vanished = len(committer.missing) - still_there(config, committer.missing)
        attempts.clear(path for path, attempt in earlier.items() if _is_settled(attempt, plan))


def _is_settled(attempt: Attempt, plan: ExtractPlan) -> bool:
    """Whether every document of it was looked at by this run, which ended well."""
    keys = keys_of([doc_id for doc_id, _ in attempt.documents])
    return bool(np.isin(keys, plan.all_keys).all())


def _follow(
    units: Iterator[dict[str, object] | None],
    committer: Committer,
    plan: ExtractPlan,
    report: ExtractReport,
    tell: OnProgress,
) -> None:
    """Take units as they come, commit, and say how far it is."""
    started = time.monotonic()
    tell(Progress(phase="loading the model", pending=len(plan.pending)))
    try:
        for unit in units:
            if unit is not None:
                committer.take(unit)
            committer.commit_if_due()
            if committer.taken:
                tell(_progress(committer, plan, report, time.monotonic() - started))
        committer.commit()
    except TooManyFailuresError:
        committer.drop_failures()
        committer.commit()
        raise
    except (C2KVError, KeyboardInterrupt):
        # What is finished need not be computed again.
        with suppress(StoreError):
            committer.commit()
        raise


def _progress(committer: Committer, plan: ExtractPlan, report: ExtractReport, elapsed_s: float) -> Progress:
    tokens = sum(work.source_tokens for work in report.actors.values())
    left = plan.pending_bytes - committer.done_bytes
    return Progress(
        phase="extracting" if committer.taken < len(plan.pending) else "finishing",
        done=committer.taken,
        failed=committer.failed,
        pending=len(plan.pending),
        source_tokens=tokens,
        elapsed_s=elapsed_s,
        eta_s=elapsed_s * left / committer.done_bytes if committer.done_bytes else None,
    )


@contextmanager
def _forgiven_when_interrupted(attempts: Attempts) -> Iterator[None]:
    """Processes that are stopped along with the run have not died of their documents."""
    try:
        yield
    except KeyboardInterrupt:
        with suppress(StoreError):
            attempts.withdraw()
        raise


@contextmanager
def _heartbeat(attempts: Attempts) -> Iterator[None]:
    """Inside, other runs can see that this one goes on."""
    attempts.heartbeat()
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT_S):
            # Storage that does not answer is noticed by whoever needs it.
            with suppress(StoreError):
                attempts.heartbeat()

    thread = threading.Thread(target=beat, name="c2kv-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main(arguments: list[str] | None = None) -> int:
    """``python -m pipelines.extract``: the report as JSON on stdout, progress on stderr."""
    return job_main(ExtractConfig, _job, arguments)


def _job(config: ExtractConfig) -> dict[str, object]:
    from pipelines.extract_estimate import dry_run
    from pipelines.extract_lines import ProgressLines

    if config.dry_run:
        return dry_run(config).to_dict()
    return extract(config, progress=ProgressLines(config.progress_s)).to_dict()


if __name__ == "__main__":
    raise SystemExit(main())
