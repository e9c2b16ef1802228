"""Documents put, looked at and deleted by clients."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI

from c2kv_core.compressor import Compressor
from c2kv_core.errors import StoreError
from c2kv_core.store import KVStore
from c2kv_core.text import content_hash
from serve_app.caller import Caller
from serve_app.document_writer import DocumentWriter
from serve_app.loading import load_service
from serve_app.protocol import DocumentBody
from serve_app.service import ChatService
from tests.serve_local import client, local_api, send
from tests.serve_support import QUESTION, RATIO, Answer, World, ask_body, collect, make_world, wait_until

pytest_plugins = ["tests.serve_support"]

TEXT = "Larix gamma is a larch. Its needles fall in autumn, and it burns well."
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("puts"))


@pytest.fixture(scope="module")
def api(own: World) -> Iterator[FastAPI]:
    with local_api(own.config(max_document_tokens=2000)) as made:
        yield made


def call(api: FastAPI, method: str, doc_id: str, body: Any = None) -> httpx.Response:
    return send(api, method, f"/v1/documents/{quote(doc_id, safe='')}", body)


def ask(api: FastAPI, doc_ids: list[Any], **fields: Any) -> httpx.Response:
    return send(api, "POST", CHAT, ask_body(doc_ids, **fields))


@pytest.mark.parametrize("doc_id", ["larch", "trees/larch #1?", "Lärche ü", "a" * 1000])
def test_a_document_is_put_asked_about_and_deleted(api: FastAPI, own: World, doc_id: str) -> None:
    body = {"title": "The larch", "text": TEXT}
    put = call(api, "PUT", doc_id, body)
    assert put.status_code == 200, put.text
    status = put.json()
    assert (status["id"], status["object"], status["title"]) == (doc_id, "document", "The larch")
    assert status["content_hash"] == content_hash("The larch", TEXT)
    assert call(api, "GET", doc_id).json() == status
    answer = ask(api, [doc_id, "oak"]).json()
    assert [d["tier"] for d in answer["c2kv"]["documents"]] == ["memory", "store"] or doc_id != "larch"
    given = ask(api, [body, "oak"]).json()
    assert answer["choices"] == given["choices"]
    # Another reader of the store finds it too, whole.
    stored = own.open_store().get([doc_id], namespace="default")[doc_id]
    assert stored.num_tokens == status["source_tokens"]  # type: ignore[union-attr]
    assert own.open_store().text([doc_id], namespace="default")[doc_id].text == TEXT
    deleted = call(api, "DELETE", doc_id)
    assert deleted.json() == {"id": doc_id, "object": "document", "deleted": True}
    for response in (call(api, "GET", doc_id), call(api, "DELETE", doc_id), ask(api, [doc_id])):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "document_not_found")
    assert own.open_store().text([doc_id], namespace="default") == {}


def test_what_extraction_carried_along_with_a_document_is_told(own: World, api: FastAPI) -> None:
    text = own.open_store().text(["ash"], namespace="default")["ash"]
    assert "metadata" not in call(api, "GET", "ash").json()
    own.open_store().put([], texts=[replace(text, metadata='{"year": 1987}')])
    assert call(api, "GET", "ash").json()["metadata"] == {"year": 1987}


@pytest.mark.parametrize("path", ["/v1/documents", "/v1/documents/"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_there_is_no_list_of_documents(api: FastAPI, method: str, path: str) -> None:
    answer = send(api, method, path, {"text": "x"})
    assert answer.status_code == 404 and "/v1/documents/{id}" in answer.json()["error"]["message"]


def test_the_same_again_is_left_alone_and_a_change_replaces_it(api: FastAPI, own: World) -> None:
    first = call(api, "PUT", "fir", {"text": "A fir."}).json()
    assert call(api, "PUT", "fir", {"text": "A fir."}).json() == first
    second = call(api, "PUT", "fir", {"text": "A fir is an evergreen tree."}).json()
    assert second["content_hash"] != first["content_hash"]
    assert call(api, "GET", "fir").json() == second
    rows = [row for row in own.open_store().rows() if row.doc_id == "fir"]
    assert [row.content_hash for row in rows] == [second["content_hash"]]


def test_documents_put_at_the_same_time_share_commits(api: FastAPI, own: World) -> None:
    async def put_all() -> list[httpx.Response]:
        async with client(api) as http:
            return await asyncio.gather(
                *(
                    http.put(f"/v1/documents/tree-{n % 20}", json={"text": f"Tree number {n}."})
                    for n in range(24)
                )
            )

    versions = len(list(Path(own.store, "index/_delta_log").glob("*.json")))
    assert {response.status_code for response in asyncio.run(put_all())} == {200}
    after = len(list(Path(own.store, "index/_delta_log").glob("*.json")))
    assert after - versions < 12
    rows = [row for row in own.open_store().rows() if row.doc_id.startswith("tree-")]
    assert len(rows) == 20


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"title": "no text"}, 400, "invalid_request"),
        ({"text": ""}, 400, "invalid_request"),
        ({"text": "  \n "}, 400, "invalid_request"),
        ({"text": "a", "titel": "b"}, 400, "unknown_parameter"),
        ([], 400, "invalid_json"),
        ({"text": "word " * 2500}, 413, "document_too_long"),
        ({"text": "word " * 200_000}, 413, "document_too_long"),
    ],
)
def test_what_cannot_be_stored_is_refused(api: FastAPI, body: Any, status: int, code: str) -> None:
    refused = call(api, "PUT", "bad", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), refused.text
    assert call(api, "GET", "bad").status_code == 404


def test_a_document_longer_than_the_models_positions_can_be_stored_and_not_asked_about(own: World) -> None:
    with local_api(own.config(max_document_tokens=100_000)) as api:
        put = call(api, "PUT", "novel", {"text": "The oak is tall, said the system. " * 900})
        assert put.status_code == 200, put.text
        assert put.json()["parts"] > 1
        refused = ask(api, ["novel"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_store_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    with local_api(world.config()) as api:
        Path(world.store, "index/_delta_log").rename(tmp_path / "away")
        refused = call(api, "PUT", "new", {"text": "Text."})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert refused.headers["retry-after"] and world.store not in refused.text
        (tmp_path / "away").rename(Path(world.store, "index/_delta_log"))
        assert call(api, "PUT", "new", {"text": "Text."}).status_code == 200
        assert ask(api, ["new"], messages=[{"role": "user", "content": QUESTION}]).status_code == 200
    assert KVStore.open(world.store).verify().ok


def test_a_client_that_leaves_while_its_document_is_removed_ends_no_writing(own: World) -> None:
    service, _ = load_service(own.config())
    caller = Caller(name="anybody", namespace="default")
    store = service._editions.all[0].store
    begun, goes_on, real = threading.Event(), threading.Event(), store.delete

    def slow(*args: Any, **options: Any) -> int:
        begun.set()
        goes_on.wait(60)
        return real(*args, **options)

    store.delete = slow  # type: ignore[method-assign]

    async def leave() -> None:
        deleting = [asyncio.create_task(service.documents.delete(caller, name)) for name in ("ash", "oak")]
        while not begun.is_set():
            await asyncio.sleep(0.01)
        for one in deleting:  # the second has not begun
            one.cancel()
        await asyncio.wait(deleting)
        goes_on.set()
        await service.documents.put(caller, "yew", DocumentBody(text="A yew."))

    asyncio.run(leave())
    assert service.documents.fault() is None
    service.close()


def test_an_unforeseen_failure_of_one_write_is_its_own(own: World, monkeypatch: pytest.MonkeyPatch) -> None:
    service, _ = load_service(own.config())
    caller = Caller(name="anybody", namespace="default")

    def fails(*args: Any, **options: Any) -> list[Any]:
        raise RuntimeError("secret path")

    monkeypatch.setattr(KVStore, "put", fails)
    with pytest.raises(StoreError, match="see the server's log"):
        asyncio.run(service.documents.put(caller, "yew", DocumentBody(text="A tall yew.")))
    monkeypatch.undo()
    assert asyncio.run(service.documents.put(caller, "yew", DocumentBody(text="A tall yew.")))["id"] == "yew"
    service.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_writer_is_a_fault_and_fails_what_it_had(own: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unforeseen(Exception):
        pass

    begun, goes_on = threading.Event(), threading.Event()

    def dies(*args: Any, **options: Any) -> int:
        begun.set()
        goes_on.wait(60)
        raise Unforeseen

    store = own.open_store()
    monkeypatch.setattr(KVStore, "delete", dies)
    writer = DocumentWriter(gather_s=0, max_documents=1)
    writer.delete(store, "default", "a")
    begun.wait(60)
    waiting = writer.delete(store, "default", "b")
    goes_on.set()
    with pytest.raises(StoreError, match="stopping"):
        waiting.result(60)
    wait_until(lambda: writer.fault() is not None, what="the fault")
    with pytest.raises(StoreError, match="stopping"):
        writer.delete(store, "default", "c").result(60)


def test_looking_at_documents_of_a_store_that_hangs_keeps_no_answer_waiting(own: World) -> None:
    service, _ = load_service(own.config(fetch_threads=1, max_request_s=30))
    store, answered = service._editions.all[0].store, threading.Event()
    real = store.text

    def hangs(*args: Any, **options: Any) -> Any:
        answered.wait(60)
        return real(*args, **options)

    store.text = hangs  # type: ignore[method-assign]

    async def both() -> Answer:
        caller = Caller(name="anybody", namespace="default")
        looking = asyncio.create_task(service.documents.get(caller, "birch"))
        await asyncio.sleep(0)
        answer = await collect(service, ask_body([{"text": "An alder."}]))
        answered.set()
        assert (await looking)["id"] == "birch"
        return answer

    assert asyncio.run(both()).text
    service.close()


@pytest.mark.parametrize("quantisation", ["none", "int8"])
def test_a_documents_slots_are_the_same_wherever_they_come_from(
    own: World, tmp_path: Path, quantisation: str
) -> None:
    config = replace(own, store=str(tmp_path / "store")).config(quantisation=quantisation)
    identity = Compressor.load(config.compressor_spec()).identities[RATIO]
    KVStore.open(config.store, identity=identity, create=True)
    document = {"title": "The larch", "text": TEXT * 20}

    def answer(service: ChatService, source: str | dict[str, Any]) -> tuple[str, list[float]]:
        told = asyncio.run(collect(service, ask_body([source], logprobs=True, max_tokens=12)))
        tokens = [token for event in told.events if event["event"] == "text" for token in event["logprobs"]]
        return told.documents[0]["tier"], [token["logprob"] for token in tokens]

    found = {}
    service, _ = load_service(config)
    asyncio.run(service.documents.put(config.anybody(), "larch", DocumentBody(**document)))
    found["put"] = answer(service, "larch")
    service.close()
    service, _ = load_service(config)
    found["read"] = answer(service, "larch")
    service.close()
    service, _ = load_service(config)
    found["given"] = answer(service, document)
    found["kept"] = answer(service, document)
    service.close()
    assert [tier for tier, _ in found.values()] == ["memory", "store", "extracted", "memory"]
    assert all(logprobs == found["read"][1] for _, logprobs in found.values()), found
