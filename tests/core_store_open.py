"""What may be opened as a store, and whose slots may be read from it."""

import json
import shutil
from pathlib import Path

import pytest

from c2kv_core.errors import IdentityError, InputError, StoreFormatError
from c2kv_core.store import FORMAT_VERSION, KVStore, Miss, open_storage
from tests.core_store_kit import (
    assert_same,
    files_of,
    get_one,
    make_document,
    make_identity,
    miss_reason,
    new_store,
)


def test_a_store_must_exist_to_be_read(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(StoreFormatError, match=r"no store at .*create one with `c2kv extract`"):
        KVStore.open(absent)
    assert not absent.exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreFormatError, match="no store at"):
        KVStore.open(tmp_path / "empty")


def test_a_new_store_has_the_documented_files(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    assert json.loads((tmp_path / "store/store.json").read_text()) == {
        "format_version": FORMAT_VERSION,
        "buckets": 16,
    }
    store.put([make_document("a")], run="night")
    fingerprint = make_identity().fingerprint
    assert (tmp_path / f"store/fingerprints/{fingerprint}.json").read_text() == make_identity().canonical_json
    (shard,) = [path for path in files_of(tmp_path / "store") if path.startswith("shards/")]
    assert shard.startswith(f"shards/acme/{fingerprint}/night/")
    assert shard.endswith(".arrow")


def test_a_path_with_blanks_and_signs_and_a_file_uri_work(tmp_path: Path) -> None:
    folder = tmp_path / "my store #1 é?+&"
    new_store(folder).put([make_document("a")])
    by_uri = KVStore.open((folder / "store").as_uri(), identity=make_identity())
    assert_same(get_one(by_uri, "a"), make_document("a"))


def test_somebody_elses_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for create in (False, True):
        with pytest.raises(StoreFormatError) as failure:
            KVStore.open(tmp_path, identity=make_identity(), create=create)
        assert "\n" not in str(failure.value)
    assert files_of(tmp_path) == {"thesis.txt"}
    with pytest.raises(StoreFormatError, match="found a file"):
        KVStore.open(tmp_path / "thesis.txt", create=True)


def test_a_store_without_its_manifest_is_not_made_anew(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.put([make_document("a")])
    Path(store.uri, "store.json").unlink()
    with pytest.raises(StoreFormatError, match=r"store\.json"):
        new_store(tmp_path)


def test_an_interrupted_creation_is_finished(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    Path(store.uri, "store.json").unlink()
    shutil.rmtree(Path(store.uri, "documents"))
    again = new_store(tmp_path)
    again.put([make_document("a")])
    assert_same(get_one(again, "a"), make_document("a"))


@pytest.mark.parametrize(
    "text",
    [
        '{"format_version": 99, "buckets": 16}',
        "[]",
        "{}",
        "not json",
        '{"buckets": 1}',
        '{"format_version": 1, "buckets": "16"}',
    ],
)
def test_another_format_is_refused(tmp_path: Path, text: str) -> None:
    store = new_store(tmp_path)
    Path(store.uri, "store.json").write_text(text)
    with pytest.raises(StoreFormatError, match=r"format version|manifest"):
        KVStore.open(store.uri, create=True)


def test_a_lost_index_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    """Or gc would remove every shard."""
    store = new_store(tmp_path)
    store.put([make_document("a")])
    shutil.rmtree(Path(store.uri, "index"))
    again = new_store(tmp_path)
    for action in (again.rows, again.gc, again.verify, lambda: again.get(["a"], namespace="acme")):
        with pytest.raises(StoreFormatError, match="lost its table index/"):
            action()
    assert len([path for path in files_of(Path(store.uri)) if path.endswith(".arrow")]) == 1


def test_an_existing_store_keeps_its_number_of_buckets(tmp_path: Path) -> None:
    new_store(tmp_path, buckets=3).put([make_document("a")])
    again = new_store(tmp_path, buckets=7)
    assert {row.bucket for row in again.rows()} <= {0, 1, 2}
    assert_same(get_one(again, "a"), make_document("a"))
    with pytest.raises(InputError, match="buckets"):
        new_store(tmp_path / "other", buckets=0)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("gs://bucket/prefix", "local directory"),
        ("ftp://host/x", "local directory"),
        ("file://elsewhere/x", "local directory"),
        ("", "directory"),
        ("/tmp/100%", "without '%'"),
    ],
)
def test_other_places_are_refused_plainly(uri: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_storage(uri)


@pytest.mark.parametrize(
    ("field", "value"),
    [("format_version", 99), ("slot_dtype", "float64"), ("quantisation", "int3")],
)
def test_identities_that_cannot_be_stored_are_refused(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(IdentityError, match=field):
        new_store(tmp_path, identity=make_identity(**{field: value}))


def test_slots_of_another_identity_are_refused_and_the_field_is_named(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.put([make_document("a")])
    far = make_identity(sidecar_digest="x" * 64, residual="embed_mean")
    new_store(tmp_path, identity=far).put([make_document("b", identity=far)])

    opened = new_store(tmp_path, identity=make_identity(base_digest="c" * 64))
    with pytest.raises(IdentityError, match="another model or setting") as failure:
        opened.require_identity("acme")
    # The nearest stored identity differs in this field only.
    assert "base_digest differs (stored bbbbbbbbbbbbbbbb…, opened cccccccccccccccc…)" in str(failure.value)
    assert "sidecar_digest" not in str(failure.value)
    outcome = get_one(opened, "a")
    assert isinstance(outcome, Miss)
    assert outcome.reason == "other_identity"
    assert "base_digest" in outcome.detail
    assert opened.content_hashes(namespace="acme") == {}
    assert opened.explain_missing("empty") is None
    assert store.explain_missing("acme") is None
    store.require_identity("acme")


def test_identities_lie_side_by_side(tmp_path: Path) -> None:
    identities = [make_identity(ratio=ratio) for ratio in (4, 8)]
    stores = [new_store(tmp_path, identity=identity) for identity in identities]
    documents = [make_document("a", identity=identity) for identity in identities]
    for store, document in zip(stores, documents, strict=True):
        store.put([document])
    for store, document in zip(stores, documents, strict=True):
        assert_same(get_one(store, "a"), document)
    assert len(stores[0].rows(namespace="acme")) == 2
    assert len(stores[0].rows(fingerprint=identities[1].fingerprint)) == 1
    assert stores[0].rows(namespace="other") == []


def test_without_an_identity_no_slots_are_read_or_written(tmp_path: Path) -> None:
    new_store(tmp_path).put([make_document("a")])
    store = KVStore.open(tmp_path / "store")
    assert store.identity is None
    for action in (
        lambda: store.get(["a"], namespace="acme"),
        lambda: store.put([make_document("a")]),
        lambda: store.content_hashes(namespace="acme"),
        lambda: store.require_identity("acme"),
    ):
        with pytest.raises(IdentityError, match="identity="):
            action()
    assert [row.doc_id for row in store.rows()] == ["a"]


def test_one_id_instead_of_a_list_is_refused(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    for action in (store.get, store.delete, store.text):
        with pytest.raises(InputError, match="list of document ids"):
            action("abc", namespace="acme")


def test_an_unreadable_identity_is_still_explained(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.put([make_document("a")])
    Path(store.uri, f"fingerprints/{make_identity().fingerprint}.json").write_text("scribble")
    opened = new_store(tmp_path, identity=make_identity(ratio=8))
    assert miss_reason(opened, "a") == "other_identity"
    assert "not readable" in (opened.explain_missing("acme") or "")
