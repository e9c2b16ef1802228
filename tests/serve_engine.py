"""The engine: turns, places, cancelling, deadlines, faults.

Where a real model adds nothing, turns are plain generators.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing

import pytest

from c2kv_core.errors import ContextLengthError
from c2kv_core.sampling import SamplingParams
from serve_app.engine import answer_events
from serve_app.errors import ApiError
from serve_app.jobs import Event, Failed, Finished, Job, Started, Text, Turns
from serve_app.loading import load_service
from serve_app.protocol import ChatRequest
from serve_app.turn_engine import TurnEngine
from tests.serve_support import World, ask, ask_body, collect, first_events, wait_until

pytest_plugins = ["tests.serve_support"]

DONE = Finished(reason="stop", completion_tokens=1)


def job(name: str = "", *, allowed_s: float = 600.0) -> Job:
    """A job whose only content is a name, carried in its stop strings."""
    return Job(
        prefix_ids=(),
        documents=(),
        question_ids=(1,),
        max_new_tokens=1,
        sampling=SamplingParams(),
        stop=(name,),
        deadline_s=time.monotonic() + allowed_s,
    )


class Inbox:
    """Gathers one job's events."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Finished | Failed):
            self.ended.set()

    def wait(self) -> list[Event]:
        assert self.ended.wait(60), "no end came"
        return self.events


@pytest.fixture
def start() -> Iterator[Callable[..., TurnEngine]]:
    engines: list[TurnEngine] = []

    def make(turns: Callable[[Job], Turns], **changes: float) -> TurnEngine:
        settings = {"max_running": 2, "max_waiting": 2, "stall_timeout_s": 60.0, "retry_after_s": 3}
        engines.append(TurnEngine(turns, **{**settings, **changes}))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


