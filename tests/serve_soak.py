"""Minutes of mixed load on a real Ray Serve leave memory flat and nothing behind (R23).

``C2KV_SOAK_S`` sets the seconds, 600 by default. Figures go to ``C2KV_SOAK_FIGURES``, a JSON file, if that is set.
"""

import json
import os
import random
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve_app.launch import Running
from tests.serve_ray_kit import CHAT, PATIENCE_S, Deployed, deployed
from tests.serve_support import World, ask_body, make_world

pytest_plugins = ["tests.serve_support"]
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(0)]

CLIENTS = 8
SAMPLE_S = 2.0
WARM_SHARE = 0.3
"""Of the time, after which caches and allocators have what they want."""
GROWTH = 0.05
"""Of the memory after warm-up: what the end may lie above it."""
EXPECTED = {
    "stream": {200, 503},
    "whole": {200, 503},
    "leave": {200, 503},
    "missing": {404, 503},
    "skipped": {200, 503},
    "given": {200, 503},
    "put": {200, 503},
    "delete": {200, 404, 503},
}
"""Statuses by what a client does; 503 only under load."""


class Client:
    """Does one thing after another, drawn by chance."""

    def __init__(self, app: Deployed, number: int, ends_s: float) -> None:
        self._done: Counter[tuple[str, int]] = Counter()
        self._draw = random.Random(number)
        self._own = f"own-{number}"
        self._app, self._ends_s = app, ends_s

    def run(self) -> Counter[tuple[str, int]]:
        """How often each thing was done, with which status."""
        actions = list(EXPECTED)
        weights = [6, 4, 3, 1, 1, 2, 1, 1]
        with httpx.Client(base_url=self._app.url, timeout=PATIENCE_S) as http:
            while time.monotonic() < self._ends_s:
                (action,) = self._draw.choices(actions, weights)
                self._done[action, self._act(http, action)] += 1
        return self._done

    def _act(self, http: httpx.Client, action: str) -> int:
        ids = self._draw.choices(["oak", "birch", "ash", "naked"], k=self._draw.randrange(4))
        tokens = self._draw.randrange(1, 40)
        match action:
            case "stream" | "leave":
                return self._stream(http, ask_body(ids, max_tokens=tokens), leaves=action == "leave")
            case "missing":
                body = ask_body([*ids, "never"], max_tokens=tokens)
            case "skipped":
                body = ask_body([*ids, "never"], max_tokens=tokens, c2kv={"on_missing": "skip"})
            case "given":
                text = f"Note {self._draw.randrange(10**9)} about the larch. " * 5
                body = ask_body([*ids, {"text": text}], max_tokens=tokens)
            case "put":
                text = f"Tree {self._draw.randrange(10**9)} has leaves. " * self._draw.randrange(1, 20)
                return http.put(f"/v1/documents/{self._own}", json={"text": text}).status_code
            case "delete":
                return http.delete(f"/v1/documents/{self._own}").status_code
            case _:
                body = ask_body(ids, max_tokens=tokens, temperature=self._draw.choice([0, 1]))
        return http.post(CHAT, json=body).status_code

    def _stream(self, http: httpx.Client, body: dict[str, Any], *, leaves: bool) -> int:
        if leaves:
            body = {**body, "max_tokens": 400, "ignore_eos": True}
        with http.stream("POST", CHAT, json={**body, "stream": True}) as answer:
            lines = answer.iter_lines()
            if leaves:
                next(lines, None)
            elif answer.status_code == 200:
                assert [line for line in lines if line][-1] == "data: [DONE]"
            return answer.status_code


def watched(app: Deployed) -> dict[str, psutil.Process]:
    """Processes whose memory must stay flat."""
    found = {"replica": app.processes()[0]}
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if f"ray::ServeReplica:{app.name}:Ingress" in line:
            found["ingress"] = process
    return found


def summary(samples: list[dict[str, int]]) -> dict[str, dict[str, float]]:
    """MiB of each process: the median after warm-up and at the end, a tenth of the samples each."""
    width, warm = max(1, len(samples) // 10), int(WARM_SHARE * len(samples))
    return {
        name: {
            "warm_mib": statistics.median(s[name] for s in samples[warm : warm + width]) / 2**20,
            "end_mib": statistics.median(s[name] for s in samples[-width:]) / 2**20,
        }
        for name in samples[0]
    }


def test_minutes_of_mixed_load_leave_memory_flat(endpoint: Running, tmp_path: Path) -> None:
    world: World = make_world(tmp_path)
    seconds = float(os.environ.get("C2KV_SOAK_S", "600"))
    config = world.config(
        max_running=4,
        max_ongoing_requests=8,
        memory_cache_bytes=2 * 2**20,
        prefix_cache_bytes=2**20,
        index_refresh_s=1.0,
    )
    with deployed(endpoint, config) as app:
        processes = watched(app)
        assert set(processes) == {"replica", "ingress"}
        samples: list[dict[str, int]] = []
        with ThreadPoolExecutor(CLIENTS) as pool:
            ends_s = time.monotonic() + seconds
            running = [pool.submit(Client(app, number, ends_s).run) for number in range(CLIENTS)]
            while not all(client.done() for client in running):
                samples.append({name: int(p.memory_info().rss) for name, p in processes.items()})
                time.sleep(SAMPLE_S)
        done = sum((client.result() for client in running), Counter[tuple[str, int]]())
        app.idle()
        stats = app.stats()
        told = summary(samples)
        figures = {"seconds": seconds, "requests": done.total(), "memory": told, "stats": stats}
        figures["done"] = {f"{action} {status}": count for (action, status), count in sorted(done.items())}
        if file := os.environ.get("C2KV_SOAK_FIGURES"):
            Path(file).write_text(json.dumps({**figures, "samples": samples}))
        assert app.processes()[0] == processes["replica"], "the replica was replaced"
    assert all(status in EXPECTED[action] for action, status in done), figures
    assert all(any(action == name for name, _ in done) for action in EXPECTED), figures
    for memory in told.values():
        assert memory["end_mib"] < (1 + GROWTH) * memory["warm_mib"], figures
