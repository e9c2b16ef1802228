"""Damaged, cut, exchanged and missing bytes are misses with a reason, and never slots."""

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from c2kv_core.document import Geometry
from c2kv_core.errors import StoreError
from c2kv_core.identity import Identity
from c2kv_core.store import KVStore, Miss
from c2kv_core.store.fetch import fetch_document
from c2kv_core.store.local_storage import LocalStorage
from tests.core_store_kit import (
    assert_same,
    files_of,
    get_one,
    make_document,
    make_identity,
    miss_reason,
    new_store,
    shard_of,
)


def write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("selection", ["none", "heads"])
def test_any_flipped_bit_of_a_record_is_a_miss(tmp_path: Path, selection: str) -> None:
    identity = make_identity(selection=selection)
    store = new_store(tmp_path, identity=identity)
    document = make_document("a", part_tokens=(18, 3), identity=identity)
    store.put([document, make_document("neighbour", identity=identity)])
    shard = shard_of(store, "a")
    row = next(row for row in store.rows() if row.doc_id == "a")
    sound = shard.read_bytes()
    bits = random.Random(0)
    reasons = set()
    # Every byte of the record: head, padding, every layer, and what Arrow puts behind.
    for offset in range(row.offset, row.offset + row.length):
        write_at(shard, offset, bytes([sound[offset] ^ 1 << bits.randrange(8)]))
        reasons.add(miss_reason(store, "a"))
        write_at(shard, offset, sound[offset : offset + 1])
    assert reasons == {"damaged_record", "damaged_layer"}
    assert store.counters["miss"] == row.length
    assert "hit" not in store.counters
    assert_same(get_one(store, "a"), document)
    assert_same(get_one(store, "neighbour"), make_document("neighbour", identity=identity))


