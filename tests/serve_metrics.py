"""Metrics of a replica: what they say of answers, and that Prometheus gets them from a real Ray."""

import re
from collections import defaultdict
from collections.abc import Mapping

import httpx
import pytest
import ray

from serve_app.launch import Running
from serve_app.loading import load_service
from serve_app.metrics import METRICS, Recorder
from tests.serve_support import World, ask, ask_body, wait_until

pytest_plugins = ["tests.serve_support"]


class Kept:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.values: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)

    def add(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        assert tuple(sorted(labels)) == tuple(sorted(METRICS[name].labels)), name
        self.values[(name, *labels.values())].append(value)

    def total(self, *key: str) -> float:
        return sum(self.values[key])


def test_answers_are_counted_by_what_became_of_them(world: World) -> None:
    kept = Kept()
    recorder = Recorder(kept)
    service, _ = load_service(world.config(memory_cache_bytes=2**30), recorder)
    for _ in range(2):
        for event in ask(service, ["oak", "birch"], max_tokens=6).events:
            recorder.event(event)
    for event in ask(service, ["elm"]).events:
        recorder.event(event)
    given = ask(service, [{"text": "A note."}], max_tokens=1)
    for event in given.events:
        recorder.event(event)
    service.record()
    service.close()
    assert (kept.total("c2kv_requests", "ok"), kept.total("c2kv_requests", "document_not_found")) == (3, 1)
    tiers = {tier: kept.total("c2kv_documents", tier) for tier in ("store", "memory", "extracted")}
    assert tiers == {"store": 2, "memory": 2, "extracted": 1}
    assert kept.total("c2kv_document_bytes", "store") == kept.total("c2kv_document_bytes", "memory") > 0
    assert kept.total("c2kv_tokens", "completion") == 13
    assert kept.total("c2kv_tokens", "prompt") > kept.total("c2kv_tokens", "cached") > 0
    assert len(kept.values["c2kv_output_token_seconds",]) == 2
    assert {part for name, *rest in kept.values if name == "c2kv_first_token_seconds" for part in rest} == {
        "queue",
        "fetch",
        "verify",
        "extract",
        "compose",
        "total",
    }
    assert kept.values["c2kv_batch_size",] == [1.0] * 13  # three read their question
    assert kept.values["c2kv_running_requests",][-1] == 0
    assert kept.values["c2kv_memory_bytes", "slots"][-1] > 0


def test_counts_of_the_replica_go_out_as_differences(world: World) -> None:
    kept = Kept()
    recorder = Recorder(kept)
    service, engine = load_service(world.config(), recorder)
    for count in (2, 2, 5):
        recorder.state(
            engine.stats(),
            memory_bytes={"slots": 7},
            disk_bytes=3,
            evictions={"slots": count},
            misses={"truncated": count},
        )
    service.close()
    assert kept.values["c2kv_evictions", "slots"] == [2, 0, 3]
    assert kept.values["c2kv_integrity_failures", "truncated"] == [2, 0, 3]


@pytest.mark.ray
@pytest.mark.slow
def test_prometheus_gets_every_metric_from_ray(endpoint: Running) -> None:
    with httpx.Client(base_url=endpoint.url, timeout=60) as http:
        for documents in (["oak", "birch"], ["oak"], ["elm"]):
            http.post("/v1/chat/completions", json=ask_body(documents, max_tokens=5))
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    expected = {
        name
        for name in METRICS
        if name not in ("c2kv_fallbacks", "c2kv_evictions", "c2kv_integrity_failures")  # nothing to count yet
    }

    def there() -> bool:
        text = httpx.get(url, timeout=10).text
        found = set(re.findall(r"^ray_(c2kv_\w+?)(?:_total|_bucket|_sum|_count)?{", text, re.MULTILINE))
        return expected <= found

    wait_until(there, what="all metrics", timeout_s=120)
    text = httpx.get(url, timeout=10).text
    assert re.search(r'^ray_c2kv_requests_total{.*code="document_not_found".*} [1-9]', text, re.MULTILINE)
    assert "oak" not in "".join(line for line in text.splitlines() if "c2kv" in line)
