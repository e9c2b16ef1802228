"""What a store promises, on a local directory and on S3 alike: ids, tenants, identities, every fault found.

The finer tests of each promise run on local directories (``core_store_*``); these show that the place changes nothing.
"""

import random
from multiprocessing import get_context

import pytest

from c2kv_core.errors import StoreError
from c2kv_core.store import IndexRow, KVStore, Miss, open_storage
from tests.core_store_kit import assert_same, make_document, make_identity, make_text
from tests.core_store_round_trip import WEIRD_IDS

FLIPS, CUTS = 200, 50


def open_store(uri: str, **changes: object) -> KVStore:
    return KVStore.open(uri, identity=make_identity(**changes), create=True, index_refresh_s=0.0)


def test_ids_of_any_unicode_are_kept_apart(uri: str) -> None:
    store = open_store(uri)
    documents = [make_document(doc_id, seed=n) for n, doc_id in enumerate(WEIRD_IDS)]
    store.put(documents, texts=[make_text(d, d.doc_id) for d in documents])
    found = open_store(uri).get(WEIRD_IDS, namespace="acme")
    for document in documents:
        assert_same(found[document.doc_id], document)
    assert {t.text for t in store.text(WEIRD_IDS, namespace="acme").values()} == set(WEIRD_IDS)
    paths = [file.path for file in open_storage(uri).list_files("")]
    assert all(
        path.split("/")[0] in {"store.json", "index", "documents", "fingerprints", "shards"} for path in paths
    )
    assert store.delete([WEIRD_IDS[0]], namespace="acme") == 1
    assert len(store.rows()) == len(WEIRD_IDS) - 1


