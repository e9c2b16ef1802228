"""Going over from one identity to another while requests are answered: no restart, and no answer of two identities."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from c2kv_core.compressor import Compressor
from c2kv_core.errors import IdentityError, StoreError
from c2kv_core.store import KVStore, Miss, promote, served
from c2kv_core.text import content_hash
from serve_app import edition as edition_module
from serve_app.caller import Caller
from serve_app.config import EditionConfig
from serve_app.edition import Edition
from serve_app.loading import load_service
from serve_app.probe import probe
from serve_app.protocol import DocumentBody
from serve_app.request_body import parse_request
from serve_app.service import ChatService
from tests.serve_support import DOCUMENTS, World, ask, ask_body, make_world, wait_until

pytest_plugins = ["tests.serve_support"]

OTHER_RATIO = 8


@pytest.fixture
def two(tmp_path: Path) -> World:
    """A world whose store holds the documents at two ratios."""
    world = make_world(tmp_path)
    compressor = other(world)
    store = KVStore.open(world.store, identity=compressor.identities[OTHER_RATIO])
    for source in DOCUMENTS.values():
        ((parts),) = compressor.compress([compressor.part_ids(source.title, source.text)])[OTHER_RATIO]
        store.put([compressor.stored("default", source, parts)])
    return world


def other(world: World) -> Compressor:
    return world.compressor.beside(replace(world.compressor.spec, ratios=(OTHER_RATIO,)))


def fingerprints(world: World) -> tuple[str, str]:
    (old,) = world.compressor.identities.values()
    (new,) = other(world).identities.values()
    return old.fingerprint, new.fingerprint


@pytest.fixture
def service(two: World) -> Iterator[ChatService]:
    made, _ = load_service(two.config(editions=(EditionConfig(ratio=OTHER_RATIO),)))
    yield made
    made.close()


def told(service: ChatService, **fields: Any) -> tuple[str, set[tuple[str, int | None]]]:
    """The fingerprint of an answer, and its documents' tiers and ratios."""
    block = ask(service, ["oak", "birch"], **fields).end["c2kv"]
    return block["fingerprint"], {(d["tier"], d["ratio"]) for d in block["documents"]}


def test_a_promotion_is_followed_and_can_be_taken_back(two: World, service: ChatService) -> None:
    old, new = fingerprints(two)
    assert told(service) == (old, {("store", 4)})
    promote(two.store, "default", new)
    wait_until(lambda: told(service)[0] == new, what="the new identity")
    assert told(service) == (new, {("memory", 8)})
    promote(two.store, "default", old)
    wait_until(lambda: told(service)[0] == old, what="the old identity")
    # Its slots have stayed in memory, apart from the other's.
    assert told(service) == (old, {("memory", 4)})


def test_answers_equal_those_of_a_server_of_that_identity_alone(two: World, service: ChatService) -> None:
    promote(two.store, "default", fingerprints(two)[1])
    wait_until(lambda: told(service)[0] == fingerprints(two)[1], what="the new identity")
    alone, _ = load_service(two.config(ratio=OTHER_RATIO))
    try:
        assert ask(service, ["oak", "ash"]).text == ask(alone, ["oak", "ash"]).text
    finally:
        alone.close()


def test_an_answer_that_has_begun_ends_on_the_identity_it_began_with(
    two: World, service: ChatService
) -> None:
    old, new = fingerprints(two)

    async def both() -> tuple[list[Any], list[Any]]:
        caller = Caller(name="anybody", namespace="default")
        begun = parse_request(
            json.dumps(ask_body(["oak", "birch"], max_tokens=200, ignore_eos=True)).encode()
        )
        events = service.answer(begun, caller)
        async with aclosing(events):
            first = [await anext(events)]
            promote(two.store, "default", new)
            later: list[Any] = []
            while not later or later[-1]["c2kv"]["fingerprint"] != new:
                async with aclosing(
                    service.answer(
                        parse_request(json.dumps(ask_body(["oak"], max_tokens=1)).encode()), caller
                    )
                ) as other_events:
                    later = [event async for event in other_events]
            return first + [event async for event in events], later

    first, later = asyncio.run(both())
    assert [e["c2kv"]["fingerprint"] for e in first if "c2kv" in e] == [old, old]
    assert {d["ratio"] for d in first[-1]["c2kv"]["documents"]} == {4}
    assert {d["ratio"] for d in later[-1]["c2kv"]["documents"]} == {8}


