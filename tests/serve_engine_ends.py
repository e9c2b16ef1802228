"""How an engine's work ends: faults of the worker, closing, clients that leave."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

import pytest
import torch

from c2kv_core.decode_batch import step_together
from serve_app.batch_engine import BatchEngine
from serve_app.engine import answer_events
from serve_app.errors import ApiError
from serve_app.jobs import Event, Failed, Job, Started, Step, Text, Turns
from serve_app.loading import load_service
from serve_app.protocol import ChatRequest
from tests.serve_engine_kit import DONE, Gate, Inbox, job
from tests.serve_support import World, ask, ask_body, collect, first_events, wait_until

pytest_plugins = ["tests.serve_support", "tests.serve_engine_kit"]


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
    wait_until(lambda: engine.stats().failed == len(inboxes), what="all to be counted")
    assert engine.stats().running_bytes == 0


def test_leaving_the_events_cancels(start: Callable[..., BatchEngine]) -> None:
    def endless(job: Job) -> Turns:
        yield Started(documents=(), queue_s=0, extract_s=0, compose_s=0)
        while True:
            yield Text(text="x")
            yield Step(decoder=None, ids=(1,))  # type: ignore[arg-type]

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


def test_the_models_thread_alone_computes_on_several_cores(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recording(*args: Any) -> Any:
        model.append(torch.get_num_threads())
        return step_together(*args)

    model: list[int] = []
    others: list[int] = []
    before = torch.get_num_threads()
    monkeypatch.setattr("serve_app.loading.step_together", recording)
    service, _ = load_service(world.config(torch_threads=3))
    try:
        ask(service, ["oak"])
        late = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
        late.start()
        late.join()
        ask(service, ["oak"])
    finally:
        service.close()
        torch.set_num_threads(before)
    assert set(model) == {3}
    assert others == [1], "a second pool would slow the model's down"


def test_deadline_of_a_request_is_kept(world: World) -> None:
    service, engine = load_service(world.config(max_new_tokens_limit=4000))
    fault = asyncio.run(collect(service, ask_body(["oak"], max_tokens=3900, c2kv={"deadline_ms": 40}))).fault
    assert (fault["status"], fault["code"]) == (504, "deadline_exceeded")
    wait_until(lambda: engine.stats().running == 0, what="the place to be free")
    service.close()


def test_two_hundred_clients_that_leave_leave_nothing_behind(world: World) -> None:
    service, engine = load_service(
        world.config(max_new_tokens_limit=4000, max_ongoing_requests=300, max_running=8)
    )

    async def leave(number: int) -> None:
        request = ChatRequest.model_validate(ask_body(["oak", "birch"], max_tokens=3900))
        async with aclosing(service.answer(request)) as events:
            if number % 2:  # every other one waits for its first token, if it comes
                with suppress(TimeoutError):
                    await asyncio.wait_for(anext(events), 0.5)
            else:
                asking = asyncio.ensure_future(anext(events))
                await asyncio.sleep(0.01)
                asking.cancel()
                with suppress(asyncio.CancelledError):
                    await asking

    async def all_leave() -> None:
        await asyncio.gather(*(leave(number) for number in range(200)))

    asyncio.run(all_leave())
    wait_until(lambda: engine.stats().running == engine.stats().queued == 0, what="all places to be free")
    stats = engine.stats()
    assert (stats.running_bytes, stats.finished, stats.failed) == (0, 0, 0)
    assert ask(service, ["oak"]).text
    service.close()