def test_tenants_are_apart_even_with_the_same_document(uri: str) -> None:
    store = open_store(uri)
    store.put([make_document("a", namespace="acme", seed=1)])
    assert isinstance(store.get(["a"], namespace="other")["a"], Miss)
    store.put([make_document("a", namespace="other", seed=2)])
    assert_same(store.get(["a"], namespace="acme")["a"], make_document("a", namespace="acme", seed=1))
    assert store.delete(["a"], namespace="other") == 1
    assert_same(store.get(["a"], namespace="acme")["a"], make_document("a", namespace="acme", seed=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"base_digest": "x" * 64},
        {"sidecar_digest": "x" * 64},
        {"tokenizer_digest": "x" * 64},
        {"slot_dtype": "bfloat16"},
        {"ratio": 8},
        {"residual": "embed_last"},
        {"quantisation": "int8"},
        {"rope": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_identity_reads_nothing_and_is_told_why(uri: str, changes: dict[str, object]) -> None:
    open_store(uri).put([make_document("a")])
    found = open_store(uri, **changes).get(["a"], namespace="acme")["a"]
    assert isinstance(found, Miss) and found.reason == "other_identity"
    assert f"{next(iter(changes))} differs" in found.detail


def put_in_a_process(uri: str) -> None:
    open_store(uri).put([make_document("a")])


def test_another_process_finds_what_one_wrote(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "12345")
    process = get_context("spawn").Process(target=put_in_a_process, args=(uri,))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0
    assert_same(open_store(uri).get(["a"], namespace="acme")["a"], make_document("a"))


# ---- damage: every fault is found, none reaches a tensor


def written(uri: str) -> tuple[KVStore, IndexRow, bytes]:
    store = open_store(uri)
    # From the second record on padding is equal, and so is the size.
    ids = ("first", "a", "b")
    store.put([make_document(doc_id, part_tokens=(18, 7), seed=n) for n, doc_id in enumerate(ids)])
    row = next(row for row in store.rows() if row.doc_id == "a")
    return store, row, open_storage(uri).get(row.shard).to_pybytes()


def missed(store: KVStore) -> Miss:
    found = store.get(["a"], namespace="acme")["a"]
    assert isinstance(found, Miss) and found.is_damage, found
    return found


def test_flipped_bits_are_found(uri: str) -> None:
    store, row, data = written(uri)
    storage, chance = open_storage(uri), random.Random(0)
    for _ in range(FLIPS):
        damaged = bytearray(data)
        damaged[row.offset + chance.randrange(row.length)] ^= 1 << chance.randrange(8)
        storage.put(row.shard, bytes(damaged))
        missed(store)
    storage.put(row.shard, data)
    assert_same(store.get(["a"], namespace="acme")["a"], make_document("a", part_tokens=(18, 7), seed=1))
    assert store.counters["miss"] == FLIPS


def test_cut_objects_are_found(uri: str) -> None:
    store, row, data = written(uri)
    storage, chance = open_storage(uri), random.Random(1)
    for length in [
        0,
        1,
        row.offset,
        row.offset + 1,
        *(chance.randrange(row.offset + row.length) for _ in range(CUTS)),
    ]:
        storage.put(row.shard, data[:length])
        assert missed(store).reason in ("truncated", "damaged_record")


def test_swapped_payloads_are_found(uri: str) -> None:
    store, row, data = written(uri)
    other = next(r for r in store.rows() if r.doc_id == "b")
    assert row.length == other.length
    damaged = bytearray(data)
    damaged[row.offset : row.offset + row.length] = data[other.offset : other.offset + other.length]
    damaged[other.offset : other.offset + other.length] = data[row.offset : row.offset + row.length]
    open_storage(uri).put(row.shard, bytes(damaged))
    for found in store.get(["a", "b"], namespace="acme").values():
        assert isinstance(found, Miss) and found.is_damage


def test_a_lost_object_is_a_miss_and_others_go_on(uri: str) -> None:
    store, row, _ = written(uri)
    store.put([make_document("kept")])
    open_storage(uri).delete(row.shard)
    assert missed(store).reason == "missing_shard"
    assert_same(store.get(["kept"], namespace="acme")["kept"], make_document("kept"))


def test_late_rows_of_a_task_that_was_tried_again_are_harmless(uri: str) -> None:
    store = open_store(uri)
    first = store.write_shard([make_document("a", seed=1)], run="night")
    second = store.write_shard([make_document("a", seed=1)], run="night")
    store.commit(second)
    store.commit(first)  # the worker thought dead reports after all
    assert len(store.rows()) == 1
    store.gc(retention_s=0)
    assert_same(store.get(["a"], namespace="acme")["a"], make_document("a", seed=1))
    with pytest.raises(StoreError, match="is gone"):
        store.commit(second)
    assert store.verify().ok


def test_totals_and_rows_of_some_documents_agree_with_all_rows(uri: str) -> None:
    for changes, ids in (({}, ["a", "b", "c"]), ({"ratio": 8}, ["a"])):
        identity = make_identity(**changes)
        for namespace in ("acme", "other"):
            documents = [
                make_document(i, namespace=namespace, part_tokens=(18, 5), identity=identity) for i in ids
            ]
            KVStore.open(uri, identity=identity, create=True).put(documents)
    store = open_store(uri)
    for totals in (*store.totals(), *store.totals(namespace="other")):
        rows = store.rows(namespace=totals.namespace, fingerprint=totals.fingerprint)
        assert (totals.documents, totals.parts) == (len(rows), sum(row.parts for row in rows))
        assert (totals.slots, totals.source_tokens) == (sum(r.slots for r in rows), 23 * len(rows))
        assert totals.bytes == sum(row.length for row in rows)
    assert [(t.namespace, t.documents) for t in store.totals()].count(("acme", 3)) == 1
    assert len(store.totals()) == 4
    assert len(store.totals(namespace="other")) == 2
    assert store.totals(namespace="nobody") == []
    chosen = [row for row in store.rows(namespace="acme") if row.doc_id in {"a", "c"}]
    assert store.rows_of(["c", "a", "absent", "\ud800"], namespace="acme") == chosen
    assert store.rows_of([], namespace="acme") == []


def test_a_shard_of_many_small_records_has_room_for_all(uri: str) -> None:
    store = open_store(uri)
    documents = [make_document(f"doc-{n}", part_tokens=(1,), seed=n) for n in range(1500)]
    documents += [make_document("parts", part_tokens=(1,) * 50)]
    store.put(documents)
    assert store.verify().ok
    assert_same(store.get(["doc-1499"], namespace="acme")["doc-1499"], documents[1499])


def test_a_lossy_codec_stores_as_many_documents_as_a_plain_one(uri: str) -> None:
    documents = [make_document(f"d{n}", part_tokens=(18, 7), seed=n) for n in range(12)]
    for quantisation in ("none", "int8"):
        identity = make_identity(quantisation=quantisation)
        store = KVStore.open(uri, identity=identity, create=True)
        rows = store.put(documents)
        assert len(rows) == len(documents)
        found = KVStore.open(uri, identity=identity).get([d.doc_id for d in documents], namespace="acme")
        assert not any(isinstance(outcome, Miss) for outcome in found.values())
    by_codec = {totals.fingerprint: totals for totals in KVStore.open(uri).totals()}
    assert [totals.documents for totals in by_codec.values()] == [12, 12]
    assert len({(totals.slots, totals.source_tokens) for totals in by_codec.values()}) == 1
    assert KVStore.open(uri).verify().documents == 24
