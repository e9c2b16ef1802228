"""Writers that die at every step of publishing, servers that go away and come back, writers at once."""

import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from c2kv_core.errors import StoreError
from c2kv_core.store import IndexRow, KVStore, Miss, open_storage, s3_client
from tests.core_store_kit import assert_same, files_of, make_document, make_identity, make_text
from tests.s3_server import BUCKET, S3Server

STEPS = ("shard", "shard written", "texts", "texts committed", "index", "index committed")
OUTAGE_BOUND_S = 60.0


def open_store(uri: str) -> KVStore:
    return KVStore.open(uri, identity=make_identity(), create=True, index_refresh_s=0.0)


def put(store: KVStore, seed: int, ids: tuple[str, ...] = ("a", "b")) -> None:
    documents = [make_document(doc_id, seed=seed) for doc_id in ids]
    store.put(documents, texts=[make_text(d, f"text {seed}") for d in documents])


def put_and_die(uri: str, step: str) -> None:
    """Replace documents, and be killed right before or right after a step."""
    store = open_store(uri)

    def deadly(call: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
        def run(*args: Any, **settings: Any) -> Any:
            if step == before:
                os.kill(os.getpid(), signal.SIGKILL)
            made = call(*args, **settings)
            if step == after:
                os.kill(os.getpid(), signal.SIGKILL)
            return made

        return run

    parts: Any = store
    parts._storage.put = deadly(parts._storage.put, STEPS[0], STEPS[1])
    parts._texts.table._merge_once = deadly(parts._texts.table._merge_once, STEPS[2], STEPS[3])
    parts._index.table._merge_once = deadly(parts._index.table._merge_once, STEPS[4], STEPS[5])
    put(store, seed=2)


@pytest.mark.faults
@pytest.mark.parametrize("step", STEPS)
def test_a_writer_that_dies_leaves_the_old_state_or_the_new(uri: str, step: str) -> None:
    store = open_store(uri)
    put(store, seed=1)
    process = get_context("spawn").Process(target=put_and_die, args=(uri, step))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL
    seen = 2 if step == STEPS[5] else 1
    for reader in (store, open_store(uri)):
        found = reader.get(["a", "b"], namespace="acme")
        for doc_id, document in found.items():
            assert_same(document, make_document(doc_id, seed=seen))
        text = reader.text(["a"], namespace="acme")["a"]
        assert text.text == ("text 2" if step in STEPS[3:] else "text 1")
        # Who reads slots and text together can tell.
        assert (text.content_hash == make_document("a", seed=seen).content_hash) == (
            text.text == f"text {seen}"
        )
    put(store, seed=2)
    store.gc(retention_s=0)
    assert store.verify().ok
    assert store.gc(retention_s=0).removed == ()
    for doc_id, document in store.get(["a", "b"], namespace="acme").items():
        assert_same(document, make_document(doc_id, seed=2))


def test_writers_at_once_leave_one_live_row_each(uri: str) -> None:
    open_store(uri)
    ids = ("a", "b", "c", "d")

    def write(seed: int) -> None:
        store = open_store(uri)
        for _ in range(3):
            put(store, seed, ids)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, (1, 2, 3)))
    store = open_store(uri)
    assert [row.doc_id for row in store.rows()] == list(ids)
    for doc_id, document in store.get(ids, namespace="acme").items():
        assert any(
            not isinstance(document, Miss)
            and document.content_hash == make_document(doc_id, seed=s).content_hash
            for s in (1, 2, 3)
        )
    assert store.verify().ok


# ---- a server of one's own


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    made = S3Server(tmp_path / "server")
    made.start()
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3_client, "READ_TIMEOUT_S", 1.0)
    yield made
    made.stop()


def bounded(action: Callable[[], object]) -> object:
    """What it gives or raises, within the bound."""
    started = time.monotonic()
    try:
        return action()
    except StoreError as error:
        return error
    finally:
        assert time.monotonic() - started < OUTAGE_BOUND_S


@pytest.mark.faults
def test_a_killed_server_costs_a_miss_and_loses_nothing(server: S3Server) -> None:
    store = KVStore.open(f"s3://{BUCKET}/x", identity=make_identity(), create=True, index_refresh_s=3600.0)
    put(store, seed=1)
    store.get(["a", "b"], namespace="acme")
    server.kill()
    read = bounded(lambda: store.get(["a", "b"], namespace="acme"))
    assert isinstance(read, dict)
    for miss in read.values():
        assert (
            isinstance(miss, Miss) and miss.reason == "unreadable_shard" and "nothing answers" in miss.detail
        )
    written = bounded(lambda: put(store, seed=2))
    assert isinstance(written, StoreError) and "\n" not in str(written)
    server.start()
    for reader in (store, open_store(f"s3://{BUCKET}/x")):
        for doc_id, document in reader.get(["a", "b"], namespace="acme").items():
            assert_same(document, make_document(doc_id, seed=1))
    put(store, seed=2)
    assert_same(store.get(["a"], namespace="acme")["a"], make_document("a", seed=2))
    assert store.verify().ok


