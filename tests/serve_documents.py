"""Where documents come from: memory, store, extraction, ordinary text; and what happens when one cannot be had."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from c2kv_core.compose import compose
from c2kv_core.document import SourceDocument
from c2kv_core.text import ChatRenderer
from serve_app.loading import load_service
from serve_app.service import ChatService
from tests.serve_support import DOCUMENTS, RATIO, Reference, World, ask, put_documents

pytest_plugins = ["tests.serve_support"]

INLINE = {"title": "The elm", "text": "The elm is a tree of the north; it is tall, too."}


@pytest.fixture
def own_world(world: World, tmp_path: Path) -> World:
    """A copy of the store that a test may damage."""
    shutil.copytree(world.store, tmp_path / "store")
    return dataclasses.replace(world, store=str(tmp_path / "store"))


@pytest.fixture
def serve(own_world: World) -> Iterator[Callable[..., ChatService]]:
    made: list[ChatService] = []

    def make(**changes: Any) -> ChatService:
        service, _ = load_service(own_world.config(**changes))
        made.append(service)
        return service

    yield make
    for service in made:
        service.close()


def damage(world: World, doc_id: str) -> None:
    """Flip one bit in the middle of a document's keys and values."""
    (row,) = [r for r in world.open_store().rows() if r.doc_id == doc_id]
    shard = Path(world.store) / row.shard
    content = bytearray(shard.read_bytes())
    content[row.offset + (row.head_length + row.length) // 2] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)


def test_first_use_reads_the_store_and_the_second_memory(service: ChatService) -> None:
    first, second = ask(service, ["oak"]), ask(service, ["oak"])
    assert [d["tier"] for d in first.documents + second.documents] == ["store", "memory"]
    assert first.text == second.text
    assert first.end["usage"] == second.end["usage"]


def test_memory_that_holds_nothing_changes_only_the_tier(world: World) -> None:
    service, _ = load_service(world.config(memory_cache_bytes=0))
    answers = [ask(service, ["oak"]) for _ in range(2)]
    service.close()
    assert [a.documents[0]["tier"] for a in answers] == ["store", "store"]
    assert answers[0].text == answers[1].text


def test_report_and_usage_count_source_tokens(service: ChatService, world: World) -> None:
    answer = ask(service, ["oak", "birch"])
    compressor = world.compressor
    for report, doc_id in zip(answer.documents, ["oak", "birch"], strict=True):
        stored = world.open_store().get([doc_id], namespace="default")[doc_id]
        expected = (doc_id, RATIO, stored.num_slots, stored.num_tokens, stored.kv_bytes, None)  # type: ignore[union-attr]
        names = ("id", "ratio", "slots", "source_tokens", "bytes", "fallback_reason")
        assert tuple(report[n] for n in names) == expected
    documents = sum(d["source_tokens"] for d in answer.documents)
    around = len(compressor.renderer.prefix_ids(None))
    around += len(compressor.renderer.question_ids([{"role": "user", "content": "How tall is the oak?"}]))
    usage = answer.end["usage"]
    assert usage["prompt_tokens"] == around + documents
    assert usage["prompt_tokens_details"] == {"cached_tokens": documents}
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_document_given_in_full_is_extracted_once(
    service: ChatService, world: World, reference: Reference
) -> None:
    first, second = ask(service, [INLINE]), ask(service, [INLINE])
    assert [d["tier"] for d in first.documents + second.documents] == ["extracted", "memory"]
    assert first.documents[0]["id"] is None and first.documents[0]["fallback_reason"] is None
    assert first.end["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    compressor = world.compressor
    ((parts),) = compressor.compress([compressor.part_ids(INLINE["title"], INLINE["text"])])[RATIO]
    expected = reference.answer(compose(compressor.model, reference.prefix(), parts))
    assert first.text == second.text == expected


def test_text_equal_to_a_stored_document_shares_its_slots(service: ChatService) -> None:
    stored = ask(service, ["oak"])
    source = DOCUMENTS["oak"]
    given = ask(service, [{"title": source.title, "text": source.text}])
    assert given.documents[0]["tier"] == "memory"
    assert given.text == stored.text


def test_long_document_of_several_parts_is_one_document(service: ChatService, reference: Reference) -> None:
    answer = ask(service, ["long", "oak"])
    assert [d["id"] for d in answer.documents] == ["long", "oak"]
    stored = reference.world.open_store().get(["long"], namespace="default")["long"]
    assert len(stored.parts) > 1  # type: ignore[union-attr]
    assert answer.documents[0]["slots"] == stored.num_slots  # type: ignore[union-attr]
    assert answer.text == reference.answer(reference.slots("long", "oak"))


@pytest.mark.parametrize("text", ["", "  \n"])
def test_empty_document_takes_no_place_and_says_so(service: ChatService, text: str) -> None:
    answer = ask(service, ["oak", {"text": text}])
    empty = answer.documents[1]
    assert (empty["tier"], empty["fallback_reason"]) == ("skipped", "empty_document")
    assert (empty["slots"], empty["source_tokens"], empty["bytes"]) == (0, 0, 0)
    assert answer.text == ask(service, ["oak"]).text


@pytest.mark.parametrize("on_missing", ["extract", "text", "error"])
def test_unknown_id_is_named(service: ChatService, on_missing: str) -> None:
    fault = ask(service, ["oak", "elm"], c2kv={"on_missing": on_missing}).fault
    assert (fault["status"], fault["code"], fault["param"]) == (404, "document_not_found", "documents.1.id")
    assert "'elm'" in fault["message"]


@pytest.mark.parametrize("on_missing", ["extract", "text"])
def test_text_no_context_can_hold_is_refused_after_a_bounded_look(
    service: ChatService, monkeypatch: pytest.MonkeyPatch, on_missing: str
) -> None:
    encoded: list[int] = []
    offsets = ChatRenderer.offsets

    def counted(renderer: ChatRenderer, text: str) -> list[tuple[int, int]]:
        encoded.append(len(text))
        return offsets(renderer, text)

    monkeypatch.setattr(ChatRenderer, "offsets", counted)
    text = "The oak is tall. " * 200_000
    for request in (
        {"documents": [{"text": text}]},
        {"documents": [], "messages": [{"role": "user", "content": text}]},
    ):
        encoded.clear()
        failed = ask(service, **request, c2kv={"on_missing": on_missing})
        assert failed.fault["code"] == "context_length_exceeded" and "positions" in failed.fault["message"]
        assert sum(encoded) < len(text) / 10


def test_unknown_id_is_left_out_on_request_only(service: ChatService) -> None:
    answer = ask(service, ["oak", "elm"], c2kv={"on_missing": "skip"})
    assert (answer.documents[1]["tier"], answer.documents[1]["fallback_reason"]) == ("skipped", "not_found")
    assert answer.text == ask(service, ["oak"]).text


def test_another_namespaces_document_reads_as_unknown(
    own_world: World, serve: Callable[..., ChatService]
) -> None:
    fault = ask(serve(namespace="other"), ["oak"]).fault
    assert fault["message"].replace("oak", "X") == ask(serve(), ["elm"]).fault["message"].replace("elm", "X")


@pytest.mark.faults
def test_damaged_record_is_extracted_again_from_its_text(
    own_world: World, serve: Callable[..., ChatService], service: ChatService
) -> None:
    damage(own_world, "oak")
    answer = ask(serve(), ["oak", "birch"])
    assert [d["tier"] for d in answer.documents] == ["extracted", "store"]
    assert answer.documents[0]["fallback_reason"].startswith("damaged")
    assert answer.text == ask(service, ["oak", "birch"]).text


@pytest.mark.faults
def test_damaged_record_follows_on_missing(own_world: World, serve: Callable[..., ChatService]) -> None:
    damage(own_world, "oak")
    damaged = serve()
    assert ask(damaged, ["oak"], c2kv={"on_missing": "text"}).documents[0]["tier"] == "text"
    assert ask(damaged, ["oak"], c2kv={"on_missing": "skip"}).documents[0]["tier"] == "skipped"
    fault = ask(damaged, ["oak"], c2kv={"on_missing": "error"}).fault
    assert fault["status"] == 404 and "'oak'" in fault["message"] and "damaged" in fault["message"]


@pytest.mark.faults
def test_damaged_record_without_text_is_named(own_world: World, serve: Callable[..., ChatService]) -> None:
    damage(own_world, "naked")
    fault = ask(serve(), ["naked"]).fault
    assert fault["code"] == "document_not_found" and "text is not stored" in fault["message"]


@pytest.mark.faults
def test_lost_shard_degrades_only_its_documents(own_world: World, serve: Callable[..., ChatService]) -> None:
    store = own_world.open_store()
    put_documents(own_world, store, [SourceDocument("new", "New", "A new tree stands in the north.")])
    (row,) = [r for r in store.rows() if r.doc_id == "new"]
    (Path(own_world.store) / row.shard).unlink()
    answer = ask(serve(), ["new", "oak"])
    assert [(d["tier"], d["fallback_reason"]) for d in answer.documents] == [
        ("extracted", "missing_shard"),
        ("store", None),
    ]


@pytest.mark.faults
def test_damage_after_first_use_never_reaches_the_model(
    own_world: World, serve: Callable[..., ChatService]
) -> None:
    used = serve()
    before = ask(used, ["oak"])
    (row,) = [r for r in own_world.open_store().rows() if r.doc_id == "oak"]
    shard = Path(own_world.store) / row.shard
    shard.chmod(0o644)
    # In place, so that a map of the file would show it.
    with shard.open("r+b") as file:
        file.seek(row.offset + row.head_length)
        file.write(b"\x3f" * (row.length - row.head_length))
    after = ask(used, ["oak"])
    assert (after.documents[0]["tier"], after.text) == ("memory", before.text)


def test_text_sees_what_stands_before_it(reference: Reference, service: ChatService, world: World) -> None:
    # A document given in full is the same text in the same place as a stored one without slots.
    inline = {"title": DOCUMENTS["birch"].title, "text": DOCUMENTS["birch"].text}
    answer = ask(service, ["oak", inline, "ash"], c2kv={"on_missing": "text"})
    assert [d["tier"] for d in answer.documents] == ["store", "text", "store"]
    context = reference.text("birch", reference.slots("oak"))
    ash = world.open_store().get(["ash"], namespace="default")["ash"]
    context = compose(world.compressor.model, context, ash.parts)  # type: ignore[union-attr]
    assert answer.text == reference.answer(context)
    report = answer.documents[1]
    assert (report["ratio"], report["slots"]) == (None, 0)
    kv_bytes = context.cache.nbytes // context.cache.num_entries * report["source_tokens"]
    assert report["bytes"] == kv_bytes


def test_long_text_is_placed_in_chunks_without_a_trace(service: ChatService, reference: Reference) -> None:
    inline = {"title": DOCUMENTS["long"].title, "text": DOCUMENTS["long"].text}
    answer = ask(service, ["oak", inline], c2kv={"on_missing": "text"})
    assert answer.text == reference.answer(reference.text("long", reference.slots("oak")))


def test_replaced_document_is_never_served_stale(own_world: World, serve: Callable[..., ChatService]) -> None:
    service = serve()
    old = ask(service, ["oak"])
    put_documents(own_world, own_world.open_store(), [DOCUMENTS["birch"]._replace(doc_id="oak")])
    new = ask(service, ["oak"])
    assert new.documents[0]["source_tokens"] != old.documents[0]["source_tokens"]
    assert new.text == ask(service, ["birch"]).text


def test_deleted_document_is_gone_from_memory_too(
    own_world: World, serve: Callable[..., ChatService]
) -> None:
    service = serve()
    ask(service, ["oak"])
    own_world.open_store().delete(["oak"], namespace="default")
    assert ask(service, ["oak"]).fault["code"] == "document_not_found"
