"""Random histories of a store against a dictionary: put, replace, delete, crash, gc, repair, reopen."""

import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from c2kv_core.store import KVStore, Miss, open_storage
from tests.core_store_kit import assert_same, make_document, make_identity, make_text

IDS = st.sampled_from(["a", "b", "A", "a/b", "ü", "c" * 300])
NAMESPACES = st.sampled_from(["acme", "other"])
RATIOS = (4, 8)


class StoreHistory(RuleBasedStateMachine):
    """``live`` says what a reader must find: the seed by (namespace, id, ratio)."""

    root = ""
    """Where stores are made."""

    @initialize()
    def begin(self) -> None:
        self.uri = f"{self.root}/{uuid.uuid4().hex}"
        self.live: dict[tuple[str, str, int], int] = {}
        self.texts: dict[tuple[str, str], int] = {}
        self.damaged: set[tuple[str, str, int]] = set()
        self.seed = 0
        self.reopen()

    @rule()
    def reopen(self) -> None:
        self.stores = {
            ratio: KVStore.open(
                self.uri, identity=make_identity(ratio=ratio), create=True, buckets=2, index_refresh_s=0.0
            )
            for ratio in RATIOS
        }

    @rule(
        ids=st.lists(IDS, min_size=1, max_size=4, unique=True),
        namespace=NAMESPACES,
        ratio=st.sampled_from(RATIOS),
    )
    def put(self, ids: list[str], namespace: str, ratio: int) -> None:
        self.seed += 1
        documents = [self.document(namespace, doc_id, ratio, self.seed) for doc_id in ids]
        self.stores[ratio].put(documents, texts=[make_text(d, f"text {self.seed}") for d in documents])
        for doc_id in ids:
            self.live[namespace, doc_id, ratio] = self.seed
            self.texts[namespace, doc_id] = self.seed
            self.damaged.discard((namespace, doc_id, ratio))

    @rule(ids=st.lists(IDS, min_size=1, max_size=3, unique=True), namespace=NAMESPACES)
    def crash_before_the_commit(self, ids: list[str], namespace: str) -> None:
        documents = [self.document(namespace, doc_id, RATIOS[0], 10_000) for doc_id in ids]
        self.stores[RATIOS[0]].write_shard(documents, run="crashed")

    @rule(ids=st.lists(IDS, min_size=1, max_size=3, unique=True), namespace=NAMESPACES)
    def delete(self, ids: list[str], namespace: str) -> None:
        gone = {key for key in self.live if key[0] == namespace and key[1] in ids}
        assert self.stores[RATIOS[0]].delete(ids, namespace=namespace) == len(gone)
        for key in gone:
            del self.live[key]
        self.damaged -= gone
        for doc_id in ids:
            self.texts.pop((namespace, doc_id), None)

    @rule(dry_run=st.booleans())
    def gc(self, dry_run: bool) -> None:
        self.stores[RATIOS[0]].gc(retention_s=0, dry_run=dry_run)

    @rule(data=st.data())
    def damage(self, data: Any) -> None:
        hurt = {key[:2] for key in self.damaged}  # a second flip could heal the first
        rows = [row for row in self.stores[RATIOS[0]].rows() if (row.namespace, row.doc_id) not in hurt]
        if not rows:
            return
        row = data.draw(st.sampled_from(rows))
        storage = open_storage(self.uri)
        content = bytearray(storage.get(row.shard).to_pybytes())
        content[row.offset + data.draw(st.integers(0, row.length - 1))] ^= 1 << data.draw(st.integers(0, 7))
        storage.put(row.shard, bytes(content))
        ratio = next(r for r in RATIOS if make_identity(ratio=r).fingerprint == row.fingerprint)
        self.damaged.add((row.namespace, row.doc_id, ratio))

    @rule()
    def repair(self) -> None:
        self.stores[RATIOS[0]].verify(repair=True)
        for key in self.damaged:
            del self.live[key]
        self.damaged = set()

    @invariant()
    def a_reader_finds_what_is_live(self) -> None:
        ids = ["a", "b", "A", "a/b", "ü", "c" * 300]
        for namespace in ("acme", "other"):
            for ratio, store in self.stores.items():
                for doc_id, found in store.get(ids, namespace=namespace).items():
                    seed = self.live.get((namespace, doc_id, ratio))
                    if seed is None or (namespace, doc_id, ratio) in self.damaged:
                        assert isinstance(found, Miss)
                        assert found.is_damage == (seed is not None)
                    else:
                        assert_same(found, self.document(namespace, doc_id, ratio, seed))
            texts = self.stores[RATIOS[0]].text(ids, namespace=namespace)
            wanted = {key[1]: f"text {seed}" for key, seed in self.texts.items() if key[0] == namespace}
            assert {doc_id: text.text for doc_id, text in texts.items()} == wanted

    @invariant()
    def verify_finds_the_damage_and_nothing_else(self) -> None:
        problems = self.stores[RATIOS[0]].verify().problems
        assert {(p.row.namespace, p.row.doc_id) for p in problems} == {key[:2] for key in self.damaged}

    @staticmethod
    def document(namespace: str, doc_id: str, ratio: int, seed: int) -> Any:
        return make_document(doc_id, namespace=namespace, identity=make_identity(ratio=ratio), seed=seed)


def run(root: str, *, examples: int, steps: int) -> None:
    machine = type("Here", (StoreHistory,), {"root": root})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_any_history_on_a_local_directory(tmp_path: Path) -> None:
    folder = tempfile.mkdtemp(dir=tmp_path)
    run(folder, examples=12, steps=15)
    shutil.rmtree(folder)


@pytest.mark.slow
def test_any_history_in_a_bucket(bucket: str) -> None:
    run(bucket, examples=3, steps=10)
