"""Where slots come from: copies on a local disk, and the gate that leaves a slow store unread."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from c2kv_core.errors import StoreError
from c2kv_core.store import DiskTier, KVStore, Miss, ReadTiming, disk_tier
from serve_app import cost_gate
from serve_app.cost_gate import CostGate
from serve_app.fetching import DocumentFetcher
from serve_app.hot_documents import HotDocuments
from serve_app.loading import load_service
from serve_app.slot_memory import SlotMemory
from tests.core_store_kit import assert_same, make_document, make_identity
from tests.serve_support import DOCUMENTS, World, ask, make_world, put_documents, wait_until

pytest_plugins = ["tests.serve_support"]

ROOM = 2**30


def filled(uri: str, count: int = 3) -> KVStore:
    store = KVStore.open(uri, identity=make_identity(), create=True)
    store.put([make_document(f"doc-{n}", seed=n) for n in range(count)])
    return store


def near(uri: str, tier: DiskTier) -> KVStore:
    return KVStore.open(uri, identity=make_identity(), disk=tier)


def read(store: KVStore, ids: list[str]) -> tuple[dict[str, Any], set[str]]:
    timing = ReadTiming()
    found = store.get(ids, namespace="acme", timing=timing)
    return found, timing.from_disk


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.record"))


def test_what_was_read_is_on_disk_next_time_and_after_a_restart(uri: str, tmp_path: Path) -> None:
    filled(uri)
    tier = DiskTier(tmp_path / "near", max_bytes=ROOM)
    ids = ["doc-0", "doc-1", "doc-9"]
    first, from_disk = read(near(uri, tier), ids)
    assert not from_disk
    tier.flush()
    second, from_disk = read(near(uri, tier), ids)
    assert from_disk == {"doc-0", "doc-1"} and isinstance(second["doc-9"], Miss)
    for doc_id in from_disk:
        assert_same(second[doc_id], first[doc_id])
    tier.close()
    after = DiskTier(tmp_path / "near", max_bytes=ROOM)
    assert after.used_bytes == sum(path.stat().st_size for path in records(tmp_path / "near")) > 0
    assert read(near(uri, after), ids)[1] == {"doc-0", "doc-1"}
    assert (tmp_path / "near").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("how", ["flip", "cut", "swap"])
def test_a_damaged_copy_is_removed_and_the_original_read(tmp_path: Path, how: str) -> None:
    uri = str(tmp_path / "store")
    expected = filled(uri).get(["doc-0"], namespace="acme")["doc-0"]
    tier = DiskTier(tmp_path / "near", max_bytes=ROOM)
    read(near(uri, tier), ["doc-0", "doc-1"])
    tier.flush()
    for path in records(tmp_path / "near"):
        data = bytearray(path.read_bytes())
        if how == "flip":
            data[len(data) // 2] ^= 1
        path.write_bytes(data[:-7] if how == "cut" else data)
    if how == "swap":
        one, other = records(tmp_path / "near")
        one.rename(tmp_path / "away")
        other.rename(one)
        (tmp_path / "away").rename(other)
    found, from_disk = read(near(uri, tier), ["doc-0"])
    assert not from_disk and tier.damaged == 1
    assert_same(found["doc-0"], expected)
    tier.flush()
    assert read(near(uri, tier), ["doc-0"])[1] == {"doc-0"}


def test_a_replaced_or_deleted_document_is_not_served_from_its_copy(tmp_path: Path) -> None:
    uri = str(tmp_path / "store")
    writer = filled(uri)
    tier = DiskTier(tmp_path / "near", max_bytes=ROOM)
    read(near(uri, tier), ["doc-0", "doc-1"])
    tier.flush()
    newer = make_document("doc-0", seed=77)
    writer.put([newer])
    writer.delete(["doc-1"], namespace="acme")
    found, from_disk = read(near(uri, tier), ["doc-0", "doc-1"])
    assert not from_disk and isinstance(found["doc-1"], Miss)
    assert_same(found["doc-0"], newer)


def test_the_least_recently_used_copies_go_first_and_old_ones_always(tmp_path: Path) -> None:
    uri = str(tmp_path / "store")
    size = next(iter(filled(uri, 8).rows())).length
    folder = tmp_path / "near"
    tier = DiskTier(folder, max_bytes=int(3.5 * size))
    for n in (0, 1, 2):
        read(near(uri, tier), [f"doc-{n}"])
        tier.flush()
    assert read(near(uri, tier), ["doc-0"])[1]  # used again
    read(near(uri, tier), ["doc-3"])
    tier.flush()
    assert tier.evictions == 1 and tier.used_bytes <= 3.5 * size
    assert read(near(uri, tier), ["doc-0"])[1] and not read(near(uri, tier), ["doc-1"])[1]
    tier.flush()
    for path in records(folder):
        told = path.stat()
        os.utime(path, (told.st_atime, told.st_mtime - 100))
    (folder / ".left.tmp").touch()
    os.utime(folder / ".left.tmp", (0, 0))
    DiskTier(folder, max_bytes=ROOM, max_age_s=50)
    assert list(folder.iterdir()) == []


def test_a_full_disk_costs_the_copy_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path / "store")
    filled(uri)
    tier = DiskTier(tmp_path / "near", max_bytes=ROOM)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    found, _ = read(near(uri, tier), ["doc-0"])
    tier.flush()
    assert not isinstance(found["doc-0"], Miss) and list((tmp_path / "near").iterdir()) == []


def test_processes_that_share_a_folder_share_its_bytes(tmp_path: Path) -> None:
    uri = str(tmp_path / "store")
    size = next(iter(filled(uri, 30).rows())).length
    folder = tmp_path / "near"
    # Each as a process of its own: it knows of the others by what lies in the folder.
    tiers = [DiskTier(folder, max_bytes=int(5.5 * size)) for _ in range(6)]
    for n, tier in enumerate(tiers):
        read(near(uri, tier), [f"doc-{5 * n + i}" for i in range(5)])
        tier.flush()
    assert len(records(folder)) <= 5


def test_copies_get_old_while_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path / "store")
    filled(uri)
    monkeypatch.setattr(disk_tier, "_SWEEP_S", 0.05)
    tier = DiskTier(tmp_path / "near", max_bytes=ROOM, max_age_s=50)
    read(near(uri, tier), ["doc-0"])
    tier.flush()
    (copy,) = records(tmp_path / "near")
    os.utime(copy, (time.time(), time.time() - 100))
    wait_until(lambda: not records(tmp_path / "near"), what="the old copy to go")
    tier.close()


def test_a_copy_that_is_too_old_is_not_used(tmp_path: Path) -> None:
    uri = str(tmp_path / "store")
    filled(uri)
    tier = DiskTier(tmp_path / "near", max_bytes=ROOM, max_age_s=50)
    read(near(uri, tier), ["doc-0"])
    tier.flush()
    (copy,) = records(tmp_path / "near")
    os.utime(copy, (time.time(), time.time() - 100))
    assert not read(near(uri, tier), ["doc-0"])[1]


def test_a_folder_that_somebody_tidied_up_or_filled_with_other_things(tmp_path: Path) -> None:
    uri = str(tmp_path / "store")
    filled(uri)
    folder = tmp_path / "near"
    tier = DiskTier(folder, max_bytes=ROOM)
    read(near(uri, tier), ["doc-0"])
    tier.flush()
    (copy,) = records(folder)
    shutil.rmtree(folder)
    assert not read(near(uri, tier), ["doc-0"])[1]
    tier.flush()
    assert read(near(uri, tier), ["doc-0"])[1] == {"doc-0"}
    copy.unlink()
    copy.mkdir()
    (folder / "lost+found").mkdir()
    assert not read(near(uri, tier), ["doc-0"])[1]
    assert DiskTier(folder, max_bytes=1).used_bytes == 0


def test_a_replica_names_the_tier_and_copies_outlive_it(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    config = world.config(disk_cache_dir=str(tmp_path / "near"), memory_cache_bytes=0)

    def tiers_of_two_answers() -> list[str]:
        service, _ = load_service(config)
        told = []
        for _ in range(2):
            told += [d["tier"] for d in ask(service, ["oak", "birch"]).documents]
            assert service._shared.disk is not None
            service._shared.disk.flush()
        service.close()
        return told

    assert tiers_of_two_answers() == ["store", "store", "disk", "disk"]
    assert tiers_of_two_answers() == ["disk"] * 4


def test_slots_that_are_slower_to_read_than_to_make_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = CostGate(factor=2)
    assert gate.refusal(10**9, 1) is None  # nothing is known
    for tokens in (100, 200, 400):
        gate.has_made(tokens, 0.001 * tokens)
        gate.has_read(tokens * 5_000, 0.01 + 0.0001 * tokens)
    assert gate.refusal(100 * 5_000, 100) is None
    for tokens in (100, 200, 400) * 10:  # the link has become slow
        gate.has_read(tokens * 5_000, 0.5 + 0.01 * tokens)
    told = gate.refusal(100 * 5_000, 100)
    assert told is not None and "expected to take 1." in told and "making them 0.1" in told
    assert gate.refusal(100 * 5_000, 100) is not None
    # Now and then one is read, and when that is quick again the others are too.
    monkeypatch.setattr(cost_gate, "_LOOK_AGAIN_S", 0.0)
    assert gate.refusal(100 * 5_000, 100) is None
    monkeypatch.undo()
    for tokens in (100, 200, 400) * 10:
        gate.has_read(tokens * 5_000, 0.0001 * tokens)
    assert gate.refusal(100 * 5_000, 100) is None
    assert CostGate(factor=0).refusal(10**12, 1) is None


def test_one_size_is_taken_in_proportion() -> None:
    gate = CostGate(factor=1)
    for _ in range(5):
        gate.has_made(500, 1.0)
        gate.has_read(1_000_000, 0.9)
    assert gate.refusal(1_000_000, 500) is None
    assert gate.refusal(10_000_000, 500) is not None


class SlowStore:
    """The real store, whose reads take a while longer."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.slow_s = 0.0

    def get(self, ids: list[str], **options: Any) -> Any:
        time.sleep(self.slow_s)
        return self._store.get(ids, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def unreadable(*args: Any, **options: Any) -> Any:
    raise StoreError("cannot read documents/: it does not answer")


def test_a_slow_store_is_left_unread_and_the_answer_says_so(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    put_documents(
        world,
        world.open_store(),
        [DOCUMENTS["birch"]._replace(doc_id=f"birch-{n}", text=f"Betula {n} is a birch.") for n in range(4)],
    )
    # However slow the machine is at making slots just now.
    service, _ = load_service(world.config(memory_cache_bytes=0, remake_factor=0.01))
    (edition,) = service._editions.all
    slow = SlowStore(edition.store)
    fetcher: DocumentFetcher = edition.resolver._fetcher
    fetcher._store = slow  # type: ignore[assignment]
    for n in range(4):
        ask(service, [{"text": f"Some text, number {n}."}], max_tokens=1)
    assert [d["tier"] for d in ask(service, ["birch-0"]).documents] == ["store"]
    slow.slow_s = 1.0
    for n in range(3):
        ask(service, [f"birch-{n}"])
    report = ask(service, ["birch-3", "naked"]).documents
    # Whose text is not stored is read all the same.
    assert [(d["tier"], d["fallback_reason"]) for d in report] == [("extracted", "slower"), ("store", None)]
    assert [d["tier"] for d in ask(service, ["birch-3"], c2kv={"on_missing": "skip"}).documents] == ["store"]
    slow.text = unreadable  # type: ignore[attr-defined]
    assert [d["tier"] for d in ask(service, ["birch-3"]).documents] == ["store"]
    service.close()


def test_a_document_in_memory_needs_no_gate(world: World) -> None:
    gate = CostGate(factor=1e-9)
    fetcher = DocumentFetcher(
        store=world.open_store(), memory=SlotMemory(max_bytes=ROOM), threads=2, gate=gate
    )
    for n in range(3):
        gate.has_made(100 + n, 1e-6)
    until_s = time.monotonic() + 60
    for doc_id in ("oak", "birch", "ash"):
        assert not isinstance(fetcher.slots([doc_id], "default", until_s=until_s)[doc_id], Miss)
    found = fetcher.slots(["oak", "long"], "default", until_s=until_s, may_refuse=True)
    assert not isinstance(found["oak"], Miss)
    assert isinstance(found["long"], Miss) and found["long"].reason == "slower"
    fetcher.close()


def test_a_fresh_replica_has_what_others_were_asked_for_most(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    config = world.config(warm_up_documents=2)
    old, _ = load_service(config)
    for doc_ids in (["oak"], ["oak", "birch"], ["birch", "ash"], ["oak", "nobody"]):
        ask(old, doc_ids)
    old.close()
    fresh, _ = load_service(config)
    assert {d["id"]: d["tier"] for d in ask(fresh, ["oak", "birch", "ash"]).documents} == {
        "oak": "memory",
        "birch": "memory",
        "ash": "store",
    }
    # Lists that make no sense and documents that are gone are left out.
    world.open_store().delete(["oak"], namespace="default")
    (tmp_path / "store" / "hot" / "other.json").write_text("{")
    other, _ = load_service(config)
    assert [d["tier"] for d in ask(other, ["birch"]).documents] == ["memory"]
    for one in (fresh, other):
        one.close()


def test_what_is_wanted_fades_and_a_store_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    uri = str(tmp_path / "store")
    filled(uri)
    early, late = HotDocuments(uri), HotDocuments(uri)
    for _ in range(10):
        early.used("acme", "old")
    for _ in range(12):
        early._write()
        early.used("acme", "new")
        early.used("acme", "new")
    early.close()
    assert late.most_wanted(5) == [("acme", "new"), ("acme", "old")]
    for path in (tmp_path / "store" / "hot").iterdir():
        os.utime(path, (0, 0))
    assert late.most_wanted(5) == []
    late.used("acme", "x")
    late.close()  # removes the old list
    assert len(list((tmp_path / "store" / "hot").iterdir())) == 1
    lost = HotDocuments(str(tmp_path / "nowhere"))
    lost.used("acme", "x")
    (tmp_path / "nowhere").write_text("a file")
    lost.close()
    assert lost.most_wanted(5) == []
