"""Notes of work in progress, documents that failed, and metadata: what the extraction job keeps in a store."""

import time
from pathlib import Path

import pyarrow as pa
import pytest

from c2kv_core.errors import StoreError, StoreFormatError
from c2kv_core.store import (
    Attempts,
    DeadLetter,
    DeadLetters,
    KVStore,
    Ledger,
    attempts,
    dead_letter,
    open_storage,
    require_store,
    texts,
)
from c2kv_core.store.names import bucket_of
from tests.core_store_kit import make_document, make_identity, make_text, new_store


def of_run(uri: str, run: str) -> Attempts:
    return Attempts(open_storage(uri), namespace="acme", run=run)


def test_a_note_tells_what_a_dead_process_worked_on(uri: str) -> None:
    night = of_run(uri, "night")
    first = night.begin("u1", [("a", "h1"), ("b", "h2")], node="n", actor="x")
    night.begin("u1", [("a", "h1")], node="n", actor="y")
    night.begin("u2", [("c", "h3")], node="n", actor="y")
    found = night.of_unit("u1")
    assert sorted(one.documents for one in found) == [(("a", "h1"),), (("a", "h1"), ("b", "h2"))]
    assert sorted(one.is_alone for one in found) == [False, True]
    night.end(first)
    assert [one.documents for one in night.of_unit("u1")] == [(("a", "h1"),)]
    assert len(night.running()) == 2
    night.clear()
    assert night.running() == []


def test_a_run_that_is_stopped_takes_back_only_what_is_in_progress(uri: str) -> None:
    night = of_run(uri, "night")
    night.begin("u1", [("a", "h1"), ("b", "h2")], node="n", actor="x")
    night.begin("u1", [("a", "h1")], node="n", actor="x")
    night.begin("u2", [("c", "h3")], node="n", actor="y")
    night.withdraw()
    (left,) = night.running()
    assert left.documents == (("a", "h1"), ("b", "h2")), "somebody has died of these"


def test_a_process_that_outlives_the_end_of_its_run_blames_nobody(uri: str) -> None:
    night, mine = of_run(uri, "night"), of_run(uri, "mine")
    for run in (night, mine):
        run.heartbeat()
    deadly = night.begin("u1", [("a", "h1")], node="n", actor="x")
    night.begin("u1", [("a", "h1")], node="n", actor="y")
    night.withdraw()
    # What stops processes does not wait for their end: one has taken up the next unit meanwhile.
    late = night.begin("u2", [("b", "h2")], node="n", actor="y")
    assert list(mine.left_behind()) == [deadly], "a stopped run is dead at once"
    mine.clear()
    assert [one.documents for one in night.running()] == [(("a", "h1"),), (("b", "h2"),)], (
        "deaths are looked into first"
    )
    mine.clear([deadly])
    assert list(open_storage(uri).list_files("attempts/acme/night/")) == [], late