def test_a_cut_shard_is_a_miss_wherever_it_is_cut(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.put([make_document("first"), make_document("last")])
    row = next(row for row in store.rows() if row.doc_id == "last")
    shard = shard_of(store, "last")
    for size in [row.offset + row.length - 1, row.offset + 100, row.offset, row.offset - 1, 8, 1, 0]:
        os.truncate(shard, size)
        assert miss_reason(store, "last") == "truncated"
    assert miss_reason(store, "first") == "truncated"


def test_the_payload_of_an_equally_large_record_is_a_miss(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    # From the second record on padding is equal, and so is the size.
    store.put([make_document("0"), make_document("a", seed=1), make_document("b", seed=2)])
    rows = {row.doc_id: row for row in store.rows()}
    shard = shard_of(store, "a")
    data = shard.read_bytes()
    records = {i: data[row.offset : row.offset + row.length] for i, row in rows.items()}
    assert len(records["a"]) == len(records["b"])

    head = rows["a"].head_length  # KV of the other behind our own head
    write_at(shard, rows["a"].offset, records["a"][:head] + records["b"][head:])
    assert miss_reason(store, "a") == "damaged_layer"
    write_at(shard, rows["a"].offset, records["b"])  # the other record whole
    assert miss_reason(store, "a") == "damaged_record"
    assert_same(get_one(store, "b"), make_document("b", seed=2))


def test_a_sound_record_that_the_row_does_not_promise_is_a_miss(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    documents = [make_document("a", part_tokens=(5, 5)), make_document("b", part_tokens=(5, 5))]
    a, b = store.write_shard(documents, run="night")
    storage, identity = LocalStorage(Path(store.uri)), make_identity()
    place: dict[str, Any] = {
        "offset": b.offset,
        "length": b.length,
        "head_length": b.head_length,
        "head_checksum": b.head_checksum,
    }
    wrong = [
        replace(a, **place),
        replace(a, content_hash="f" * 64),
        replace(a, fingerprint="f" * 64),
        replace(a, namespace="other"),
        replace(a, parts=3),
        replace(a, parts=1),
        replace(a, slots=a.slots + 1),
        replace(a, source_tokens=a.source_tokens + 1),
    ]
    for row in wrong:
        outcome = fetch_document(storage, row, identity=identity)
        assert isinstance(outcome, Miss)
        assert outcome.reason == "wrong_record", outcome
        assert outcome.is_damage


@pytest.mark.parametrize(
    "identity",
    [
        make_identity(slot_dtype="float16"),
        make_identity(ratio=8),
        make_identity(geometry=Geometry(layers=2, kv_heads=3, head_dim=4)),
    ],
    ids=["dtype", "ratio", "geometry"],
)
def test_bytes_are_not_read_as_another_shape(tmp_path: Path, identity: Identity) -> None:
    store = new_store(tmp_path)
    (row,) = store.write_shard([make_document("a")], run="night")
    outcome = fetch_document(LocalStorage(Path(store.uri)), row, identity=identity)
    assert isinstance(outcome, Miss)
    assert outcome.reason == "wrong_geometry"


def test_a_lost_shard_is_a_miss_and_others_go_on(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.put([make_document("lost")])
    store.put([make_document("kept")])
    shard_of(store, "lost").unlink()
    found = store.get(["lost", "kept", "never"], namespace="acme")
    assert_same(found["kept"], make_document("kept"))
    assert miss_reason(store, "lost") == "missing_shard"
    assert isinstance(found["never"], Miss)
    assert found["never"].reason == "not_found"
    assert not found["never"].is_damage
    assert store.counters["miss_missing_shard"] == 2


@pytest.mark.parametrize("shard", ["../outside.arrow", "/etc/hostname", "shards", "shards/a\0b"])
def test_a_row_that_points_elsewhere_reads_nothing(tmp_path: Path, shard: str) -> None:
    store = new_store(tmp_path)
    (row,) = store.write_shard([make_document("a")], run="night")
    shutil.copy(Path(store.uri) / row.shard, tmp_path / "outside.arrow")
    outcome = fetch_document(
        LocalStorage(Path(store.uri)), replace(row, shard=shard), identity=make_identity()
    )
    assert isinstance(outcome, Miss)
    assert outcome.reason == "unreadable_shard"


@pytest.mark.parametrize(
    "place", [{"offset": -1}, {"length": -5}, {"head_length": -1}, {"head_length": 10**9}]
)
def test_a_damaged_place_reads_nothing(tmp_path: Path, place: dict[str, int]) -> None:
    store = new_store(tmp_path)
    (row,) = store.write_shard([make_document("a")], run="night")
    damaged = replace(row, **place)  # type: ignore[arg-type]
    outcome = fetch_document(LocalStorage(Path(store.uri)), damaged, identity=make_identity())
    assert isinstance(outcome, Miss)


def test_verify_names_what_is_damaged(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.put([make_document(f"d{n}", seed=n) for n in range(10)])
    other = make_identity(sidecar_digest="x")
    KVStore.open(store.uri, identity=other).put([make_document("d0", identity=other)])
    report = KVStore.open(store.uri).verify()
    assert (report.ok, report.documents, report.problems) == (True, 11, ())
    assert report.bytes == sum(row.length for row in store.rows())

    row = next(row for row in store.rows() if row.doc_id == "d3")
    write_at(Path(store.uri) / row.shard, row.offset + row.length - 20, b"\xff")
    (Path(store.uri) / "fingerprints" / f"{other.fingerprint}.json").write_text("{}")
    report = KVStore.open(store.uri).verify()
    assert not report.ok
    found = sorted((p.row.namespace, p.row.doc_id, p.reason) for p in report.problems)
    assert found == [("acme", "d0", "missing_identity"), ("acme", "d3", "damaged_layer")]
    assert store.verify(fraction=0.3).documents == 3
    assert store.verify(namespace="other").documents == 0


def test_a_write_that_fails_leaves_the_old_state(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    old = make_document("a", seed=1)
    store.put([old])
    folder = Path(store.uri)
    shutil.move(folder / "shards", folder / "aside")
    (folder / "shards").write_text("in the way")
    with pytest.raises(StoreError, match="cannot write the shard") as failure:
        store.put([make_document("a", seed=2)])
    assert "\n" not in str(failure.value)
    (folder / "shards").unlink()
    shutil.move(folder / "aside", folder / "shards")
    assert_same(get_one(store, "a"), old)
    assert not [path for path in files_of(folder) if path.startswith(".tmp/")]


@pytest.mark.parametrize(
    ("pattern", "scribble"),
    [
        ("index/bucket=*/*.parquet", b""),
        ("index/bucket=*/*.parquet", b"scribble" * 20),
        ("index/_delta_log/*1.json", b"scribble" * 20),
    ],
    ids=["empty-rows", "scribbled-rows", "scribbled-log"],
)
def test_a_damaged_index_is_one_plain_error(tmp_path: Path, pattern: str, scribble: bytes) -> None:
    new_store(tmp_path).put([make_document("a")])
    for path in (tmp_path / "store").glob(pattern):
        path.write_bytes(scribble)
    store = new_store(tmp_path)
    for action in (lambda: get_one(store, "a"), store.rows, store.gc):
        with pytest.raises(StoreError) as failure:
            action()
        assert "index/" in str(failure.value)
        assert "\n" not in str(failure.value)
    assert len(list((tmp_path / "store/shards").rglob("*.arrow"))) == 1
