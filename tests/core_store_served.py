"""The log of what a namespace is served by: the last entry counts, and one of several writers wins."""

import json
import threading
from dataclasses import asdict

import pytest

from c2kv_core.errors import InputError, StoreError
from c2kv_core.store import (
    KVStore,
    PromotionConflictError,
    history,
    open_storage,
    promote,
    promoted_namespaces,
    served,
)
from tests.core_store_kit import make_document, make_identity

OLD, NEW, NEWER = (make_identity(sidecar_digest=name) for name in ("old", "new", "newer"))


@pytest.fixture
def filled(uri: str) -> str:
    for identity in (OLD, NEW, NEWER):
        KVStore.open(uri, identity=identity, create=True).put([make_document("a")])
    return uri


def test_the_last_promotion_counts_and_the_log_is_the_history(filled: str) -> None:
    assert served(filled, "acme") is None
    first = promote(filled, "acme", OLD.fingerprint, by="me", reason="first")
    assert served(filled, "acme") == first
    assert promote(filled, "acme", OLD.fingerprint) == first
    promote(filled, "acme", NEW.fingerprint, expected=OLD.fingerprint)
    back = promote(filled, "acme", OLD.fingerprint, reason="was better")
    assert served(filled, "acme") == back
    told = [(entry.version, entry.fingerprint, entry.reason) for entry in history(filled, "acme")]
    assert told == [
        (1, OLD.fingerprint, "first"),
        (2, NEW.fingerprint, ""),
        (3, OLD.fingerprint, "was better"),
    ]
    assert served(filled, "globex") is None
    promote(filled, "globex", NEW.fingerprint)
    assert promoted_namespaces(filled) == ["acme", "globex"]
    KVStore.open(filled).gc(retention_s=0)
    assert served(filled, "acme") == back


def test_one_of_several_writers_wins(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(filled, "acme", OLD.fingerprint)
    # All have read the same version before any of them writes.
    seen = threading.Barrier(8)
    storage = type(open_storage(filled))
    create = storage.create

    def create_after_all_have_read(self, path, data):  # type: ignore[no-untyped-def]
        if path.startswith("served/"):
            seen.wait(60)
        return create(self, path, data)

    monkeypatch.setattr(storage, "create", create_after_all_have_read)
    outcomes: list[str] = []

    def change(fingerprint: str) -> None:
        try:
            promote(filled, "acme", fingerprint, expected=OLD.fingerprint)
            outcomes.append(fingerprint)
        except PromotionConflictError:
            outcomes.append("lost")

    threads = [threading.Thread(target=change, args=((NEW, NEWER)[n % 2].fingerprint,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (won,) = (one for one in outcomes if one != "lost")
    now = served(filled, "acme")
    assert now is not None and (now.version, now.fingerprint) == (2, won)


def test_what_cannot_be_promoted_is_refused(filled: str) -> None:
    with pytest.raises(InputError, match="expected a fingerprint that"):
        promote(filled, "acme", "0" * 64)
    with pytest.raises(InputError, match="namespace"):
        promote(filled, "../acme", OLD.fingerprint)
    with pytest.raises(PromotionConflictError, match="found nothing"):
        promote(filled, "acme", NEW.fingerprint, expected=OLD.fingerprint)
    promote(filled, "acme", OLD.fingerprint)
    with pytest.raises(PromotionConflictError, match="expected"):
        promote(filled, "acme", NEW.fingerprint, expected=NEWER.fingerprint)
    open_storage(filled).put("served/acme/0000000002.json", b"{")
    with pytest.raises(StoreError, match="damaged"):
        served(filled, "acme")


@pytest.mark.parametrize("name", ["fingerprint", "at", "by", "reason"])
def test_an_entry_with_a_value_of_another_type_is_damaged(filled: str, name: str) -> None:
    entry = {**asdict(promote(filled, "acme", OLD.fingerprint)), "version": 2, name: 5}
    open_storage(filled).put("served/acme/0000000002.json", json.dumps(entry).encode())
    with pytest.raises(StoreError, match="another type"):
        served(filled, "acme")
