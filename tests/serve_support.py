"""What the serving tests share: a tiny model, a store made by the shipped code, a reference answer by plain calls."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from c2kv_core import load_base
from c2kv_core.compose import ComposedContext, compose, prefill
from c2kv_core.compressor import Compressor
from c2kv_core.document import SourceDocument
from c2kv_core.generate import generate
from c2kv_core.sampling import SamplingParams
from c2kv_core.store import KVStore, SourceText
from c2kv_core.text import Message
from serve_app.config import ServeConfig
from serve_app.events import ReplicaEvent
from serve_app.launch import Running, start
from serve_app.loading import load_service
from serve_app.request_body import parse_request
from serve_app.service import ChatService
from tests.core_head_slots import shared_sidecar
from tests.tiny_models import save_tiny_model

RATIO = 4
DOCUMENTS = {
    "oak": SourceDocument("oak", "The oak", "Quercus alpha is an oak. It is tall, and grows slowly. " * 3),
    "birch": SourceDocument(
        "birch", "The birch", "Betula beta is a birch; its bark is white. It grows north."
    ),
    "ash": SourceDocument("ash", "", "The ash has grey bark and long leaves, said the system."),
    "naked": SourceDocument("naked", "No text kept", "Nobody kept the text of this document."),
    "long": SourceDocument("long", "A long one", "The oak is tall. The birch is white. " * 260),
}
WITHOUT_TEXT = ("naked",)
QUESTION = "How tall is the oak?"


@dataclass(frozen=True, kw_only=True)
class World:
    """A model directory and a store that holds ``DOCUMENTS``."""

    model: str
    store: str
    sidecar: str | None = None

    def config(self, **changes: Any) -> ServeConfig:
        """A configuration that serves it."""
        fields: dict[str, Any] = {
            "model": self.model,
            "served_model_name": "tiny",
            "store": self.store,
            "sidecar": self.sidecar,
            "ratio": RATIO,
            "index_refresh_s": 0,
            "default_max_new_tokens": 8,
        }
        return ServeConfig(**{**fields, **changes})

    @cached_property
    def compressor(self) -> Compressor:
        """The model and sidecar, loaded apart from the service."""
        return Compressor.load(self.config().compressor_spec())

    def open_store(self) -> KVStore:
        """The store under the served identity."""
        return KVStore.open(self.store, identity=self.compressor.identities[RATIO])


def make_world(folder: Path, *, shared_heads: bool = False) -> World:
    """Save a tiny model, compress ``DOCUMENTS`` and store them; untrained, or with heads that share slots out."""
    model = save_tiny_model(folder / "model")
    sidecar = folder / "sidecar" if shared_heads else None
    if sidecar is not None:
        shared_sidecar(load_base(str(model), dtype=torch.float32)[0]).save(sidecar)
    world = World(
        model=str(model), store=str(folder / "store"), sidecar=None if sidecar is None else str(sidecar)
    )
    identity = world.compressor.identities[RATIO]
    store = KVStore.open(world.store, identity=identity, create=True)
    put_documents(world, store, DOCUMENTS.values())
    return world


def put_documents(world: World, store: KVStore, sources: Sequence[SourceDocument] | Any) -> None:
    """Compress and store; texts are kept except for ``WITHOUT_TEXT``."""
    compressor = world.compressor
    stored, texts = [], []
    for source in sources:
        ids = compressor.part_ids(source.title, source.text)
        ((parts),) = compressor.compress([ids])[RATIO]
        document = compressor.stored("default", source, parts)
        stored.append(document)
        if source.doc_id not in WITHOUT_TEXT:
            texts.append(
                SourceText(
                    namespace="default",
                    doc_id=source.doc_id,
                    title=source.title,
                    text=source.text,
                    content_hash=document.content_hash,
                )
            )
    store.put(stored, texts=texts)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The answer that plain calls give, without any of the serving code."""

    world: World

    def slots(self, *doc_ids: str) -> ComposedContext:
        """Default system message and stored documents."""
        compressor = self.world.compressor
        found = self.world.open_store().get(doc_ids, namespace="default")
        parts = [part for doc_id in doc_ids for part in found[doc_id].parts]  # type: ignore[union-attr]
        return compose(compressor.model, self.prefix(), parts)

    def prefix(self, system: str | None = None) -> ComposedContext:
        """The system message alone."""
        compressor = self.world.compressor
        return prefill(compressor.model, compressor.renderer.prefix_ids(system))

    def text(self, doc_id: str, context: ComposedContext) -> ComposedContext:
        """A document as ordinary tokens behind a context."""
        compressor, source = self.world.compressor, DOCUMENTS[doc_id]
        ids = compressor.renderer.document_ids(source.title, source.text)
        return prefill(compressor.model, ids, context)

    def answer(
        self,
        context: ComposedContext,
        question: str | Sequence[Message] = QUESTION,
        *,
        tokens: int = 8,
        sampling: SamplingParams | None = None,
    ) -> str:
        """The answer's text."""
        compressor = self.world.compressor
        messages = [Message(role="user", content=question)] if isinstance(question, str) else question
        ids = generate(
            compressor.model,
            context,
            compressor.renderer.question_ids(messages),
            max_new_tokens=tokens,
            sampling=sampling,
        )
        return str(compressor.tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All events of one request."""

    events: list[ReplicaEvent]

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(event["text"] for event in self.events if event["event"] == "text")

    @property
    def end(self) -> dict[str, Any]:
        """The last event, which must not be a failure."""
        assert self.events[-1]["event"] == "end", self.events[-1]
        return dict(self.events[-1])

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The document reports."""
        reports: list[dict[str, Any]] = self.end["c2kv"]["documents"]
        return reports

    @property
    def fault(self) -> dict[str, Any]:
        """The failure."""
        assert self.events[-1]["event"] == "error", self.events[-1]
        return self.events[-1]["fault"]


def ask_body(documents: Sequence[str | dict[str, Any]] = (), **fields: Any) -> dict[str, Any]:
    """A request body: ids or whole document objects, and the usual question."""
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}]}
    if documents:
        body["documents"] = [{"id": d} if isinstance(d, str) else d for d in documents]
    return {**body, **fields}


