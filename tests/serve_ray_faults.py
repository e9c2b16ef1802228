"""Faults of replicas and clients on a real Ray Serve: killed, stuck, and clients that do not read."""

import concurrent.futures
import json
import signal
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from ray import cloudpickle, serve
from torch import Tensor

from serve_app.config import ServeConfig
from serve_app.ingress import Ingress
from serve_app.launch import Running
from serve_app.replica import Generator
from tests.serve_ray_kit import CHAT, Deployed, Stream, deployed
from tests.serve_support import World, ask_body, make_world, wait_until

pytest_plugins = ["tests.serve_support"]
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

LONG_ANSWER = 2000


def test_a_killed_replica_ends_its_own_streams_cleanly_and_comes_back(
    endpoint: Running, world: World
) -> None:
    config = world.config(
        num_replicas=2, num_cpus=0.5, torch_threads=1, routing="load", max_running=3, max_ongoing_requests=3
    )
    with deployed(endpoint, config) as app, app.client() as http:
        # Six fill both replicas, so three are on each.
        streams = [Stream(url=app.url, body=ask_body(["oak"], max_tokens=LONG_ANSWER)) for _ in range(6)]
        assert all(stream.begun.wait(60) for stream in streams)
        victim, survivor = app.processes()
        victim.send_signal(signal.SIGKILL)
        for stream in streams:
            stream.wait()
        assert {stream.status for stream in streams} == {200} and not any(s.broke for s in streams)
        codes = sorted(str(stream.code) for stream in streams)
        assert codes == ["None"] * 3 + ["replica_unavailable"] * 3
        assert sum(stream.is_well for stream in streams) == 3
        # The one that is left answers at once; nobody is told of the other.
        assert http.post(CHAT, json=ask_body(["oak"])).status_code == 200
        wait_until(lambda: app.running_replicas() == 2 and len(app.processes()) == 2, what="the replica")
        assert survivor.pid in {p.pid for p in app.processes()}
        answers = [http.post(CHAT, json=ask_body(["oak"])) for _ in range(6)]
        assert {answer.status_code for answer in answers} == {200}


class Stalling(Generator):
    """Its first replica blocks in a decode step for ever; the ones after it do not."""

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(config)
        marker = Path(config.store, "stalled")
        step, engine = self._engine._step, self._engine  # type: ignore[attr-defined]

        def blocking(steps: Any) -> Tensor:
            if not marker.exists():
                marker.touch()
                time.sleep(3600)
            stepped: Tensor = step(steps)
            return stepped

        engine._step = blocking  # type: ignore[attr-defined]


def test_a_stuck_decode_step_fails_the_health_check_while_the_loop_goes_on(
    endpoint: Running, tmp_path: Path
) -> None:
    config = make_world(tmp_path).config(stall_timeout_s=3.0)
    name = f"stall-{uuid.uuid4().hex[:8]}"
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Serve's processes do not find this file
    generator = serve.deployment(name="Generator", health_check_period_s=1, health_check_timeout_s=10)(
        Stalling
    )
    ingress = serve.deployment(name="Ingress")(Ingress)
    app = Deployed(name=name, url=f"{endpoint.url}/{name}")
    serve.run(ingress.bind(config, generator.bind(config)), name=name, route_prefix=f"/{name}")
    try:
        with app.client() as http:
            stuck = Stream(url=app.url, body=ask_body(["oak"], max_tokens=50))
            wait_until(lambda: Path(config.store, "stalled").exists(), what="the step that blocks")
            (first,) = app.processes()
            # The replica's own loop answers although its model does not.
            answered = 0
            while answered < 50:
                assert app.stats()["running"] == 1
                assert http.get("/v1/documents/oak").status_code == 200
                answered += 1
            assert not stuck.events[2:]
            stuck.wait()
            assert stuck.code == "replica_unavailable"
            wait_until(lambda: [p.pid for p in app.processes()] not in ([first.pid], []), what="another one")
            assert http.post(CHAT, json=ask_body(["oak"])).status_code == 200
    finally:
        serve.delete(name)


def unread(app: Deployed, body: dict[str, Any]) -> socket.socket:
    """A connection whose client asks for a stream and reads nothing of it."""
    address = urlsplit(app.url)
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST {address.path}{CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.socket()
    # Little room on the way, so that it is the server that has to hold what is not read.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((str(address.hostname), address.port or 80))
    connection.sendall(head.encode() + content)
    return connection


def test_clients_that_do_not_read_hold_up_nobody(endpoint: Running, world: World) -> None:
    with deployed(endpoint, world.config(max_running=4, max_ongoing_requests=8)) as app, app.client() as http:
        (replica,) = app.processes()
        assert http.post(CHAT, json=ask_body(["oak"])).status_code == 200
        wide = {"logprobs": True, "top_logprobs": 20, "ignore_eos": True}
        rounds = []
        for _ in range(3):
            before = app.stats()
            lazy = [unread(app, ask_body(["oak"], max_tokens=300, **wide)) for _ in range(3)]
            wait_until(lambda: app.stats()["running"] == 3, what="the unread streams")
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                others = list(pool.map(lambda _: http.post(CHAT, json=ask_body(["birch"])), range(6)))
            assert {answer.status_code for answer in others} == {200}
            # Their answers are made to the end although nobody takes them, and then hold nothing.
            app.idle()
            assert app.stats()["finished"] - before["finished"] == 9
            rounds.append(replica.memory_info().rss)
            for connection in lazy:
                connection.close()
        assert rounds[-1] - rounds[0] < 32 * 2**20, rounds
        ended = app.stats()["failed"]
        late = unread(app, ask_body(["oak"], max_tokens=LONG_ANSWER, **wide, c2kv={"deadline_ms": 1500}))
        wait_until(lambda: app.stats()["failed"] == ended + 1, what="the deadline")
        app.idle()
        late.close()
