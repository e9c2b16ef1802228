"""The engine's contract: what a replica asks of whatever turns jobs into answers. No Ray here."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from serve_app.jobs import LAST, Event, Work


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What an engine holds now, and what became of the rest: all that were submitted are in exactly one field."""

    running: int
    """Requests that have a place."""
    queued: int
    """Requests that wait for one."""
    running_bytes: int
    """Memory set aside for the keys and values of those that run."""
    finished: int
    """Answers completed since the start."""
    failed: int
    """Answers that ended with a fault since the start."""
    cancelled: int
    """Answers given up by their clients since the start."""


class Ticket(Protocol):
    """A submitted job."""

    def cancel(self) -> None:
        """Give the answer up; its memory is free after at most one round. Repeating it, or after the end, is fine."""


class Engine(Protocol):
    """Makes answers, several at the same time. Every method may be called from any thread and returns at once."""

    def submit(self, job: Work, deliver: Callable[[Event], None]) -> Ticket:
        """Start a job when there is a place for it.

        Args:
            job: the answer to make, or the document to compress.
            deliver: gets the events in order, on a thread of the engine's; must not block.

        Raises:
            ApiError: 503, because too many wait already or the engine has stopped; 400, because no answer of this
                size ever fits.
        """
        ...

    def stats(self) -> EngineStats:
        """What it holds now."""
        ...

    def fault(self) -> str | None:
        """Why it makes no progress; None while it is well."""
        ...

    def close(self) -> None:
        """Stop. Jobs that are not finished fail."""
        ...


async def answer_events(engine: Engine, job: Work) -> AsyncGenerator[Event, None]:
    """A job's events on the running event loop. Leaving the iterator early, by whatever way, cancels the job.

    Raises:
        ApiError: as ``Engine.submit``.
    """
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Event] = asyncio.Queue()

    def deliver(event: Event) -> None:
        # The loop is closed when the process is going down; nobody waits for the event then.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(events.put_nowait, event)

    ticket = engine.submit(job, deliver)
    try:
        while True:
            event = await events.get()
            yield event
            if isinstance(event, LAST):
                return
    finally:
        ticket.cancel()
