"""Erasure, garbage and repair, on a local directory and on S3."""

import json
import threading

import pytest

from c2kv_core.store import KVStore, Miss, StoredFile, open_storage
from c2kv_core.store import rewrite as rewrite_module
from c2kv_core.store.names import QUARANTINE, SHARDS
from tests.core_store_kit import assert_same, make_document, make_identity, make_text


def open_store(uri: str, **changes: str) -> KVStore:
    return KVStore.open(uri, identity=make_identity(**changes), create=True, buckets=2, index_refresh_s=0.0)


def files(store: KVStore, prefix: str = "") -> list[StoredFile]:
    return list(open_storage(store.uri).list_files(prefix))


def everything(store: KVStore) -> bytes:
    """Every byte that the store holds, the tables' compressed pages aside."""
    storage = open_storage(store.uri)
    return b"".join(storage.get(file.path).to_pybytes() for file in files(store))


@pytest.mark.parametrize(("codec", "selection"), [("none", "none"), ("int8", "none"), ("int8", "heads")])
def test_after_gc_the_bytes_of_a_deleted_document_are_gone(uri: str, codec: str, selection: str) -> None:
    store = open_store(uri, quantisation=codec, selection=selection)
    identity = make_identity(quantisation=codec, selection=selection)
    documents = [make_document(f"d{n}", seed=n, part_tokens=(40, 9), identity=identity) for n in range(5)]
    store.put(documents, texts=[make_text(d, f"SECRET {d.doc_id} " * 20) for d in documents])
    before = store.get(["d0", "d1", "d3", "d4"], namespace="acme")
    store.delete(["d2"], namespace="acme")
    assert b"Title of d2" in everything(store)
    dry = store.gc(dry_run=True, retention_s=0)
    assert b"Title of d2" in everything(store) and len(dry.rewritten) == 1 and dry.erased_bytes > 0
    done = store.gc(retention_s=0)
    assert (done.rewritten, done.erased_bytes) == (dry.rewritten, dry.erased_bytes)
    assert done.table_files, "old files of the tables hold its id and its text"
    left = everything(store)
    assert b"Title of d2" not in left
    after = store.get(["d0", "d1", "d3", "d4"], namespace="acme")
    for doc_id, document in after.items():
        assert_same(document, before[doc_id])  # bit for bit, whatever the codec
    assert set(store.text(["d0", "d2"], namespace="acme")) == {"d0"}
    again = store.gc(retention_s=0)
    assert (again.rewritten, again.removed) == ((), ())
    assert store.verify().ok


def test_superseded_records_go_too_and_the_young_stay(uri: str) -> None:
    store = open_store(uri)
    store.put([make_document("a", seed=1), make_document("b")])
    store.put([make_document("a", seed=2)])
    young = store.gc()
    assert (young.rewritten, young.removed, young.kept_young) == ((), (), 1)
    assert len(files(store, SHARDS)) == 2
    done = store.gc(retention_s=0)
    assert len(done.rewritten) == len(done.removed) == 1
    found = store.get(["a", "b"], namespace="acme")
    assert_same(found["a"], make_document("a", seed=2))
    assert_same(found["b"], make_document("b"))


