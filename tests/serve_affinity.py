"""Requests for the same documents go to the same replica; measured beside routing by load, on three real replicas."""

import itertools
import random
from pathlib import Path

import httpx
import pytest
from ray import serve

from c2kv_core.errors import ConfigError
from serve_app.affinity import affinity_key
from serve_app.app import bind, build
from serve_app.launch import Running
from tests.serve_support import World, ask_body, make_world

pytest_plugins = ["tests.serve_support"]


def test_requests_agree_as_often_as_their_documents_overlap() -> None:
    assert affinity_key("a", []) is None
    assert affinity_key("a", ["x", "y"]) == affinity_key("a", ["y", "x", "x"])
    assert affinity_key("a", ["x"]) != affinity_key("b", ["x"])
    draw, agreed, expected = random.Random(0), 0, 0.0
    for _ in range(4000):
        first, second = ({str(draw.randrange(12)) for _ in range(6)} for _ in range(2))
        expected += len(first & second) / len(first | second)
        agreed += affinity_key("a", first) == affinity_key("a", second)
    assert abs(agreed - expected) < 200
    assert len({affinity_key("a", [str(n)]) for n in range(1000)}) == 1000


def test_fewer_most_than_least_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_replicas"):
        build({"store": "x", "num_replicas": 3, "max_replicas": 2})


def hit_rate(running: Running, world: World, routing: str) -> float:
    """Share of documents that came from a replica's memory, over requests for pairs of documents in turn."""
    name = f"affinity-{routing}"
    config = world.config(num_replicas=3, num_cpus=0.5, torch_threads=1, routing=routing)
    serve.run(bind(config), name=name, route_prefix=f"/{name}")
    pairs = list(itertools.combinations(["oak", "birch", "ash", "naked"], 2))
    draw = random.Random(0)
    hits = documents = 0
    try:
        with httpx.Client(base_url=running.url, timeout=60) as http:
            for _ in range(36):
                body = ask_body(list(draw.choice(pairs)), max_tokens=1)
                answer = http.post(f"/{name}/v1/chat/completions", json=body).json()
                tiers = [d["tier"] for d in answer["c2kv"]["documents"]]
                hits, documents = hits + tiers.count("memory"), documents + len(tiers)
    finally:
        serve.delete(name)
    return hits / documents


@pytest.mark.ray
@pytest.mark.faults
def test_documents_are_found_in_memory_more_often_than_by_load(endpoint: Running, tmp_path: Path) -> None:
    world = make_world(tmp_path)
    by_documents = hit_rate(endpoint, world, "documents")
    by_load = hit_rate(endpoint, world, "load")
    assert by_documents > by_load, (by_documents, by_load)
