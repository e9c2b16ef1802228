"""One live row a key, whoever writes, and the old state or the new for whoever reads."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from c2kv_core.errors import InputError, StoreError
from c2kv_core.store import KVStore
from c2kv_core.store.index import Index
from c2kv_core.store.local_storage import LocalStorage
from c2kv_core.store.names import bucket_of
from c2kv_core.store.reader import IndexReader
from tests.core_store_kit import (
    assert_same,
    files_of,
    get_one,
    make_document,
    make_identity,
    make_text,
    miss_reason,
    new_store,
    put_documents,
    put_many,
    run_processes,
    shard_of,
    write_then_die,
)


def test_a_document_is_replaced_and_keeps_one_row(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    for seed in range(3):
        store.put([make_document("a", seed=seed), make_document("b")])
    assert [row.doc_id for row in store.rows()] == ["a", "b"]
    assert_same(get_one(store, "a"), make_document("a", seed=2))
    assert store.content_hashes(namespace="acme") == {"a": f"{2:064x}", "b": f"{0:064x}"}
    assert store.content_hashes(namespace="other") == {}


def test_the_last_of_equal_documents_in_one_put_counts(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    twins = [make_document("a", seed=seed) for seed in (1, 2)]
    store.put(twins, texts=[make_text(twin, f"text {n}") for n, twin in enumerate(twins)])
    assert len(store.rows()) == 1
    assert_same(get_one(store, "a"), twins[1])
    assert store.text(["a"], namespace="acme")["a"].text == "text 1"


def test_committing_rows_again_changes_nothing(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    rows = store.put([make_document("a")])
    store.commit(rows)
    store.commit([])
    assert store.rows() == rows
    assert store.put([]) == []


def test_rows_of_many_shards_become_visible_at_once(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    rows = [row for n in range(3) for row in store.write_shard([make_document(f"d{n}", seed=n)], run="night")]
    assert miss_reason(store, "d0") == "not_found"
    version = _versions(store)
    store.commit(rows)
    assert _versions(store) == version + 1
    assert len({row.shard for row in rows}) == 3
    for n in range(3):
        assert_same(get_one(store, f"d{n}"), make_document(f"d{n}", seed=n))


def _versions(store: KVStore) -> int:
    return len(list(Path(store.uri, "index/_delta_log").glob("*.json")))


def test_processes_that_write_the_same_and_different_documents(tmp_path: Path) -> None:
    """Also the creation of the store is raced for."""
    shared, rounds = ["s1", "s2", "s3"], 5
    codes = run_processes(
        put_many, [(tmp_path, "left", shared, rounds, 1), (tmp_path, "right", shared, rounds, 2)]
    )
    assert codes == [0, 0]
    store = new_store(tmp_path)
    counts = Counter(row.doc_id for row in store.rows())
    own = [f"{side}-{n}" for side in ("left", "right") for n in range(rounds)]
    assert counts == Counter([*shared, *own])
    for doc_id in shared:
        row = next(row for row in store.rows() if row.doc_id == doc_id)
        assert_same(get_one(store, doc_id), make_document(doc_id, seed=int(row.content_hash, 16)))
    for doc_id in own:
        assert_same(get_one(store, doc_id), make_document(doc_id, seed=1 if "left" in doc_id else 2))


def test_writers_of_different_buckets_do_not_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("c2kv_core.store.table.COMMIT_TIMEOUT_S", 0.0)  # the first conflict is an error
    ids = {bucket_of("acme", f"d{n}", buckets=16): f"d{n}" for n in range(100)}
    stores = [new_store(tmp_path) for _ in range(2)]
    failures = _at_once([partial(_put_turns, s, ids[i]) for i, s in enumerate(stores)])
    assert failures == []
    assert {row.doc_id for row in stores[0].rows()} == {ids[0], ids[1]}


def _put_turns(store: KVStore, doc_id: str) -> None:
    for seed in range(5):
        store.put([make_document(doc_id, seed=seed)])


def _at_once(actions: Sequence[Callable[[], None]]) -> list[BaseException]:
    """Run each in a thread of its own, all started together; what they raised."""
    barrier = threading.Barrier(len(actions))
    failures: list[BaseException] = []

    def run(action: Callable[[], None]) -> None:
        barrier.wait()
        try:
            action()
        except (StoreError, InputError, AssertionError) as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def test_threads_that_write_through_one_store_and_two_others(tmp_path: Path) -> None:
    stores = [new_store(tmp_path)] * 2
    stores += [new_store(tmp_path), new_store(tmp_path)]

    def work(store: KVStore, number: int) -> None:
        for turn in range(3):
            store.put([make_document("shared", seed=number), make_document(f"{number}-{turn}")])

    failures = _at_once([partial(work, s, n) for n, s in enumerate(stores)])
    assert failures == []
    expected = ["shared", *(f"{n}-{turn}" for n in range(4) for turn in range(3))]
    assert Counter(row.doc_id for row in stores[0].rows()) == Counter(expected)


def test_keys_are_the_same_in_a_process_with_another_hash_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doc_ids = [f"doc {n} é" for n in range(20)]
    monkeypatch.setenv("PYTHONHASHSEED", "271828")
    assert run_processes(put_documents, [(tmp_path, doc_ids)]) == [0]
    put_documents(tmp_path, doc_ids[:5])  # replaces, does not double
    store = new_store(tmp_path)
    assert sorted(row.doc_id for row in store.rows()) == sorted(doc_ids)
    for doc_id in doc_ids:
        assert_same(get_one(store, doc_id), make_document(doc_id))
    # Frozen: a release that moves documents to other buckets loses them.
    assert [bucket_of("acme", doc_id, buckets=16) for doc_id in ("a", "é", "x/y")] == [14, 7, 5]


def test_death_between_shard_and_commit_leaves_the_old_state(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    old = make_document("a", seed=1)
    store.put([old])
    before = files_of(Path(store.uri))
    assert run_processes(write_then_die, [(tmp_path, "a", 2)]) == [-signal.SIGKILL]
    (orphan,) = files_of(Path(store.uri)) - before
    assert orphan.startswith("shards/acme/")
    assert_same(get_one(store, "a"), old)
    assert_same(get_one(new_store(tmp_path), "a"), old)
    assert store.gc().removed == ()  # might still be committed
    assert store.gc(retention_s=0).removed == (orphan,)
    assert files_of(Path(store.uri)) == before
    assert_same(get_one(store, "a"), old)


def test_a_half_written_file_is_seen_by_nobody(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.put([make_document("a")])
    half = Path(store.uri, ".tmp", "0123")
    half.write_bytes(shard_of(store, "a").read_bytes()[:100])
    assert_same(get_one(store, "a"), make_document("a"))
    assert store.verify().documents == 1
    assert store.gc(retention_s=0).removed == (".tmp/0123",)


def test_gc_removes_only_what_no_row_needs(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.put([make_document("a", seed=1), make_document("gone")])
    store.put([make_document("b")])
    shared = shard_of(store, "gone")
    store.put([make_document("a", seed=2)])
    store.delete(["gone"], namespace="acme")
    bytes_ = shared.stat().st_size
    young = store.gc()
    assert (young.removed, young.kept_young, young.live_shards) == ((), 1, 2)
    dry = store.gc(dry_run=True, retention_s=0)
    assert shared.exists()
    real = store.gc(retention_s=0)
    assert not shared.exists()
    assert dry.removed == real.removed == (shared.relative_to(store.uri).as_posix(),)
    assert dry.removed_bytes == real.removed_bytes == bytes_
    assert (dry.dry_run, real.dry_run) == (True, False)
    assert store.verify().ok
    os.utime(shard_of(store, "a"), (0, 0))  # age alone is no reason
    assert store.gc().removed == ()
    with pytest.raises(InputError, match="retention"):
        store.gc(retention_s=-1)


def test_rows_whose_shard_is_gone_are_not_committed(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    rows = store.write_shard([make_document("a")], run="night")
    assert len(store.gc(retention_s=0).removed) == 1
    with pytest.raises(StoreError, match="is gone"):
        store.commit(rows)
    assert store.rows() == []


def test_rows_of_a_store_with_other_buckets_are_not_committed(tmp_path: Path) -> None:
    rows = new_store(tmp_path / "a", buckets=64).put([make_document(f"d{n}") for n in range(8)])
    with pytest.raises(InputError, match="buckets"):
        new_store(tmp_path / "b", buckets=4).commit(rows)


def test_delete_erases_all_identities_and_the_text(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    other = new_store(tmp_path, identity=make_identity(ratio=8))
    document = make_document("a")
    store.put([document, make_document("b")], texts=[make_text(document, "SECRET-WORDS")])
    other.put([make_document("a", identity=make_identity(ratio=8))])
    assert len(store.rows()) == 3
    # Not even as a statistic: the log outlives the rows.
    for table in ("documents", "index"):
        log = b"".join(path.read_bytes() for path in Path(store.uri, table, "_delta_log").iterdir())
        assert b"SECRET-WORDS" not in log
    assert KVStore.open(store.uri).delete(["a", "a", "never"], namespace="acme") == 2
    assert miss_reason(store, "a") == miss_reason(other, "a") == "not_found"
    assert store.text(["a"], namespace="acme") == {}
    assert store.delete(["a"], namespace="acme") == 0
    assert [row.doc_id for row in store.rows()] == ["b"]


def test_a_live_row_always_finds_its_text(tmp_path: Path) -> None:
    """A reader beside a writer: no moment with a row and without a text."""
    writer, reader = new_store(tmp_path), new_store(tmp_path)
    done = threading.Event()
    failures: list[str] = []

    def read() -> None:
        while not done.is_set():
            for row in reader.rows():
                if row.doc_id not in reader.text([row.doc_id], namespace="acme") and row in reader.rows():
                    failures.append(row.doc_id)

    thread = threading.Thread(target=read)
    thread.start()
    for n in range(6):
        document = make_document(f"d{n}")
        writer.put([document], texts=[make_text(document)])
        if n % 2:
            writer.delete([f"d{n}"], namespace="acme")
    done.set()
    thread.join()
    assert failures == []


def test_a_reader_sees_its_own_commits_at_once_and_others_later(tmp_path: Path) -> None:
    reader = new_store(tmp_path, index_refresh_s=3600.0)
    writer = new_store(tmp_path)
    assert miss_reason(reader, "a") == "not_found"
    writer.put([make_document("a")])
    assert miss_reason(reader, "a") == "not_found"  # its view is fresh enough
    reader.put([make_document("b")])
    assert_same(get_one(reader, "a"), make_document("a"))
    assert_same(get_one(reader, "b"), make_document("b"))
    reader.delete(["b"], namespace="acme")
    assert miss_reason(reader, "b") == "not_found"
    fresh = new_store(tmp_path, index_refresh_s=0.0)
    writer.put([make_document("c")])
    assert_same(get_one(fresh, "c"), make_document("c"))


class _ReadsListed(LocalStorage):
    """Local storage that remembers which files were read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[str] = []

    def get(self, path: str) -> pa.Buffer:
        self.read.append(path)
        return super().get(path)

    def taken(self) -> Sequence[str]:
        read, self.read = self.read, []
        return [path.split("/")[1] for path in read]


def test_a_reader_loads_a_bucket_only_when_asked_and_when_it_changed(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    doc_ids = [f"d{n}" for n in range(30)]
    store.put([make_document(doc_id) for doc_id in doc_ids])
    bucket = {doc_id: bucket_of("acme", doc_id, buckets=16) for doc_id in doc_ids}
    mine = "d0"
    elsewhere = next(doc_id for doc_id in doc_ids if bucket[doc_id] != bucket[mine])

    storage = _ReadsListed(Path(store.uri))
    reader = IndexReader(Index(storage, buckets=16), refresh_s=0.0)
    assert len(reader.lookup("acme", [mine])[mine]) == 1
    assert storage.taken() == [f"bucket={bucket[mine]}"]
    reader.lookup("acme", [mine])
    store.put([make_document(elsewhere, seed=1)])
    reader.lookup("acme", [mine])
    assert storage.taken() == []  # a new version, but not of this bucket
    store.put([make_document(mine, seed=1)])
    assert reader.lookup("acme", [mine])[mine][0].content_hash == f"{1:064x}"
    assert set(storage.taken()) == {f"bucket={bucket[mine]}"}
