"""The HTTP API over a service in this process: everything but Ray."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from serve_app.api import create_api
from serve_app.caller import Caller
from serve_app.config import ServeConfig
from serve_app.errors import ApiError
from serve_app.events import ReplicaEvent, fault_in
from serve_app.generator_client import DocumentAction
from serve_app.loading import load_service
from serve_app.protocol import AnyRequest, DocumentBody
from serve_app.replica import reply
from serve_app.service import ChatService
from serve_app.store_watch import StoreWatch
from tests.serve_support import free_port, wait_until


class LocalClient:
    """Implements ``GeneratorClient`` without processes in between."""

    def __init__(self, service: ChatService) -> None:
        self._service = service

    def events(self, request: AnyRequest, caller: Caller) -> AsyncGenerator[ReplicaEvent, None]:
        return self._service.answer(request, caller)

    async def document(
        self, action: DocumentAction, caller: Caller, doc_id: str, body: DocumentBody | None = None
    ) -> dict[str, Any]:
        method = getattr(self._service.documents, action)
        told = await reply(method(caller, doc_id) if body is None else method(caller, doc_id, body))
        if told["event"] == "error":
            raise ApiError(fault_in(told))
        return told["result"]

    async def faults(self) -> list[str]:
        return []


@contextmanager
def local_api(config: ServeConfig) -> Iterator[FastAPI]:
    """The application's routes over a fresh service."""
    service, _ = load_service(config)
    watch = StoreWatch(config.store, every_s=0.2, silence_s=2.0)
    try:
        yield create_api(config, LocalClient(service), watch)
    finally:
        watch.close()
        service.close()


@contextmanager
def over_http(api: FastAPI) -> Iterator[int]:
    """The application behind a real HTTP server; its port."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(api, host="127.0.0.1", port=port, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, what="the server")
        yield port
    finally:
        server.should_exit = True
        thread.join()


def send(api: FastAPI, method: str, path: str, body: Any = None, *, key: str | None = None) -> httpx.Response:
    """One request, from synchronous tests."""

    async def one() -> httpx.Response:
        async with client(api, key=key) as http:
            return await http.request(method, path, json=body)

    return asyncio.run(one())


def client(api: FastAPI, *, key: str | None = None, host: str = "127.0.0.1") -> httpx.AsyncClient:
    """A client at an address, with a key."""
    transport = httpx.ASGITransport(app=api, client=(host, 1234))
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers, timeout=60)
