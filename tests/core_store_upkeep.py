"""Looking after a store beside others who do the same, and after files that were lost or damaged."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from c2kv_core.document import CompressedDocument, StoredDocument
from c2kv_core.errors import C2KVError, InputError, StoreFormatError
from c2kv_core.store import KVStore, Miss, open_storage
from c2kv_core.store import lease as lease_module
from c2kv_core.store import reader as reader_module
from c2kv_core.store import verify as verify_module
from c2kv_core.store.lease import lease
from c2kv_core.store.names import identity_path
from tests.core_store_kit import assert_same, get_one, make_document, make_identity, new_store


def open_store(uri: str, **changes: Any) -> KVStore:
    return KVStore.open(uri, identity=make_identity(), create=True, index_refresh_s=0.0, **changes)


def at_once(count: int, work: Any) -> None:
    gate = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        gate.wait()
        try:
            work(number)
        except C2KVError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("trial", range(3))
def test_several_gcs_at_once_double_no_row(uri: str, trial: int) -> None:
    store = open_store(uri, buckets=1)
    for name in "abcd":
        store.put([make_document(name)])
    others = [open_store(uri) for _ in range(3)]
    at_once(3, lambda n: others[n].gc())
    assert [row.doc_id for row in open_store(uri).rows()] == list("abcd")
    store.delete(["a"], namespace="acme")
    at_once(3, lambda n: others[n].gc(retention_s=0))
    assert [row.doc_id for row in open_store(uri).rows()] == list("bcd")
    for name in "bcd":
        assert_same(get_one(store, name), make_document(name))


def test_a_lease_is_held_by_one_and_ends_by_itself(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(uri)
    with lease(storage, "index") as mine:
        assert mine
        with lease(storage, "index") as theirs, lease(storage, "documents") as other:
            assert (theirs, other) == (False, True)
    with lease(storage, "index") as again:
        assert again
    # One that died while it held the lease.
    with monkeypatch.context() as clock:
        clock.setattr(lease_module, "LEASE_S", -1.0)
        dead = lease(storage, "index")
        assert dead.__enter__()
    with lease(storage, "index") as after:
        assert after
    assert len(list(storage.list_files("leases/index/"))) == 1
    won: list[bool] = []

    def race(number: int) -> None:
        with lease(open_storage(uri), "race") as held:
            won.append(held)
            gate.wait()

    gate = threading.Barrier(8)
    at_once(8, race)
    assert won.count(True) == 1


@pytest.mark.parametrize("damage", ["lost", "cut", "wrong"])
def test_a_lost_identity_file_costs_no_document(
    uri: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(uri)
    store.put([make_document("a")])
    path = identity_path(make_identity().fingerprint)
    storage = open_storage(uri)
    storage.delete(path)
    if damage != "lost":
        storage.put(path, b"" if damage == "cut" else b'{"ratio": 4}')
    assert_same(get_one(open_store(uri), "a"), make_document("a"))
    report = open_store(uri).verify(repair=True)
    assert (report.ok, report.dropped, report.problems[0].reason) == (False, 0, "missing_identity")
    open_store(uri).put([make_document("b")])
    assert open_store(uri).verify().ok
    # A writer that goes on for long notices too.
    storage.delete(path)
    monkeypatch.setattr("c2kv_core.store.identities._LOOK_AGAIN_S", 0.0)
    store.put([make_document("c")])
    assert open_store(uri).verify().ok


@pytest.mark.parametrize("where", [-1, -8])
def test_bytes_are_erased_from_a_shard_whose_end_is_damaged(uri: str, where: int) -> None:
    store = open_store(uri)
    (row, _) = store.put([make_document("a", seed=5), make_document("b")])
    storage = open_storage(uri)
    data = bytearray(storage.get(row.shard).to_pybytes())
    secret = bytes(data[row.offset + row.length - 200 : row.offset + row.length])
    data[where] ^= 0xFF
    storage.delete(row.shard)
    storage.put(row.shard, bytes(data))
    store.delete(["a"], namespace="acme")
    assert store.gc(retention_s=0).rewritten == (row.shard,)
    assert not any(secret in storage.get(f.path).to_pybytes() for f in storage.list_files("shards/"))
    assert_same(get_one(store, "b"), make_document("b"))


def test_verify_beside_gc_finds_no_damage(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = open_store(uri), open_store(uri)
    store.put([make_document("a"), make_document("b"), make_document("c")])
    store.delete(["a"], namespace="acme")
    real = verify_module._batches

    def after_gc(rows: Any) -> Any:
        monkeypatch.setattr(verify_module, "_batches", real)
        other.delete(["b"], namespace="acme")
        assert other.gc(retention_s=0).rewritten
        return real(rows)

    monkeypatch.setattr(verify_module, "_batches", after_gc)
    report = store.verify(repair=True)
    assert (report.ok, report.dropped) == (True, 0), report.problems
    assert [file.path for file in open_storage(uri).list_files("quarantine/")] == []


def test_a_reader_holds_a_bounded_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_HELD_BYTES", 10 * reader_module._OVERHEAD_BYTES)
    store = new_store(tmp_path, index_refresh_s=3600.0)
    store.put([make_document(name) for name in "abc"])
    for number in range(100):
        assert isinstance(store.lookup(["a"], namespace=f"tenant-{number}")["a"], Miss)
        assert not isinstance(store.lookup(["a"], namespace="acme")["a"], Miss)
    held = store._reader._buckets
    assert len(held) < 10 and sum(bucket.nbytes for bucket in held.values()) == store._reader._held_bytes


@pytest.mark.parametrize(
    "uri",
    [
        "~nosuchuser/x",
        "s3://[b/p",
        "file://[b/p",
        "file:///x/a#1",
        "file:///x/a?b=1",
        "a\\b",
        "a\nb",
        "s3://a b/c",
        "s3://b/c\\d",
        "s3://b:80/c",
    ],
)
def test_a_place_that_cannot_hold_a_store_is_refused(uri: str) -> None:
    with pytest.raises(InputError):
        open_storage(uri)


def test_a_path_over_links_is_one_place(tmp_path: Path) -> None:
    (tmp_path / "real/sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real/sub")
    store = KVStore.open(f"{tmp_path}/link/../st", identity=make_identity(), create=True)
    store.put([make_document("a")])
    assert KVStore.open(tmp_path / "real/st").verify().documents == 1
    assert not (tmp_path / "st").exists()


@pytest.mark.parametrize(
    "text",
    ['{"buckets": true, "format_version": 1}', '{"buckets": 16, "format_version": 1.0}', "[" * 100_000],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    store = new_store(tmp_path)
    Path(store.uri, "store.json").write_text(text)
    with pytest.raises(StoreFormatError):
        KVStore.open(store.uri)


def _changed(**changes: Any) -> StoredDocument:
    document = make_document("a")
    (part,) = document.parts
    values = {
        name: getattr(part, name) for name in ("keys", "values", "slot_positions", "num_tokens", "ratio")
    }
    return StoredDocument(
        namespace="acme",
        doc_id="a",
        content_hash=changes.pop("content_hash", document.content_hash),
        title=changes.pop("title", document.title),
        parts=(CompressedDocument(**{**values, **changes}),),
    )


def test_what_would_not_read_back_as_it_was_is_refused(tmp_path: Path) -> None:
    positions = make_document("a").parts[0].slot_positions
    for document in (
        _changed(title="\ud800"),
        _changed(content_hash="\udfff"),
        _changed(slot_positions=positions + 2**32),
        _changed(slot_positions=positions - 100),
    ):
        with pytest.raises(InputError):
            new_store(tmp_path).put([document])
    poisoned = _changed().parts[0].keys.clone()
    poisoned[0, 0, 0, 0] = torch.inf
    store = new_store(tmp_path / "int8", identity=make_identity(quantisation="int8"))
    with pytest.raises(InputError, match="finite"):
        store.put([_changed(keys=poisoned)])
    for ids in ([None], [1], b"abc", "abc"):
        with pytest.raises(InputError):
            store.get(ids, namespace="acme")  # type: ignore[arg-type]
    for retention_s in (float("inf"), 1e300, -1.0, float("nan")):
        with pytest.raises(InputError, match="retention"):
            store.gc(retention_s=retention_s)
    with pytest.raises(InputError):
        KVStore.open(tmp_path / "other", create=True, buckets=2.5)  # type: ignore[arg-type]


def test_uploads_of_other_programs_in_the_bucket_are_left_alone(bucket: str) -> None:
    store = open_store(bucket)
    storage: Any = open_storage(bucket)
    for key in ("another-app/big.bin", "inner/shards/x", "shards/acme/x"):
        storage._client.create_multipart_upload(**storage._place(key))
    removed = store.gc(retention_s=0).removed
    assert [path.partition("/")[2].partition("/")[2] for path in removed] == ["shards/acme/x"]


def test_serving_needs_no_permission_to_list_uploads(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(bucket).put([make_document("a")])
    monkeypatch.setattr(
        "c2kv_core.store.s3_storage.S3Storage._unfinished", lambda self: pytest.fail("listed uploads")
    )
    assert_same(get_one(open_store(bucket), "a"), make_document("a"))
    assert json.loads(open_storage(bucket).get("store.json").to_pybytes())["buckets"] == 16


def test_folders_go_with_their_last_file_and_writers_do_not_mind(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "root"))

    def write_and_delete(writer: int) -> None:
        for n in range(150):
            path = f"a/b/c/{writer}-{n}"
            storage.put(path, b"x") if n % 2 else storage.create(path, b"x")
            assert storage.delete(path)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write_and_delete, range(6)))
    assert not (tmp_path / "root" / "a").exists()
    assert (tmp_path / "root").exists()
