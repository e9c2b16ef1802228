"""What the fault tests over a real Ray Serve share: applications beside the session's, streams that are held open."""

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from ray import serve

from serve_app.app import bind
from serve_app.config import ServeConfig
from serve_app.launch import Running
from tests.serve_support import wait_until

CHAT = "/v1/chat/completions"
PATIENCE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Deployed:
    """An application of its own on the session's Serve."""

    name: str
    url: str

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def stats(self) -> dict[str, int]:
        """Of one of its replicas."""
        return dict(serve.get_deployment_handle("Generator", self.name).stats.remote().result())

    def processes(self) -> list[psutil.Process]:
        """Of its generator replicas. The name is unique, so these are no others'."""
        title = f"ray::ServeReplica:{self.name}:Generator"
        return [p for p in psutil.process_iter(["cmdline"]) if title in " ".join(p.info["cmdline"] or ())]

    def running_replicas(self) -> int:
        deployment = serve.status().applications[self.name].deployments["Generator"]
        return sum(count for state, count in deployment.replica_states.items() if state == "RUNNING")

    def idle(self) -> None:
        """Wait until a replica holds nothing."""
        wait_until(
            lambda: (s := self.stats())["running"] + s["queued"] + s["running_bytes"] == 0, what="idle"
        )


@contextmanager
def deployed(running: Running, config: ServeConfig) -> Iterator[Deployed]:
    """Deploy under a fresh name, and delete it afterwards."""
    name = f"faults-{uuid.uuid4().hex[:8]}"
    made = Deployed(name=name, url=f"{running.url}/{name}")
    serve.run(bind(config), name=name, route_prefix=f"/{name}")
    try:
        yield made
    finally:
        serve.delete(name)


@dataclass(kw_only=True)
class Stream:
    """One streamed answer, read on a thread of its own."""

    url: str
    body: dict[str, Any]
    status: int | None = None
    retry_after: str | None = None
    events: list[str] = field(default_factory=list)
    broke: bool = False
    """Whether the connection ended in the middle of the body."""
    begun: threading.Event = field(default_factory=threading.Event)
    """A first piece of the answer has come, or a refusal."""

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait(self) -> "Stream":
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the stream does not end"
        return self

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    @property
    def code(self) -> str | None:
        """Of the error it ended with."""
        last = self.events[-1] if self.events else "{}"
        return None if last == "[DONE]" else json.loads(last).get("error", {}).get("code")

    @property
    def is_well(self) -> bool:
        return self.status == 200 and not self.broke and self.events[-1:] == ["[DONE]"]

    def _read(self) -> None:
        try:
            with httpx.stream(
                "POST", self.url + CHAT, json={**self.body, "stream": True}, timeout=PATIENCE_S
            ) as answer:
                self.status, self.retry_after = answer.status_code, answer.headers.get("retry-after")
                for line in answer.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
                    if len(self.events) > 1:
                        self.begun.set()
        except httpx.RemoteProtocolError:
            self.broke = True
        finally:
            self.begun.set()


class Load:
    """Clients that ask again and again until the end of a ``with`` block."""

    def __init__(self, url: str, bodies: list[dict[str, Any]]) -> None:
        self.answers: list[tuple[int, str]] = []
        """Status and body of each, in the order of their ends."""
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(url, body), daemon=True) for body in bodies]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def next(self, count: int) -> None:
        """Wait for some more answers."""
        wanted = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= wanted, what="answers", timeout_s=PATIENCE_S)

    def _ask(self, url: str, body: dict[str, Any]) -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            while not self._stop.is_set():
                answer = http.post(CHAT, json=body)
                self.answers.append((answer.status_code, answer.text))