def test_only_dead_runs_leave_something_behind(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, dead, mine = (of_run(uri, run) for run in ("alive", "dead", "mine"))
    for run in (alive, dead):
        run.begin("u", [("a", "h")], node="n", actor="x")
    for run in (alive, mine):
        run.heartbeat()
    (left,) = mine.left_behind().items()
    assert (left[1].run, left[1].documents) == ("dead", (("a", "h"),))
    mine.clear([left[0]])
    assert mine.left_behind() == {} and len(alive.running()) == 1
    # A run that has been silent for long is dead as well.
    monkeypatch.setattr(attempts, "DEAD_AFTER_S", -1.0)
    mine.heartbeat()
    (left,) = mine.left_behind().items()
    assert left[1].run == "alive"
    mine.clear([left[0]])
    assert list(open_storage(uri).list_files("attempts/")) == []


def test_what_is_no_note_is_passed_over(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    for name, text in {"u.1.json": b"{", "u.2.json": b"{}", "u.3.json": b'{"documents": [1]}'}.items():
        storage.put(f"attempts/acme/dead/{name}", text)
    mine = of_run(str(tmp_path), "mine")
    mine.heartbeat()
    assert mine.left_behind() == {}


def letter(doc_id: str, **changes: object) -> DeadLetter:
    values = {
        "namespace": "acme",
        "fingerprint": "f1",
        "content_hash": "h",
        "kind": "model",
        "reason": "it broke",
        "attempts": 1,
        "run": "night",
        **changes,
    }
    return dead_letter(doc_id=doc_id, **values)  # type: ignore[arg-type]


def test_failures_are_one_row_each_and_attempts_of_one_content_add_up(uri: str) -> None:
    KVStore.open(uri, create=True)
    letters = DeadLetters.open(uri)
    assert (
        not letters.exists
        and letters.rows() == []
        and letters.delete("acme", ["a"]) == letters.settle("acme", "f", ["a"]) == 0
    )
    letters.record([letter("a"), letter("a", fingerprint="f2"), letter("b", namespace="other")])
    letters.record([letter("a", attempts=2, kind="killed", run="later")])
    first, other, elsewhere = letters.rows()
    assert (first.doc_id, first.fingerprint, first.attempts, first.kind, first.run) == (
        "a",
        "f1",
        3,
        "killed",
        "later",
    )
    assert first.first_failed_at < first.last_failed_at and other.attempts == 1
    letters.record([letter("a", content_hash="changed")])
    assert letters.rows(namespace="acme")[0].attempts == 1, "another content begins anew"
    assert letters.settle("acme", "f2", ["a", "never"]) == 1
    assert [one.fingerprint for one in letters.rows(namespace="acme")] == ["f1"], "it fails there still"
    letters.record([letter("a", fingerprint="f2")])
    assert letters.delete("acme", ["a", "never"]) == 2
    assert DeadLetters.open(uri).rows() == [elsewhere]


def test_removing_a_document_forgets_its_failures_and_gc_keeps_the_table(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    DeadLetters.open(store.uri).record([letter("a"), letter("b")])
    store.delete(["a"], namespace="acme")
    of_run(store.uri, "killed").begin("u", [("a", "h")], node="n", actor="x")
    store.gc(retention_s=0)
    assert [one.doc_id for one in DeadLetters.open(store.uri).rows()] == ["b"]
    assert not list((tmp_path / "store" / "attempts").rglob("*.json")), "notes that nobody settles go by age"


def test_no_store_has_no_failures(tmp_path: Path) -> None:
    with pytest.raises(StoreFormatError, match="no store at"):
        DeadLetters.open(tmp_path / "absent")
    with pytest.raises(StoreError, match="is gone"):
        require_store(open_storage(str(tmp_path / "absent")))


def test_the_ledger_lists_ids_and_contents_of_one_namespace(uri: str) -> None:
    store = KVStore.open(uri, identity=make_identity(), create=True)
    store.put([make_document(i) for i in ("a", "b")], texts=[make_text(make_document("a"))])
    store.put([make_document("c", namespace="other")])
    ledger = Ledger.open(uri, namespace="acme")
    fingerprint = make_identity().fingerprint
    found = pa.concat_tables(ledger.documents(fingerprint)).sort_by("doc_id")
    assert found.to_pydict() == {"doc_id": ["a", "b"], "content_hash": ["0" * 64] * 2}
    assert sum(table.num_rows for table in ledger.documents()) == 2
    assert sum(table.num_rows for table in ledger.documents("unknown")) == 0
    assert ledger.set_metadata({"a": '{"x": 1}', "b": "{}"}) == 1, "b has no text to carry it"
    assert pa.concat_tables(ledger.metadata()).to_pydict() == {"doc_id": ["a"], "metadata": ['{"x": 1}']}
    assert list(Ledger.open(f"{uri}/absent", namespace="acme").documents()) == []


def test_a_table_of_texts_from_before_metadata_gets_the_column_with_its_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pa.schema([field for field in texts.TEXTS_SCHEMA if field.name != "metadata"])
    with monkeypatch.context() as patch:
        patch.setattr(texts, "TEXTS_SCHEMA", before)
        old = new_store(tmp_path)
        row = {
            "bucket": bucket_of("acme", "a", buckets=16),
            "namespace": "acme",
            "doc_id": "a",
            "content_hash": "h",
            "title": "t",
            "text": "kept",
            "updated_at": int(time.time()),
        }
        old._texts.table.upsert(pa.Table.from_pylist([row], schema=before))
    store = new_store(tmp_path)
    assert store.text(["a"], namespace="acme")["a"].metadata is None
    ledger = Ledger.open(store.uri, namespace="acme")
    assert [table["metadata"].to_pylist() for table in ledger.metadata()] == [[None]]
    assert ledger.set_metadata({"a": '{"x": 1}'}) == 1
    store.put([make_document("b")], texts=[make_text(make_document("b"))])
    found = store.text(["a", "b"], namespace="acme")
    assert (found["a"].text, found["a"].metadata, found["b"].metadata) == ("kept", '{"x": 1}', None)