def test_a_document_put_meanwhile_is_there_under_each_identity(two: World, service: ChatService) -> None:
    old, new = fingerprints(two)
    caller = Caller(name="anybody", namespace="default", roles=frozenset({"query", "write"}))
    body = DocumentBody(title="The oak", text="The oak was felled.")
    asyncio.run(service.documents.put(caller, "oak", body))
    rows = [row for row in KVStore.open(two.store).rows() if row.doc_id == "oak"]
    assert {row.fingerprint for row in rows} == {old, new}
    assert len({row.content_hash for row in rows}) == 1
    promote(two.store, "default", new)
    wait_until(lambda: told(service)[0] == new, what="the new identity")
    assert asyncio.run(service.documents.get(caller, "oak"))["ratio"] == OTHER_RATIO
    asyncio.run(service.documents.delete(caller, "oak"))
    for edition in service._editions.all:
        assert isinstance(edition.store.lookup(["oak"], namespace="default")["oak"], Miss)


def test_a_deleted_document_is_gone_at_once_under_each_identity(two: World) -> None:
    """Although each reads the index through a view of its own, of up to ``index_refresh_s``."""
    promote(two.store, "default", fingerprints(two)[1])
    service, _ = load_service(two.config(editions=(EditionConfig(ratio=OTHER_RATIO),), index_refresh_s=600))
    assert told(service)[0] == fingerprints(two)[1]
    asyncio.run(service.documents.delete(Caller(name="anybody", namespace="default"), "oak"))
    assert ask(service, ["oak"]).fault["code"] == "document_not_found"
    service.close()


