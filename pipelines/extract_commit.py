"""The driver's side of a run: what comes back from the actors, published many documents at a time."""

import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from c2kv_core.errors import C2KVError
from c2kv_core.store import DeadLetter, DeadLetters, IndexRow, KVStore, Ledger, SourceText, dead_letter
from pipelines.extract_config import ExtractConfig
from pipelines.extract_metrics import RaySink
from pipelines.extract_report import NAMED, ActorWork, ExtractReport, Skipped, Slow
from pipelines.plan import ExtractPlan

MIN_FAILURES = 10
"""So many documents may fail whatever their share is."""


class TooManyFailuresError(C2KVError):
    """More documents failed than the configuration allows; the fault is probably not theirs."""


class Committer:
    """Takes each document of the plan once, and makes what was written visible."""

    def __init__(self, config: ExtractConfig, plan: ExtractPlan, report: ExtractReport) -> None:
        self._config, self._plan, self._report = config, plan, report
        self._store = KVStore.open(config.store)
        self._letters = DeadLetters.open(config.store)
        self._sink = RaySink("driver", namespace=config.namespace)
        self._taken = np.zeros(len(plan.pending), bool)
        self.taken = 0
        """Documents of the plan that came back, stored or failed."""
        self.failed = 0
        """Of these, documents that failed."""
        self._waiting: list[tuple[SourceText | None, list[IndexRow], Mapping[str, Any]]] = []
        self._new_letters: list[DeadLetter] = []
        self._last_s = time.monotonic()
        self._first_unit_s: float | None = None
        self.done_bytes = 0
        """Bytes of the texts of all documents taken."""

    @property
    def missing(self) -> np.ndarray[Any, np.dtype[np.bytes_]]:
        """Keys of the documents of the plan that did not come back."""
        return self._plan.pending.keys[~self._taken]

    def take(self, unit: Mapping[str, Any]) -> None:
        """Take a row of ``OUT_SCHEMA``; commits when enough wait.

        Raises:
            StoreError: I/O error or lasting write conflict.
            TooManyFailuresError: more failed than ``max_failed_fraction``.
        """
        self._count_unit(unit)
        for outcome in unit["outcomes"]:
            place = self._plan.pending.place(outcome["doc_id"])
            # A unit that was computed twice: the shard of the second is never committed, and gc takes it.
            if place is None or self._taken[place]:
                continue
            self._taken[place] = True
            self.taken += 1
            self.done_bytes += int(self._plan.pending.sizes[place])
            if outcome["kind"] is None:
                self._take_stored(outcome)
            else:
                self._take_failed(outcome)
        self._sink.add("c2kv_extract_pending_documents", len(self._taken) - self.taken)
        if len(self._waiting) >= self._config.commit_documents:
            self.commit()
        self._check_failures()

    def commit_if_due(self) -> None:
        """Commit what has waited long enough.

        Raises:
            StoreError: I/O error or lasting write conflict.
        """
        if time.monotonic() - self._last_s >= self._config.commit_seconds:
            self.commit()

    def commit(self) -> None:
        """Publish what waits, successes and failures; only what is published is counted.

        Raises:
            StoreError: I/O error or lasting write conflict.
        """
        started_s = time.monotonic()
        if self._waiting:
            rows = [row for _, group, _ in self._waiting for row in group]
            self._store.commit(rows, texts=[text for text, _, _ in self._waiting if text is not None])
            if not self._config.keep_text:
                self._forget_old_texts([row.doc_id for row in rows])
            # What failed once and now went well; what fails under another fingerprint does so still.
            for fingerprint in {row.fingerprint for row in rows}:
                stored = [row.doc_id for row in rows if row.fingerprint == fingerprint]
                self._letters.settle(self._config.namespace, fingerprint, stored)
            self._count_committed(rows)
            self._sink.add("c2kv_extract_commit_seconds", time.monotonic() - started_s)
        if self._new_letters:
            self._letters.record(self._new_letters)
        self._waiting, self._new_letters = [], []
        self._last_s = time.monotonic()

    def _forget_old_texts(self, doc_ids: list[str]) -> None:
        """Texts that an earlier run kept are not those of the new slots."""
        pending = self._plan.pending
        changed = {i for i in doc_ids if (place := pending.place(i)) is not None and pending.stored[place]}
        if changed:
            Ledger.open(self._config.store, namespace=self._config.namespace).forget_texts(changed)

    def drop_failures(self) -> None:
        """Forget failures that are not recorded yet, but for those of documents that killed a process."""
        self._new_letters = [letter for letter in self._new_letters if letter.kind == "killed"]

    def _take_stored(self, outcome: Mapping[str, Any]) -> None:
        text = None
        if self._config.keep_text:
            text = SourceText(
                namespace=self._config.namespace,
                doc_id=outcome["doc_id"],
                title=outcome["title"],
                text=outcome["text"],
                content_hash=outcome["content_hash"],
                metadata=outcome["metadata"],
            )
        rows = [IndexRow.from_dict(values) for values in json.loads(outcome["index_rows"])]
        self._waiting.append((text, rows, outcome))
        self._report.add_slow(
            Slow(seconds=outcome["seconds"], source_tokens=outcome["source_tokens"], doc_id=outcome["doc_id"])
        )

    def _take_failed(self, outcome: Mapping[str, Any]) -> None:
        self.failed += 1
        self._report.failed_documents += 1
        if len(self._report.failed) < NAMED:
            self._report.failed.append(
                Skipped(doc_id=outcome["doc_id"], reason=outcome["reason"], kind=outcome["kind"])
            )
        self._sink.add("c2kv_extract_documents", 1, {"outcome": "failed"})
        self._sink.add("c2kv_extract_failures", 1, {"kind": outcome["kind"]})
        self._new_letters += [
            dead_letter(
                namespace=self._config.namespace,
                doc_id=outcome["doc_id"],
                fingerprint=self._report.fingerprints[ratio],
                content_hash=outcome["content_hash"],
                kind=outcome["kind"],
                reason=outcome["reason"],
                attempts=outcome["attempts"],
                run=self._report.run,
            )
            for ratio in self._plan.pending.ratios_of(outcome["doc_id"])
        ]

    def _check_failures(self) -> None:
        allowed = max(MIN_FAILURES, int(self._config.max_failed_fraction * len(self._plan.pending)))
        if self.failed > allowed:
            last = self._report.failed[-1]
            raise TooManyFailuresError(
                f"{self.failed} of {len(self._plan.pending)} documents failed, more than max_failed_fraction "
                f"({self._config.max_failed_fraction:g}) allows; one of them, {last.doc_id!r}: {last.reason}. Failures "
                "not recorded yet are not held against the documents: find the cause and run the command again, with "
                "retry_failed=true for those that were"
            )

    def _count_unit(self, unit: Mapping[str, Any]) -> None:
        report = self._report
        tokens = sum(outcome["source_tokens"] for outcome in unit["outcomes"])
        work = report.actors.setdefault(unit["actor"], ActorWork())
        work.units += 1
        work.source_tokens += tokens
        work.busy_s += unit["seconds"]
        report.cpu_s += unit["cpu_s"]
        report.gpu_s += unit["seconds"] * self._config.num_gpus_per_actor
        report.computed_tokens += unit["padded_tokens"]
        now_s = time.monotonic()
        if self._first_unit_s is None:
            self._first_unit_s = now_s
        else:
            report.steady_tokens += tokens
        report.steady_s = now_s - self._first_unit_s

    def _count_committed(self, rows: list[IndexRow]) -> None:
        report = self._report
        report.commits += 1
        report.extracted += len(self._waiting)
        report.source_tokens += sum(outcome["source_tokens"] for _, _, outcome in self._waiting)
        report.reused_tokens += sum(outcome["reused_tokens"] for _, _, outcome in self._waiting)
        beyond = [o["doc_id"] for _, _, o in self._waiting if o["source_tokens"] > report.positions]
        report.beyond_context_documents += len(beyond)
        report.beyond_context += beyond[: NAMED - len(report.beyond_context)]
        report.parts += sum(row.parts for row in rows)
        report.slots += sum(row.slots for row in rows)
        stored_bytes = sum(row.length for row in rows)
        report.stored_bytes += stored_bytes
        self._sink.add("c2kv_extract_documents", len(self._waiting), {"outcome": "extracted"})
        self._sink.add("c2kv_extract_stored_bytes", stored_bytes)
