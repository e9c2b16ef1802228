"""Prometheus metrics of a replica, through Ray: one table says what there is, everything else refers to it.

Ray puts ``ray_`` before each name, and ``_total`` behind counters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from serve_app.engine import EngineStats
from serve_app.events import EndEvent, ReplicaEvent, StartEvent, fault_in

_SECONDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0]
_TOKEN_SECONDS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
_BATCH = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0]


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One metric."""

    kind: Literal["counter", "gauge", "histogram"]
    description: str
    labels: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()
    """Upper ends of a histogram's buckets."""


METRICS: dict[str, MetricSpec] = {
    "c2kv_requests": MetricSpec(
        kind="counter",
        description="Requests that ended, by outcome: ok, or the error's code.",
        labels=("code",),
    ),
    "c2kv_first_token_seconds": MetricSpec(
        kind="histogram",
        description="Parts of the time to first token inside the replica; part total is all of it.",
        labels=("part",),
        boundaries=tuple(_SECONDS),
    ),
    "c2kv_output_token_seconds": MetricSpec(
        kind="histogram",
        description="Mean time of an answer's tokens after the first.",
        boundaries=tuple(_TOKEN_SECONDS),
    ),
    "c2kv_tokens": MetricSpec(
        kind="counter",
        description="Tokens: prompt (source tokens), cached (of these, from stored slots), completion.",
        labels=("kind",),
    ),
    "c2kv_documents": MetricSpec(
        kind="counter", description="Documents of answers, by where they came from.", labels=("tier",)
    ),
    "c2kv_document_bytes": MetricSpec(
        kind="counter", description="Bytes of their keys and values.", labels=("tier",)
    ),
    "c2kv_fallbacks": MetricSpec(
        kind="counter",
        description="Documents whose stored slots were not used, by reason.",
        labels=("reason",),
    ),
    "c2kv_integrity_failures": MetricSpec(
        kind="counter",
        description="Records that failed a check when they were read, by reason.",
        labels=("reason",),
    ),
    "c2kv_running_requests": MetricSpec(kind="gauge", description="Answers being made."),
    "c2kv_queued_requests": MetricSpec(kind="gauge", description="Requests that wait in the replica."),
    "c2kv_batch_size": MetricSpec(
        kind="histogram", description="Answers that a decode step served.", boundaries=tuple(_BATCH)
    ),
    "c2kv_memory_bytes": MetricSpec(
        kind="gauge",
        description="Memory by use: running (contexts of running answers), slots, prefixes.",
        labels=("use",),
    ),
    "c2kv_disk_bytes": MetricSpec(kind="gauge", description="Copies of records on the local disk."),
    "c2kv_evictions": MetricSpec(
        kind="counter",
        description="Values dropped for lack of room, by use: slots, prefixes, disk.",
        labels=("use",),
    ),
}
"""By name, without what Ray adds."""

_PARTS = ("queue", "fetch", "verify", "extract", "compose")


class Sink(Protocol):
    """Where values go."""

    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Count up, set or observe, as the metric's kind is."""
        ...


class RaySink:
    """Ray Serve's metrics; only inside a replica."""

    def __init__(self) -> None:
        from ray.serve import metrics as ray_metrics

        metrics: Any = ray_metrics  # its types ask for one label exactly
        made = {"counter": metrics.Counter, "gauge": metrics.Gauge}
        self._metrics: dict[str, Any] = {}
        for name, spec in METRICS.items():
            if spec.kind == "histogram":
                self._metrics[name] = metrics.Histogram(
                    name, description=spec.description, boundaries=list(spec.boundaries), tag_keys=spec.labels
                )
            else:
                self._metrics[name] = made[spec.kind](
                    name, description=spec.description, tag_keys=spec.labels
                )

    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """See ``Sink``."""
        metric, tags = self._metrics[name], dict(labels)
        match METRICS[name].kind:
            case "counter":
                if value > 0:
                    metric.inc(value, tags=tags)
            case "gauge":
                metric.set(value, tags=tags)
            case "histogram":
                metric.observe(value, tags=tags)


class Recorder:
    """From what a replica tells and holds to metrics."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._counted: dict[tuple[str, str], int] = {}

    def event(self, event: ReplicaEvent) -> None:
        """Record what an answer's event says."""
        match event["event"]:
            case "start":
                self._started(event)
            case "end":
                self._ended(event)
            case "error":
                self._add("c2kv_requests", 1, code=fault_in(event).code)

    def left(self) -> None:
        """Record a client that left before the end."""
        self._add("c2kv_requests", 1, code="client_left")

    def state(
        self,
        stats: EngineStats,
        *,
        memory_bytes: Mapping[str, int],
        disk_bytes: int,
        evictions: Mapping[str, int],
        misses: Mapping[str, int],
    ) -> None:
        """Record what a replica holds now, and what has been counted since the last time."""
        self._add("c2kv_running_requests", stats.running)
        self._add("c2kv_queued_requests", stats.queued)
        for use, size in {"running": stats.running_bytes, **memory_bytes}.items():
            self._add("c2kv_memory_bytes", size, use=use)
        self._add("c2kv_disk_bytes", disk_bytes)
        for use, count in evictions.items():
            self._add("c2kv_evictions", self._since("evictions", use, count), use=use)
        for reason, count in misses.items():
            self._add("c2kv_integrity_failures", self._since("misses", reason, count), reason=reason)

    def batch(self, answers: int) -> None:
        """Record a decode step."""
        self._add("c2kv_batch_size", answers)

    def _started(self, event: StartEvent) -> None:
        timings: Mapping[str, Any] = event["c2kv"]["timings"]
        for part in _PARTS:
            self._add("c2kv_first_token_seconds", timings[f"{part}_ms"] / 1000, part=part)
        self._add("c2kv_first_token_seconds", timings["first_token_ms"] / 1000, part="total")
        for document in event["c2kv"]["documents"]:
            self._add("c2kv_documents", 1, tier=document["tier"])
            self._add("c2kv_document_bytes", document["bytes"], tier=document["tier"])
            if document["fallback_reason"] is not None:
                self._add("c2kv_fallbacks", 1, reason=document["fallback_reason"])

    def _ended(self, event: EndEvent) -> None:
        usage, timings = event["usage"], event["c2kv"]["timings"]
        self._add("c2kv_requests", 1, code="ok")
        self._add("c2kv_tokens", usage["prompt_tokens"], kind="prompt")
        self._add("c2kv_tokens", usage["prompt_tokens_details"]["cached_tokens"], kind="cached")
        self._add("c2kv_tokens", usage["completion_tokens"], kind="completion")
        later = usage["completion_tokens"] - 1
        if later > 0:
            taken_ms = timings["total_ms"] - timings["first_token_ms"]
            self._add("c2kv_output_token_seconds", taken_ms / 1000 / later)

    def _since(self, what: str, label: str, count: int) -> int:
        before = self._counted.get((what, label), 0)
        self._counted[what, label] = count
        return count - before

    def _add(self, name: str, value: float, **labels: str) -> None:
        self._sink.add(name, value, labels)