class Gate:
    """Turns that go on until the gate opens, then finish; knows who runs and who was freed."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.turns_taken: list[str] = []
        self.freed: list[str] = []

    def turns(self, job: Job) -> Turns:
        (name,) = job.stop
        return self._turns(name)

    def _turns(self, name: str) -> Turns:
        try:
            while not self.opened.is_set():
                self.turns_taken.append(name)
                time.sleep(0.001)
                yield None
            yield DONE
        finally:
            self.freed.append(name)


def test_running_requests_take_turns(start: Callable[..., TurnEngine]) -> None:
    order: list[str] = []

    def turns(job: Job) -> Turns:
        for _ in range(3):
            order.append(job.stop[0])
            yield None
        yield DONE

    engine = start(turns, max_running=2)
    inboxes = [Inbox(), Inbox()]
    # Both must wait when the worker looks, so that neither has a turn ahead of the other.
    with engine._changed:
        for name, inbox in zip("ab", inboxes, strict=True):
            engine.submit(job(name), inbox)
    for inbox in inboxes:
        inbox.wait()
    assert order == list("ababab")


def test_no_more_run_than_there_are_places(start: Callable[..., TurnEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=2, max_waiting=2)
    inboxes = {name: Inbox() for name in "abcd"}
    for name, inbox in inboxes.items():
        engine.submit(job(name), inbox)
    wait_until(lambda: engine.stats().running == 2, what="two running requests")
    assert engine.stats().queued == 2
    assert set(gate.turns_taken) <= {"a", "b"}
    gate.opened.set()
    for inbox in inboxes.values():
        assert inbox.wait() == [DONE]
    assert (engine.stats().running, engine.stats().queued, engine.stats().finished) == (0, 0, 4)


def test_requests_beyond_all_places_are_refused(start: Callable[..., TurnEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=1, max_waiting=1)
    kept = [Inbox(), Inbox()]
    for inbox in kept:
        engine.submit(job(), inbox)
    with pytest.raises(ApiError) as refused:
        engine.submit(job(), Inbox())
    fault = refused.value.fault
    assert (fault.status, fault.code, fault.headers) == (503, "overloaded", {"Retry-After": "3"})
    gate.opened.set()
    for inbox in kept:
        inbox.wait()
    engine.submit(job(), Inbox())  # there is room again


def test_cancelled_request_is_freed_and_its_place_given_away(start: Callable[..., TurnEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=1)
    ticket, waiting = engine.submit(job("a"), Inbox()), Inbox()
    engine.submit(job("b"), waiting)
    wait_until(lambda: "a" in gate.turns_taken, what="the first turn")
    ticket.cancel()
    ticket.cancel()
    wait_until(lambda: "b" in gate.turns_taken, what="the other's first turn")
    assert gate.freed == ["a"]
    gate.opened.set()
    assert waiting.wait() == [DONE]
    stats = engine.stats()
    assert (stats.running, stats.queued, stats.finished, stats.cancelled) == (0, 0, 1, 1)


def test_cancelled_request_that_waits_is_gone_at_once(start: Callable[..., TurnEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=1)
    engine.submit(job("a"), Inbox())
    wait_until(lambda: engine.stats().running == 1, what="a running request")
    engine.submit(job("b"), Inbox()).cancel()
    assert (engine.stats().queued, engine.stats().cancelled) == (0, 1)
    assert "b" not in gate.turns_taken
    gate.opened.set()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextLengthError("too long"), 400, "context_length_exceeded"),
        (RuntimeError("out of memory"), 500, "internal_error"),
        (KeyError("x"), 500, "internal_error"),
    ],
)
def test_failure_of_one_request_ends_only_that(
    start: Callable[..., TurnEngine], error: Exception, status: int, code: str
) -> None:
    def turns(job: Job) -> Turns:
        yield None
        if job.stop == ("bad",):
            raise error
        yield DONE

    engine = start(turns)
    bad, good = Inbox(), Inbox()
    engine.submit(job("bad"), bad)
    engine.submit(job("good"), good)
    (failed,) = bad.wait()
    assert isinstance(failed, Failed)
    assert (failed.fault.status, failed.fault.code) == (status, code)
    assert good.wait() == [DONE]
    assert engine.fault() is None
    assert (engine.stats().running, engine.stats().failed) == (0, 1)


def test_failures_tell_clients_nothing_of_the_inside(start: Callable[..., TurnEngine]) -> None:
    def turns(job: Job) -> Turns:
        yield None
        raise RuntimeError("secret path")

    inbox = Inbox()
    start(turns).submit(job(), inbox)
    (failed,) = inbox.wait()
    assert isinstance(failed, Failed) and "secret" not in failed.fault.message


def test_turns_that_end_without_a_finish_fail(start: Callable[..., TurnEngine]) -> None:
    inbox = Inbox()
    start(lambda job: iter([Text(text="half")])).submit(job(), inbox)
    assert isinstance(inbox.wait()[-1], Failed)


def test_deadline_ends_running_and_waiting_requests(start: Callable[..., TurnEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=1)
    running, waiting = Inbox(), Inbox()
    engine.submit(job("a", allowed_s=0.2), running)
    engine.submit(job("b", allowed_s=0.1), waiting)
    for inbox in (running, waiting):
        (failed,) = inbox.wait()
        assert isinstance(failed, Failed) and failed.fault.status == 504
    assert (engine.stats().running, engine.stats().queued) == (0, 0)


def test_stuck_turn_is_a_fault(start: Callable[..., TurnEngine]) -> None:
    release = threading.Event()

    def turns(job: Job) -> Turns:
        release.wait()
        yield DONE

    engine = start(turns, stall_timeout_s=0.05)
    assert engine.fault() is None
    inbox = Inbox()
    engine.submit(job(), inbox)
    wait_until(lambda: engine.fault() is not None, what="the fault")
    assert "stall_timeout_s" in str(engine.fault())
    release.set()
    inbox.wait()
    wait_until(lambda: engine.fault() is None, what="recovery")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_worker_is_a_fault_and_fails_what_it_had(start: Callable[..., TurnEngine]) -> None:
    class Unforeseen(Exception):
        pass

    def turns(job: Job) -> Turns:
        yield None
        raise Unforeseen

    engine = start(turns)
    inbox = Inbox()
    engine.submit(job(), inbox)
    (failed,) = inbox.wait()
    assert isinstance(failed, Failed)
    assert (failed.fault.status, failed.fault.code) == (503, "replica_unavailable")
    wait_until(lambda: engine.fault() is not None, what="the fault")
    with pytest.raises(ApiError, match="stopping"):
        engine.submit(job(), Inbox())


def test_closing_fails_what_is_left(start: Callable[..., TurnEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=1)
    inboxes = [Inbox(), Inbox()]
    for inbox in inboxes:
        engine.submit(job(), inbox)
    engine.close()
    assert all(isinstance(inbox.wait()[-1], Failed) for inbox in inboxes)


def test_leaving_the_events_cancels(start: Callable[..., TurnEngine]) -> None:
    def endless(job: Job) -> Turns:
        yield Started(documents=(), queue_s=0, extract_s=0, compose_s=0)
        while True:
            yield Text(text="x")

    engine = start(endless)

    async def leave() -> None:
        async with aclosing(answer_events(engine, job())) as events:
            async for event in events:
                if isinstance(event, Text):
                    break

    asyncio.run(leave())
    wait_until(lambda: engine.stats().running == 0, what="the place to be free")
    assert engine.stats().cancelled == 1


def test_event_loop_answers_while_the_model_works(start: Callable[..., TurnEngine]) -> None:
    release = threading.Event()

    def slow(job: Job) -> Turns:
        release.wait()
        yield DONE

    engine = start(slow)

    async def both() -> list[Event]:
        answer: asyncio.Task[Event] = asyncio.create_task(anext(aiter(answer_events(engine, job()))))  # type: ignore[arg-type]
        for _ in range(100):  # the loop goes round although a turn takes for ever
            await asyncio.sleep(0)
        assert not answer.done()
        release.set()
        return [await answer]

    assert asyncio.run(both()) == [DONE]


def test_client_that_leaves_frees_a_real_answer(world: World) -> None:
    service, engine = load_service(world.config(max_new_tokens_limit=4000))

    async def leave() -> None:
        request = ChatRequest.model_validate(ask_body(["oak"], max_tokens=3900))
        async with aclosing(service.answer(request)) as events:
            assert (await first_events(events, 1))[0]["event"] == "start"

    asyncio.run(leave())
    wait_until(lambda: engine.stats().running == 0, what="the place to be free")
    stats = engine.stats()
    assert (stats.cancelled, stats.finished) == (1, 0)
    assert ask(service, ["oak"]).text
    service.close()


def test_deadline_of_a_request_is_kept(world: World) -> None:
    service, engine = load_service(world.config(max_new_tokens_limit=4000))
    fault = asyncio.run(collect(service, ask_body(["oak"], max_tokens=3900, c2kv={"deadline_ms": 40}))).fault
    assert (fault["status"], fault["code"]) == (504, "deadline_exceeded")
    wait_until(lambda: engine.stats().running == 0, what="the place to be free")
    service.close()
