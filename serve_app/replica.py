"""The generator deployment: one model, one engine, one view of the store."""

import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from typing import Any

from c2kv_core.errors import C2KVError
from serve_app.caller import Caller
from serve_app.config import ServeConfig
from serve_app.errors import ApiError, fault_of
from serve_app.events import DoneEvent, ReplicaEvent, Reply, error_event
from serve_app.loading import load_service
from serve_app.metrics import RaySink, Recorder
from serve_app.protocol import AnyRequest, DocumentBody
from serve_app.serve_logs import log_with_serve


class Generator:
    """Makes answers. Serve routes to it only after ``__init__``, that is, with weights loaded and the store probed."""

    def __init__(self, config: ServeConfig) -> None:
        log_with_serve()
        self._recorder = Recorder(RaySink())
        self._service, self._engine = load_service(config, self._recorder)

    async def generate(self, request: AnyRequest, caller: Caller) -> AsyncGenerator[ReplicaEvent, None]:
        """The events of one request (see ``events``). Cancelling the call frees what it holds."""
        ended = False
        try:
            async with aclosing(self._service.answer(request, caller)) as events:
                async for event in events:
                    ended = event["event"] in ("end", "error")
                    self._recorder.event(event)
                    yield event
        finally:
            if not ended:
                self._recorder.left()
            self._service.record()

    async def put_document(self, caller: Caller, doc_id: str, body: DocumentBody) -> Reply:
        """See ``DocumentService.put``."""
        return await reply(self._service.documents.put(caller, doc_id, body))

    async def get_document(self, caller: Caller, doc_id: str) -> Reply:
        """See ``DocumentService.get``."""
        return await reply(self._service.documents.get(caller, doc_id))

    async def delete_document(self, caller: Caller, doc_id: str) -> Reply:
        """See ``DocumentService.delete``."""
        return await reply(self._service.documents.delete(caller, doc_id))

    def stats(self) -> dict[str, int]:
        """Requests this replica holds: ``running`` and ``queued``."""
        return dataclasses.asdict(self._engine.stats())

    def check_health(self) -> None:
        """Called by Serve every few seconds, off the model's thread; metrics of what is held go out with it.

        Raises:
            RuntimeError: a worker is dead or stuck; Serve replaces the replica.
        """
        self._service.record()
        fault = self._engine.fault() or self._service.documents.fault()
        if fault is not None:
            raise RuntimeError(f"no progress: {fault}")

    def __del__(self) -> None:
        """Called by Serve when a drained replica ends."""
        service = getattr(self, "_service", None)
        if service is not None:
            service.close()


async def reply(work: Awaitable[Mapping[str, Any]]) -> Reply:
    """The result, or the fault as a value: exceptions lose their form between processes."""
    try:
        return DoneEvent(event="done", result=dict(await work))
    except ApiError as error:
        return error_event(error.fault)
    except C2KVError as error:
        return error_event(fault_of(error))