@pytest.mark.faults
def test_a_server_killed_during_writes_loses_nothing_that_was_acknowledged(server: S3Server) -> None:
    uri = f"s3://{BUCKET}/x"
    store = open_store(uri)
    acknowledged = []
    stop = threading.Event()

    def write() -> None:
        for seed in range(1, 200):
            if stop.is_set():
                return
            try:
                put(store, seed, (f"d{seed}",))
            except StoreError:
                continue
            acknowledged.append(seed)

    thread = threading.Thread(target=write)
    thread.start()
    for _ in range(2):
        time.sleep(2.0)
        server.kill()
        time.sleep(0.5)
        server.start()
    time.sleep(2.0)
    stop.set()
    thread.join(timeout=OUTAGE_BOUND_S)
    assert not thread.is_alive()
    assert len(acknowledged) >= 2
    fresh = open_store(uri)
    for seed in acknowledged:
        assert_same(
            fresh.get([f"d{seed}"], namespace="acme")[f"d{seed}"], make_document(f"d{seed}", seed=seed)
        )
    assert fresh.verify().ok


@pytest.mark.faults
def test_a_frozen_server_is_given_up_on_and_used_again(server: S3Server) -> None:
    store = KVStore.open(f"s3://{BUCKET}/x", identity=make_identity(), create=True, index_refresh_s=3600.0)
    put(store, seed=1)
    store.get(["a"], namespace="acme")
    server.freeze()
    read = bounded(lambda: store.get(["a"], namespace="acme"))
    assert isinstance(read, dict) and isinstance(read["a"], Miss)
    assert read["a"].reason == "unreadable_shard"
    server.thaw()
    assert_same(store.get(["a"], namespace="acme")["a"], make_document("a", seed=1))


# ---- no space, and many reads


def put_without_space(folder: str, limit_bytes: int) -> None:
    """Files may not grow beyond the limit: what a full disk is to a writer."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = open_store(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    with pytest.raises(StoreError, match=r"^cannot write .*$"):
        store.put([make_document("big", part_tokens=(4000,)), make_document("a", seed=2)])
    os._exit(0)


def test_a_full_disk_is_one_line_and_leaves_the_old_state(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    put(store, seed=1)
    before = files_of(tmp_path / "store")
    process = get_context("spawn").Process(target=put_without_space, args=(store.uri, 20_000))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0
    assert files_of(tmp_path / "store") == before, "nothing half-written stays"
    assert_same(store.get(["a"], namespace="acme")["a"], make_document("a", seed=1))


@pytest.mark.faults
def test_many_reads_with_failures_keep_memory_and_files_flat(uri: str) -> None:
    store = open_store(uri)
    ids = tuple(f"d{n}" for n in range(40))
    put(store, 1, ids)
    lost = store.write_shard([make_document("lost")], run="night")
    store.commit(lost)
    open_storage(uri).delete(lost[0].shard)
    reader = KVStore.open(uri, identity=make_identity(), index_refresh_s=3600.0)
    random = Random(0)
    process = psutil.Process()

    def read(count: int) -> tuple[int, int]:
        for _ in range(count):
            found = reader.get([*random.sample(ids, 3), "lost", "never"], namespace="acme")
            assert sum(isinstance(f, Miss) for f in found.values()) == 2
        gc.collect()
        return process.memory_info().rss, process.num_fds()

    rounds = 2_500 if "://" not in uri else 150
    read(rounds // 5)
    first = read(rounds)
    last = read(3 * rounds)
    assert last[0] - first[0] < 16 * 2**20
    assert last[1] <= first[1] + 8


@pytest.mark.faults
def test_a_patient_reader_goes_on_with_what_it_knew(s3_server: S3Server, bucket: str) -> None:
    store = open_store(bucket)
    store.put([make_document("a")])
    reader = KVStore.open(bucket, identity=make_identity(), index_refresh_s=0.0, patience_s=0.3)
    known = reader.lookup(["a"], namespace="acme")["a"]
    assert isinstance(known, IndexRow)
    s3_server.freeze()
    try:
        for _ in range(3):
            started_s = time.monotonic()
            assert reader.lookup(["a"], namespace="acme")["a"] == known
            assert time.monotonic() - started_s < 5
    finally:
        s3_server.thaw()
    store.put([make_document("a", seed=7)])

    def sees_the_new() -> bool:
        return reader.lookup(["a"], namespace="acme")["a"] != known

    deadline_s = time.monotonic() + 120
    while not sees_the_new():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