async def collect(service: ChatService, body: dict[str, Any]) -> Answer:
    """Send a body through the service."""
    request = parse_request(json.dumps(body).encode())
    async with aclosing(service.answer(request)) as events:
        return Answer(events=[event async for event in events])


def ask(service: ChatService, documents: Sequence[str | dict[str, Any]] = (), **fields: Any) -> Answer:
    """``collect`` from synchronous tests."""
    return asyncio.run(collect(service, ask_body(documents, **fields)))


async def first_events(events: AsyncIterator[ReplicaEvent], count: int) -> list[ReplicaEvent]:
    """The first events of an answer that goes on."""
    return [await anext(events) for _ in range(count)]


def wait_until(condition: Callable[[], bool], *, what: str, timeout_s: float = 60.0) -> None:
    """Wait for something that other threads or processes bring about; the limit only ends a hang."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"still waiting for {what} after {timeout_s:.0f} s"
        time.sleep(0.02)


def free_port() -> int:
    """A free port outside the range in which Ray starts workers."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if not 10002 <= port <= 19999:
            return port


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Read only: tests that damage or change a store make their own with ``make_world``."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def reference(world: World) -> Reference:
    return Reference(world=world)


@pytest.fixture
def service(world: World) -> Iterator[ChatService]:
    """A service with nothing in memory yet."""
    made, _ = load_service(world.config())
    yield made
    made.close()


@pytest.fixture(scope="session")
def endpoint(ray_cluster: None, world: World) -> Iterator[Running]:
    """The application on a real Ray, with few places, so that tests can fill them."""
    running = start(
        world.config(max_running=2, max_ongoing_requests=2, max_queued_requests=2, max_request_bytes=64_000),
        port=free_port(),
    )
    yield running
    running.stop()
