"""On a real Ray Serve under load: the store goes away and comes back, and the application is rolled over."""

import json
import threading
from typing import Any

import httpx
import pytest
from ray import serve

from c2kv_core.store import KVStore
from serve_app.app import bind
from serve_app.launch import Running
from tests.s3_server import S3Server
from tests.serve_ray_kit import CHAT, PATIENCE_S, Load, Stream, deployed
from tests.serve_support import DOCUMENTS, World, ask_body, put_documents, wait_until

pytest_plugins = ["tests.serve_support"]
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]


def by_policy(http: httpx.Client, policy: str, documents: list[str]) -> tuple[int, str, list[Any]]:
    """Status, code and what the answer says of each document."""
    body = ask_body(documents, max_tokens=2, c2kv={"on_missing": policy})
    answer = http.post(CHAT, json=body)
    told = answer.json()
    reports = [(d["id"], d["tier"], d["fallback_reason"]) for d in told.get("c2kv", {}).get("documents", ())]
    return answer.status_code, told.get("error", {}).get("code", ""), reports


def test_a_store_that_is_gone_for_a_while_costs_only_what_is_not_resident(
    endpoint: Running, world: World, s3_server: S3Server, bucket: str
) -> None:
    identity = world.open_store().identity
    put_documents(world, KVStore.open(bucket, identity=identity, create=True), DOCUMENTS.values())
    config = world.config(store=bucket, fetch_timeout_s=1.0, index_refresh_s=0.5)
    with deployed(endpoint, config) as app, app.client() as http:
        before = app.processes()
        assert by_policy(http, "extract", ["oak"])[2] == [("oak", "store", None)]
        resident = [ask_body(["oak"], max_tokens=4), ask_body(["oak", "oak"], max_tokens=4)]
        with Load(app.url, resident) as load:
            load.next(3)
            s3_server.freeze()
            try:
                for policy in ("extract", "text", "error"):
                    assert by_policy(http, policy, ["oak", "birch"])[:2] == (503, "store_unavailable"), policy
                status, _, reports = by_policy(http, "skip", ["birch", "oak"])
                assert status == 200 and reports[1] == ("oak", "memory", None)
                assert reports[0][:2] == ("birch", "skipped") and reports[0][2] in ("late", "unreachable")
                given = http.post(CHAT, json=ask_body([{"text": "A fir."}], max_tokens=2))
                assert given.status_code == 200
                wait_until(lambda: http.get("/healthz").status_code == 503, what="bad health")
                (reason,) = http.get("/healthz").json()["reasons"]
                assert bucket not in reason and "has not answered" in reason
                load.next(3)
            finally:
                s3_server.thaw()
            wait_until(lambda: http.get("/healthz").status_code == 200, what="good health")
            wait_until(
                lambda: by_policy(http, "error", ["ash"])[2] == [("ash", "store", None)], what="recovery"
            )
        assert {status for status, _ in load.answers} == {200}
        tiers = {d["tier"] for _, text in load.answers for d in json.loads(text)["c2kv"]["documents"]}
        assert tiers == {"memory"}
        assert app.processes() == before
        app.idle()


def test_a_rolling_update_under_load_loses_nothing(endpoint: Running, world: World) -> None:
    config = world.config(max_running=6, max_ongoing_requests=12, num_cpus=0.5)
    other = config.model_copy(update={"max_new_tokens_limit": 400})
    with deployed(endpoint, config) as app, app.client() as http:
        (before,) = app.processes()
        update = threading.Thread(
            target=lambda: serve.run(bind(other), name=app.name, route_prefix=f"/{app.name}"), daemon=True
        )
        streams: list[Stream] = []

        def is_draining() -> bool:
            """Whether the old replica has been asked to stop; until then streams come and go."""
            if sum(stream.is_open for stream in streams) < 3:
                streams.append(Stream(url=app.url, body=ask_body(["oak"], max_tokens=400)))
            states = serve.status().applications[app.name].deployments["Generator"].replica_states
            return "STOPPING" in states

        with Load(app.url, [ask_body(["birch"], max_tokens=3)]) as load:
            load.next(2)
            update.start()
            wait_until(is_draining, what="the old replica to drain", timeout_s=PATIENCE_S)
            assert any(stream.is_open for stream in streams)
            update.join()
            load.next(2)
            for stream in streams:
                stream.wait()
        assert all(stream.is_well for stream in streams), [stream.code for stream in streams]
        assert {status for status, _ in load.answers} == {200}
        assert http.post(CHAT, json=ask_body(max_tokens=401)).json()["error"]["param"] == "max_tokens"
        wait_until(lambda: before.pid not in {p.pid for p in app.processes()}, what="the end of the old one")
