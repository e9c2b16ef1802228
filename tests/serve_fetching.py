"""Reading documents for requests: each once, in time, from memory; and what happens while the store is gone."""

import asyncio
import concurrent.futures
import gc
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from c2kv_core.store import KVStore, Miss
from serve_app.cost_gate import CostGate
from serve_app.fetching import DocumentFetcher
from serve_app.plan import Slots
from serve_app.slot_memory import SlotMemory
from tests.s3_server import S3Server
from tests.serve_local import client, local_api
from tests.serve_support import DOCUMENTS, World, ask_body, make_world, put_documents, wait_until

pytest_plugins = ["tests.serve_support"]

SOON_S, LONG_S = 0.3, 60.0


class GatedStore:
    """The real store behind a gate that can be closed."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.open = threading.Event()
        self.open.set()
        self.reads: list[list[str]] = []

    def get(self, ids: list[str], **options: Any) -> Any:
        self.reads.append(list(ids))
        self.open.wait(LONG_S)
        return self._store.get(ids, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def gated(world: World) -> GatedStore:
    return GatedStore(world.open_store())


@pytest.fixture
def fetcher(gated: GatedStore) -> Iterator[DocumentFetcher]:
    made = DocumentFetcher(
        store=gated, memory=SlotMemory(max_bytes=2**30), threads=8, gate=CostGate(factor=0)
    )  # type: ignore[arg-type]
    yield made
    gated.open.set()
    made.close()


def tiers(found: dict[str, Slots | Miss]) -> dict[str, str]:
    return {i: f.reason if isinstance(f, Miss) else f.tier for i, f in found.items()}


def fetch(fetcher: DocumentFetcher, ids: list[str], wait_s: float = LONG_S) -> dict[str, str]:
    return tiers(fetcher.slots(ids, "default", until_s=time.monotonic() + wait_s))


def test_documents_come_from_the_store_and_then_from_memory(fetcher: DocumentFetcher) -> None:
    assert fetch(fetcher, ["oak", "birch", "elm"]) == {"oak": "store", "birch": "store", "elm": "not_found"}
    assert fetch(fetcher, ["birch", "ash", "oak"]) == {"birch": "memory", "ash": "store", "oak": "memory"}
    assert fetch(fetcher, []) == {}


def test_a_document_that_many_ask_for_is_read_once(fetcher: DocumentFetcher, gated: GatedStore) -> None:
    gated.open.clear()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        asked = [
            pool.submit(fetch, fetcher, ["oak", "birch"] if n % 2 else ["birch", "ash"]) for n in range(12)
        ]
        wait_until(lambda: len(gated.reads) >= 2, what="the reads")
        gated.open.set()
        answers = [one.result() for one in asked]
    assert all(tier in ("store", "memory") for answer in answers for tier in answer.values())
    assert sorted(doc_id for read in gated.reads for doc_id in read) == ["ash", "birch", "oak"]
    assert not fetcher._flying


def test_what_comes_too_late_is_given_up_and_stays_for_later_requests(
    fetcher: DocumentFetcher, gated: GatedStore
) -> None:
    assert fetch(fetcher, ["birch"]) == {"birch": "store"}
    gated.open.clear()
    started_s = time.monotonic()
    assert fetch(fetcher, ["oak", "birch"], SOON_S) == {"oak": "late", "birch": "memory"}
    assert time.monotonic() - started_s < 10
    gated.open.set()
    wait_until(lambda: not fetcher._flying, what="the late read")
    assert fetch(fetcher, ["oak"]) == {"oak": "memory"}
    assert gated.reads == [["birch"], ["oak"]]


def test_a_store_that_fails_is_told_of_document_by_document(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    memory = SlotMemory(max_bytes=2**30)
    store = KVStore.open(
        world.store, identity=world.open_store().identity, index_refresh_s=0.0, patience_s=0.1
    )
    fetcher = DocumentFetcher(store=store, memory=memory, threads=4, gate=CostGate(factor=0))
    assert fetch(fetcher, ["oak"]) == {"oak": "store"}
    Path(world.store, "index").rename(tmp_path / "away")
    # What was known goes on being known: in memory, and in shards that can be read.
    assert fetch(fetcher, ["oak"]) == {"oak": "memory"}
    fresh = DocumentFetcher(
        store=KVStore.open(world.store, identity=store.identity),
        memory=SlotMemory(max_bytes=0),
        threads=4,
        gate=CostGate(factor=0),
    )
    assert fetch(fresh, ["oak"]) == {"oak": "unreachable"}
    assert isinstance(fresh.texts(["oak"], "default", until_s=time.monotonic() + LONG_S), dict)
    Path(world.store, "documents").rename(tmp_path / "texts")
    lost = fetcher.texts(["oak"], "default", until_s=time.monotonic() + LONG_S)
    assert isinstance(lost, Miss) and lost.reason == "unreachable"
    for one in (fetcher, fresh):
        one.close()


@pytest.mark.faults
def test_a_frozen_store_leaves_resident_documents_served_and_recovers(
    s3_server: S3Server, bucket: str, world: World
) -> None:
    identity = world.open_store().identity
    put_documents(world, KVStore.open(bucket, identity=identity, create=True), DOCUMENTS.values())

    async def send(http: httpx.AsyncClient, ids: list[str], policy: str = "extract") -> tuple[int, Any]:
        body = ask_body(ids, max_tokens=4, c2kv={"on_missing": policy})
        answer = await http.post("/v1/chat/completions", json=body)
        return answer.status_code, answer.json()

    async def story() -> None:
        config = world.config(store=bucket, fetch_timeout_s=1.0, index_refresh_s=0.5)
        with local_api(config) as api:
            async with client(api) as http:
                assert (await send(http, ["oak"]))[0] == 200
                s3_server.freeze()
                try:
                    await asyncio.sleep(1)
                    started_s = time.monotonic()
                    answers = await asyncio.gather(
                        *(send(http, ["oak"]) for _ in range(20)),
                        *(send(http, ["oak", "birch"], "skip") for _ in range(5)),
                        *(send(http, ["birch"]) for _ in range(5)),
                    )
                    assert time.monotonic() - started_s < 30
                finally:
                    s3_server.thaw()
                assert {status for status, _ in answers[:25]} == {200}
                skipped = answers[20][1]["c2kv"]["documents"]
                assert [(d["tier"], d["fallback_reason"]) for d in skipped] == [
                    ("memory", None),
                    ("skipped", "late"),
                ]
                assert {(s, body["error"]["code"]) for s, body in answers[25:]} == {
                    (503, "store_unavailable")
                }
                for _ in range(100):
                    status, _ = await send(http, ["birch", "ash"])
                    if status == 200:
                        return
                    await asyncio.sleep(0.5)
                raise AssertionError("no recovery")

    asyncio.run(story())


@pytest.mark.faults
def test_ten_thousand_fetches_with_evictions_and_failures_keep_memory_flat(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    identity = world.open_store().identity
    (row,) = [r for r in world.open_store().rows() if r.doc_id == "ash"]
    shard = Path(world.store, row.shard)
    with shard.open("r+b") as file:
        file.seek(row.offset + row.length - 1)
        last = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([last[0] ^ 1]))
    store = KVStore.open(world.store, identity=identity, index_refresh_s=3600.0, patience_s=0.5)
    found = store.get(["oak", "birch"], namespace="default")
    room = max(f.kv_bytes for f in found.values() if not isinstance(f, Miss)) + 1000
    memory = SlotMemory(max_bytes=room)
    fetcher = DocumentFetcher(store=store, memory=memory, threads=4, gate=CostGate(factor=0))
    draw, process = random.Random(0), psutil.Process()

    def run(count: int) -> int:
        for _ in range(count):
            ids = draw.sample(["oak", "birch", "naked", "ash", "never"], 2)
            got = fetch(fetcher, ids)
            assert got.get("ash", "damaged_layer") == "damaged_layer"
            assert got.get("never", "not_found") == "not_found"
            assert memory.used_bytes <= room
        gc.collect()
        return int(process.memory_info().rss)

    run(2_000)
    before = run(2_000)
    after = run(6_000)
    fetcher.close()
    assert after - before < 16 * 2**20
    assert memory.evictions > 1_000 and not fetcher._flying


def test_healthz_says_when_the_store_is_gone_and_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(tmp_path)

    async def healthz(http: httpx.AsyncClient) -> tuple[int, list[str]]:
        answer = await http.get("/healthz")
        return answer.status_code, answer.json()["reasons"]

    async def until(http: httpx.AsyncClient, status: int) -> list[str]:
        for _ in range(200):
            code, reasons = await healthz(http)
            if code == status:
                return reasons
            await asyncio.sleep(0.1)
        raise AssertionError(f"healthz never was {status}")

    async def story() -> None:
        with local_api(world.config()) as api:
            async with client(api) as http:
                assert await until(http, 200) == []
                Path(world.store, "store.json").rename(tmp_path / "away")
                (reason,) = await until(http, 503)
                assert "has not answered" in reason and world.store not in reason
                assert any(
                    "store.json is gone" in line and world.store in line for line in caplog.messages
                ), "what clients are not told is in the log"
                (tmp_path / "away").rename(Path(world.store, "store.json"))
                assert await until(http, 200) == []

    asyncio.run(story())
