"""The generator deployment: one model, one engine, one view of the store."""

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

from serve_app.config import ServeConfig
from serve_app.events import ReplicaEvent
from serve_app.loading import load_service
from serve_app.protocol import ChatRequest


class Generator:
    """Makes answers. Serve routes to it only after ``__init__``, that is, with weights loaded and the store probed."""

    def __init__(self, config: ServeConfig) -> None:
        self._service, self._engine = load_service(config)

    async def generate(self, request: ChatRequest) -> AsyncGenerator[ReplicaEvent, None]:
        """The events of one request (see ``events``). Cancelling the call frees what it holds."""
        async with aclosing(self._service.answer(request)) as events:
            async for event in events:
                yield event

    def stats(self) -> dict[str, int]:
        """Requests this replica holds: ``running`` and ``queued``."""
        return dataclasses.asdict(self._engine.stats())

    def check_health(self) -> None:
        """Called by Serve every few seconds, off the model's thread.

        Raises:
            RuntimeError: the worker is dead or stuck; Serve replaces the replica.
        """
        fault = self._engine.fault()
        if fault is not None:
            raise RuntimeError(f"the engine makes no progress: {fault}")

    def __del__(self) -> None:
        """Called by Serve when a drained replica ends."""
        service = getattr(self, "_service", None)
        if service is not None:
            service.close()
