"""Prometheus metrics of the extraction job, through Ray: one table says what there is.

Ray puts ``ray_`` before each name, and ``_total`` behind counters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """One metric."""

    kind: Literal["counter", "gauge", "histogram"]
    where: Literal["actor", "driver"]
    description: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, MetricSpec] = {
    "c2kv_extract_source_tokens": MetricSpec(
        kind="counter", where="actor", description="Source tokens of documents whose shards are written."
    ),
    "c2kv_extract_computed_tokens": MetricSpec(
        kind="counter", where="actor", description="Tokens that went through the model, padding included."
    ),
    "c2kv_extract_unit_seconds": MetricSpec(
        kind="histogram", where="actor", description="Time of a unit of documents, writing included."
    ),
    "c2kv_extract_documents": MetricSpec(
        kind="counter",
        where="driver",
        description="Documents by what became of them: extracted, failed.",
        labels=("outcome",),
    ),
    "c2kv_extract_failures": MetricSpec(
        kind="counter", where="driver", description="Documents that failed, by kind.", labels=("kind",)
    ),
    "c2kv_extract_stored_bytes": MetricSpec(
        kind="counter", where="driver", description="Bytes of records that were committed."
    ),
    "c2kv_extract_commit_seconds": MetricSpec(
        kind="histogram", where="driver", description="Time of a commit of texts and index."
    ),
    "c2kv_extract_pending_documents": MetricSpec(
        kind="gauge", where="driver", description="Documents of the run that are not finished yet."
    ),
}
"""By name, without what Ray adds. All carry the label namespace."""


class RaySink:
    """The metrics of one process; only inside Ray."""

    def __init__(self, where: Literal["actor", "driver"], *, namespace: str) -> None:
        from ray.util import metrics

        kinds: dict[str, Any] = {"counter": metrics.Counter, "gauge": metrics.Gauge}
        self._namespace = namespace
        self._metrics: dict[str, Any] = {}
        for name, spec in METRICS.items():
            if spec.where != where:
                continue
            tags = ("namespace", *spec.labels)
            if spec.kind == "histogram":
                self._metrics[name] = metrics.Histogram(
                    name, description=spec.description, boundaries=list(_SECONDS), tag_keys=tags
                )
            else:
                self._metrics[name] = kinds[spec.kind](name, description=spec.description, tag_keys=tags)

    def add(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Count up, set or observe, as the metric's kind is."""
        metric, tags = self._metrics[name], {"namespace": self._namespace, **(labels or {})}
        match METRICS[name].kind:
            case "counter":
                if value > 0:  # Ray refuses to count nothing
                    metric.inc(value, tags=tags)
            case "gauge":
                metric.set(value, tags=tags)
            case "histogram":
                metric.observe(value, tags=tags)