def test_puts_of_one_id_come_in_the_same_order_under_each_identity(
    service: ChatService, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(name="anybody", namespace="default")
    compress = service.documents._compress
    waits, goes_on = asyncio.Event(), asyncio.Event()

    async def slow_for_the_first(edition: Edition, ids: Any, deadline_s: float) -> Any:
        parts = await compress(edition, ids, deadline_s)
        if edition is service._editions.all[0] and not waits.is_set():
            waits.set()
            await goes_on.wait()
        return parts

    monkeypatch.setattr(service.documents, "_compress", slow_for_the_first)

    async def put_two() -> None:
        first = asyncio.create_task(service.documents.put(caller, "elm", DocumentBody(text="An elm.")))
        await waits.wait()
        await service.documents.put(caller, "elm", DocumentBody(text="Another elm."))
        goes_on.set()
        await first
        waits.clear()
        goes_on.clear()
        left = asyncio.create_task(service.documents.put(caller, "elm", DocumentBody(text="A third elm.")))
        await waits.wait()
        left.cancel()  # half way: written under no identity, rather than under one
        await asyncio.wait([left])

    asyncio.run(put_two())
    rows = [edition.store.lookup(["elm"], namespace="default")["elm"] for edition in service._editions.all]
    assert {getattr(row, "content_hash", None) for row in rows} == {content_hash("", "An elm.")}


def test_the_asked_ratio_must_be_the_served_one(two: World, service: ChatService) -> None:
    assert told(service, c2kv={"ratio": 4})[0] == fingerprints(two)[0]
    promote(two.store, "default", fingerprints(two)[1])
    wait_until(lambda: told(service)[0] == fingerprints(two)[1], what="the new identity")
    assert ask(service, [], c2kv={"ratio": 4}).fault["code"] == "ratio_not_served"
    assert told(service, c2kv={"ratio": 8})[0] == fingerprints(two)[1]


def test_an_identity_the_server_does_not_have_is_not_followed(
    two: World, service: ChatService, caplog: pytest.LogCaptureFixture
) -> None:
    old, _ = fingerprints(two)
    third = two.compressor.beside(replace(two.compressor.spec, ratios=(2,)))
    source = DOCUMENTS["oak"]
    ((parts),) = third.compress([third.part_ids(source.title, source.text)])[2]
    KVStore.open(two.store, identity=third.identities[2]).put([third.stored("default", source, parts)])
    promote(two.store, "default", third.identities[2].fingerprint)
    wait_until(lambda: told(service)[0] == old and "none of this server" in caplog.text, what="the remark")
    assert told(service)[0] == old
    config = two.config(editions=(EditionConfig(ratio=OTHER_RATIO),))
    assert any("add it to editions" in remark for remark in probe(config).remarks(config))
    with pytest.raises(IdentityError, match="two editions have the same identity"):
        probe(two.config(editions=(EditionConfig(),)))


def test_a_fresh_replica_waits_for_a_slow_store_to_say_what_is_served(
    two: World, service: ChatService, monkeypatch: pytest.MonkeyPatch
) -> None:
    promote(two.store, "default", fingerprints(two)[1])

    def slow(uri: str, namespace: str) -> Any:
        time.sleep(0.8)
        return served(uri, namespace)

    monkeypatch.setattr(edition_module, "served", slow)
    assert told(service)[0] == fingerprints(two)[1]


def test_the_first_request_of_a_quiet_namespace_follows_a_promotion(two: World, service: ChatService) -> None:
    """However long ago it was: nobody asked since, so nobody has looked."""
    old, new = fingerprints(two)
    for fingerprint in (old, new, old):
        promote(two.store, "default", fingerprint)
        assert told(service)[0] == fingerprint


def test_a_look_that_is_hardly_due_holds_no_request(
    two: World, service: ChatService, monkeypatch: pytest.MonkeyPatch
) -> None:
    editions = service._editions
    assert editions.of("default") is editions.all[0]
    monkeypatch.setattr(editions, "_refresh_s", 60)
    monkeypatch.setattr(editions, "_patience_s", 3600)
    editions._pointers["default"].looked_s -= 61
    promote(two.store, "default", fingerprints(two)[1])
    goes_on = threading.Event()

    def slow(uri: str, namespace: str) -> Any:
        goes_on.wait(20)
        return served(uri, namespace)

    monkeypatch.setattr(edition_module, "served", slow)
    assert editions.of("default") is editions.all[0]
    assert editions._pointers["default"].looking is not None
    goes_on.set()
    wait_until(lambda: editions.of("default") is editions.all[1], what="the new identity")


def test_a_store_that_does_not_answer_changes_nothing(
    two: World, service: ChatService, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = fingerprints(two)
    assert told(service)[0] == old
    editions = service._editions
    monkeypatch.setattr(editions, "_patience_s", 0.3)
    answered = threading.Event()

    def silent(uri: str, namespace: str) -> None:
        answered.wait(20)
        raise StoreError("cannot list served/: it does not answer")

    monkeypatch.setattr(edition_module, "served", silent)
    assert told(service)[0] == old
    # It has been waited for until the same moment by all, which is past.
    monkeypatch.setattr(editions, "_patience_s", 3600)
    pointer = editions._pointers["default"]
    pointer.began_s -= 3601
    look = pointer.looking
    assert [told(service)[0] for _ in range(2)] == [old] * 2
    assert look is not None and pointer.looking is look
    answered.set()
    monkeypatch.undo()
    promote(two.store, "default", new)
    wait_until(lambda: told(service)[0] == new, what="the new identity")


def test_a_store_that_fails_holds_one_request_and_not_each(
    two: World, service: ChatService, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = fingerprints(two)
    editions = service._editions
    goes_on = threading.Event()

    def failing(uri: str, namespace: str) -> None:
        goes_on.wait(20)
        raise StoreError("cannot list served/: it does not answer")

    goes_on.set()
    monkeypatch.setattr(edition_module, "served", failing)
    editions.of("default")  # waits, and learns that the store fails
    wait_until(lambda: editions._pointers["default"].looking is None, what="the end of the look")
    goes_on.clear()
    monkeypatch.setattr(editions, "_patience_s", 3600)
    assert [told(service)[0] for _ in range(3)] == [old] * 3
    assert editions._pointers["default"].looking is not None
    goes_on.set()
    monkeypatch.undo()
    promote(two.store, "default", new)
    wait_until(lambda: told(service)[0] == new, what="the new identity")
