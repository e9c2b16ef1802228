"""The engine: turns, places, cancelling, deadlines, faults.

Where a real model adds nothing, turns are plain generators.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing

import pytest
import torch
from torch import Tensor

from c2kv_core.errors import ContextLengthError
from c2kv_core.sampling import SamplingParams
from serve_app.batch_engine import BatchEngine
from serve_app.engine import answer_events
from serve_app.errors import ApiError
from serve_app.jobs import LAST, Event, Failed, Finished, Job, Started, Step, Text, Turns
from serve_app.loading import load_service
from serve_app.places import Limits
from serve_app.protocol import ChatRequest
from tests.serve_support import World, ask, ask_body, collect, first_events, wait_until

pytest_plugins = ["tests.serve_support"]

DONE = Finished(reason="stop", completion_tokens=1)


def echo(steps: Sequence[Step]) -> Tensor:
    """Logits that say which token was sent."""
    return torch.tensor([[float(step.token)] for step in steps])


def job(name: str = "", *, allowed_s: float = 600.0, size: int = 1) -> Job:
    """A job whose only content is a name, carried in its stop strings, and a size."""
    return Job(
        prefix_ids=(),
        documents=(),
        question_ids=(1,),
        max_new_tokens=size,
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
        if isinstance(event, LAST):
            self.ended.set()

    def wait(self) -> list[Event]:
        assert self.ended.wait(60), "no end came"
        return self.events


@pytest.fixture
def start() -> Iterator[Callable[..., BatchEngine]]:
    engines: list[BatchEngine] = []

    def make(
        turns: Callable[[Job], Turns],
        step: Callable[[Sequence[Step]], Tensor] = echo,
        **changes: float,
    ) -> BatchEngine:
        settings = {"max_running": 2, "max_waiting": 2, "stall_timeout_s": 60.0, **changes}
        limits = Limits(
            max_running=int(settings["max_running"]),
            max_running_bytes=int(settings.get("max_running_bytes", 100)),
            max_waiting=int(settings["max_waiting"]),
        )
        engines.append(
            BatchEngine(
                turns,
                step,
                lambda job: job.max_new_tokens,
                limits=limits,
                stall_timeout_s=settings["stall_timeout_s"],
                retry_after_s=3,
            )
        )
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


def test_requests_that_are_being_prepared_take_turns(start: Callable[..., BatchEngine]) -> None:
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


def counting(job: Job) -> Turns:
    """Three tokens, each the logit of the one before, after as many pieces of preparation as its name says."""
    for _ in range(int(job.stop[0] or 0)):
        yield None
    token = job.max_new_tokens
    for _ in range(3):
        logits = yield Step(decoder=None, token=token)  # type: ignore[arg-type]
        assert logits is not None
        token = int(logits[0]) + 1
        yield Text(text=f"{token} ")
    yield DONE


def test_answers_that_have_begun_step_together(start: Callable[..., BatchEngine]) -> None:
    batches: list[list[int]] = []

    def step(steps: Sequence[Step]) -> Tensor:
        batches.append(sorted(step.token for step in steps))
        return echo(steps)

    engine = start(counting, step)
    inboxes = [Inbox(), Inbox()]
    with engine._changed:  # both are there when the worker looks
        engine.submit(job("0", size=10), inboxes[0])
        engine.submit(job("2", size=20), inboxes[1])
    assert [inbox.wait() for inbox in inboxes] == [
        [*(Text(text=f"{n} ") for n in (11, 12, 13)), DONE],
        [*(Text(text=f"{n} ") for n in (21, 22, 23)), DONE],
    ]
    # The first goes on while the second is prepared; then one step serves both; the second ends alone.
    assert batches == [[10], [11], [12], [20], [21], [22]] or batches[-1] == [22]
    assert [10] in batches and len(batches) < 7


def test_a_batch_that_fails_is_tried_one_by_one(start: Callable[..., BatchEngine]) -> None:
    def step(steps: Sequence[Step]) -> Tensor:
        if any(step.token == 20 for step in steps):
            raise RuntimeError("out of memory")
        return echo(steps)

    engine = start(counting, step)
    good, bad = Inbox(), Inbox()
    with engine._changed:
        engine.submit(job("0", size=10), good)
        engine.submit(job("0", size=20), bad)
    assert isinstance(bad.wait()[-1], Failed)
    assert good.wait()[-1] == DONE
    assert (engine.stats().finished, engine.stats().failed, engine.stats().running_bytes) == (1, 1, 0)


def test_requests_wait_until_their_memory_is_free(start: Callable[..., BatchEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=3, max_running_bytes=10)
    large, small, last = Inbox(), Inbox(), Inbox()
    engine.submit(job("large", size=8), large)
    engine.submit(job("small", size=5), small)
    ticket = engine.submit(job("tiny", size=1), last)  # would fit, and does not overtake
    wait_until(lambda: engine.stats().running == 1, what="a running request")
    assert (engine.stats().queued, engine.stats().running_bytes) == (2, 8)
    with pytest.raises(ApiError, match="the context needs") as refused:
        engine.submit(job("huge", size=11), Inbox())
    assert (refused.value.fault.status, refused.value.fault.code) == (400, "context_length_exceeded")
    gate.opened.set()
    for inbox in (large, small, last):
        assert inbox.wait() == [DONE]
    ticket.cancel()
    assert (engine.stats().running_bytes, engine.stats().finished) == (0, 3)


def test_no_more_run_than_there_are_places(start: Callable[..., BatchEngine]) -> None:
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


def test_requests_beyond_all_places_are_refused(start: Callable[..., BatchEngine]) -> None:
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


def test_cancelled_request_is_freed_and_its_place_given_away(start: Callable[..., BatchEngine]) -> None:
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


def test_cancelled_request_that_waits_is_gone_at_once(start: Callable[..., BatchEngine]) -> None:
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
    start: Callable[..., BatchEngine], error: Exception, status: int, code: str
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


def test_failures_tell_clients_nothing_of_the_inside(start: Callable[..., BatchEngine]) -> None:
    def turns(job: Job) -> Turns:
        yield None
        raise RuntimeError("secret path")

    inbox = Inbox()
    start(turns).submit(job(), inbox)
    (failed,) = inbox.wait()
    assert isinstance(failed, Failed) and "secret" not in failed.fault.message


def test_turns_that_end_without_a_finish_fail(start: Callable[..., BatchEngine]) -> None:
    def half(job: Job) -> Turns:
        yield Text(text="half")

    inbox = Inbox()
    start(half).submit(job(), inbox)
    assert isinstance(inbox.wait()[-1], Failed)


def test_deadline_ends_running_and_waiting_requests(start: Callable[..., BatchEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=1)
    running, waiting = Inbox(), Inbox()
    engine.submit(job("a", allowed_s=0.2), running)
    engine.submit(job("b", allowed_s=0.1), waiting)
    for inbox in (running, waiting):
        (failed,) = inbox.wait()
        assert isinstance(failed, Failed) and failed.fault.status == 504
    assert (engine.stats().running, engine.stats().queued) == (0, 0)


def test_stuck_turn_is_a_fault(start: Callable[..., BatchEngine]) -> None:
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
def test_dead_worker_is_a_fault_and_fails_what_it_had(start: Callable[..., BatchEngine]) -> None:
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


def test_closing_fails_what_is_left(start: Callable[..., BatchEngine]) -> None:
    gate = Gate()
    engine = start(gate.turns, max_running=1)
    inboxes = [Inbox(), Inbox()]
    for inbox in inboxes:
        engine.submit(job(), inbox)
    engine.close()
    assert all(isinstance(inbox.wait()[-1], Failed) for inbox in inboxes)


def test_leaving_the_events_cancels(start: Callable[..., BatchEngine]) -> None:
    def endless(job: Job) -> Turns:
        yield Started(documents=(), queue_s=0, extract_s=0, compose_s=0)
        while True:
            yield Text(text="x")
            yield Step(decoder=None, token=1)  # type: ignore[arg-type]

    engine = start(endless)

    async def leave() -> None:
        async with aclosing(answer_events(engine, job())) as events:
            async for event in events:
                if isinstance(event, Text):
                    break

    asyncio.run(leave())
    wait_until(lambda: engine.stats().running == 0, what="the place to be free")
    assert engine.stats().cancelled == 1


def test_event_loop_answers_while_the_model_works(start: Callable[..., BatchEngine]) -> None:
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