def test_a_document_replaced_while_its_shard_is_rewritten_stays_replaced(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(uri), open_store(uri)
    store.put([make_document("a", seed=1), make_document("b", seed=1), make_document("gone")])
    store.delete(["gone"], namespace="acme")
    rewrite = rewrite_module.rewrite

    def with_a_writer(storage, index, identities, found):  # type: ignore[no-untyped-def]
        move = index.move

        def late(places):  # type: ignore[no-untyped-def]
            other.put([make_document("a", seed=2)])
            return move(places)

        monkeypatch.setattr(index, "move", late)
        return rewrite(storage, index, identities, found)

    monkeypatch.setattr(rewrite_module, "rewrite", with_a_writer)
    store.gc(retention_s=0)
    found = store.get(["a", "b"], namespace="acme")
    assert_same(found["a"], make_document("a", seed=2))
    assert_same(found["b"], make_document("b", seed=1))
    assert len(store.rows()) == 2


def test_readers_with_an_old_view_are_not_disturbed_by_gc(uri: str) -> None:
    store = open_store(uri)
    reader = KVStore.open(uri, identity=make_identity(), index_refresh_s=3600.0)
    wrong: list[object] = []
    stop = threading.Event()
    store.put([make_document(f"d{n}", seed=n) for n in range(8)])
    reader.get(["d0"], namespace="acme")

    def read() -> None:
        while not stop.is_set():
            for doc_id, found in reader.get([f"d{n}" for n in range(4)], namespace="acme").items():
                if isinstance(found, Miss):
                    wrong.append((doc_id, found))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for n in range(4, 8):
            store.delete([f"d{n}"], namespace="acme")
            assert len(store.gc(retention_s=0).rewritten) == 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_repair_drops_what_is_damaged_and_notes_it(uri: str) -> None:
    store = open_store(uri)
    store.put([make_document(f"d{n}", seed=n) for n in range(4)])
    store.put([make_document("lost")])
    rows = {row.doc_id: row for row in store.rows()}
    storage = open_storage(uri)
    data = bytearray(storage.get(rows["d1"].shard).to_pybytes())
    data[rows["d1"].offset + rows["d1"].length - 5] ^= 1
    storage.put(rows["d1"].shard, bytes(data))
    storage.delete(rows["lost"].shard)
    found = store.verify()
    assert [(p.row.doc_id, p.reason) for p in found.problems] == [
        ("d1", "damaged_layer"),
        ("lost", "missing_shard"),
    ]
    assert found.dropped is None and len(store.rows()) == 5
    # a shard with a damaged live record is not rewritten: the record would be lost
    store.delete(["d3"], namespace="acme")
    assert store.gc(retention_s=0).unreadable == (rows["d1"].shard,)
    assert store.verify(repair=True).dropped == 2
    assert [row.doc_id for row in store.rows()] == ["d0", "d2"]
    notes = [json.loads(storage.get(f.path).to_pybytes()) for f in files(store, QUARANTINE)]
    assert {(n["row"]["doc_id"], n["reason"]) for n in notes} == {
        ("d1", "damaged_layer"),
        ("lost", "missing_shard"),
    }
    assert store.verify().ok
    store.put([make_document("d1", seed=1)])
    assert store.gc(retention_s=0).rewritten == (rows["d1"].shard,)
    assert_same(store.get(["d1"], namespace="acme")["d1"], make_document("d1", seed=1))


def test_repair_keeps_a_record_that_was_made_again_meanwhile(uri: str) -> None:
    store = open_store(uri)
    store.put([make_document("a")])
    (row,) = store.rows()
    open_storage(uri).delete(row.shard)
    problems = store.verify().problems
    store.put([make_document("a", seed=1)])
    from c2kv_core.store.quarantine import quarantine

    assert quarantine(open_storage(uri), store._index, problems) == 0
    assert_same(store.get(["a"], namespace="acme")["a"], make_document("a", seed=1))


def test_many_small_commits_become_few_files(uri: str) -> None:
    store = open_store(uri)
    for n in range(12):
        store.put([make_document(f"d{n}")])
    count = len(files(store, "index/bucket=0/")) + len(files(store, "index/bucket=1/"))
    store.gc(retention_s=0)
    left = [len(files(store, f"index/bucket={bucket}/")) for bucket in (0, 1)]
    assert left == [1, 1] and count > 2
    assert len(store.rows()) == 12 and store.verify().ok
    store.put([make_document("late")])
    assert len(open_store(uri).rows()) == 13


def test_a_dry_run_says_what_the_run_does_and_an_idle_gc_changes_nothing(uri: str) -> None:
    store = open_store(uri)
    store.put([make_document(name) for name in "abc"])
    store.put([make_document("d")])
    store.delete(["a", "d"], namespace="acme")
    said = store.gc(dry_run=True, retention_s=0)
    before = sum(file.size_bytes for file in files(store, "shards/"))
    done = store.gc(retention_s=0)
    freed = before - sum(file.size_bytes for file in files(store, "shards/"))
    for name in ("removed_bytes", "written_bytes", "rewritten", "erased_bytes", "live_shards"):
        assert getattr(said, name) == getattr(done, name), name
    assert set(said.removed) == set(done.removed)
    # The tail of an Arrow file has an entry a record.
    assert abs(done.removed_bytes - done.written_bytes - freed) < 4096
    store.gc(retention_s=0)
    settled = {(file.path, file.size_bytes) for file in files(store)}
    for _ in range(2):
        idle = store.gc(retention_s=0)
        assert (idle.removed, idle.table_files, idle.rewritten) == ((), (), ())
    assert {(file.path, file.size_bytes) for file in files(store)} == settled


def test_dead_records_in_young_shards_are_told_of(uri: str) -> None:
    store = open_store(uri)
    rows = store.put([make_document(name) for name in "ab"])
    store.delete(["a"], namespace="acme")
    report = store.gc()
    assert (report.removed, report.rewritten, report.kept_young) == ((), (), 1)
    assert report.kept_young_bytes == next(row.length for row in rows if row.doc_id == "a")


def test_notes_about_a_deleted_document_go_with_it(uri: str) -> None:
    store = open_store(uri)
    for name in ("a", "b"):
        row = store.put([make_document(name)])[0]
        storage = open_storage(uri)
        data = bytearray(storage.get(row.shard).to_pybytes())
        data[row.offset + row.length - 1] ^= 1
        storage.delete(row.shard)
        storage.put(row.shard, bytes(data))
    assert store.verify(repair=True).dropped == 2
    assert len(files(store, "quarantine/")) == 2
    store.put([make_document("a")])
    store.delete(["a"], namespace="acme")
    (left,) = files(store, "quarantine/")
    assert b'"doc_id": "b"' in open_storage(uri).get(left.path).to_pybytes()
